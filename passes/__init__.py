"""The passes that ship with graphopt: one pass, one file, the file named as the pass."""

from __future__ import annotations

from collections.abc import Mapping

from graphopt.passes.batch_updates import BatchUpdates
from graphopt.passes.decide_memory import DecideMemory
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.defer_head_gradient import DeferHeadGradient
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.fold_constants import FoldConstants
from graphopt.passes.fold_identities import FoldIdentities
from graphopt.passes.fold_quantize import FoldQuantize
from graphopt.passes.fuse_linear_loss import FuseLinearLoss
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.passes.keep_quantized import KeepQuantized
from graphopt.passes.lower_precision import LowerPrecision
from graphopt.passes.merge_loss_gradient import MergeLossGradient
from graphopt.passes.offload import Offload
from graphopt.passes.order_for_lifetime import OrderForLifetime
from graphopt.passes.pack_masks import PackMasks
from graphopt.passes.prefetch_state import PrefetchState
from graphopt.passes.recast_weights import RecastWeights
from graphopt.passes.recompute import Recompute
from graphopt.passes.release_gradients import ReleaseGradients
from graphopt.passes.restore_attention import RestoreAttention
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.passes.scatter_embedding_gradient import ScatterEmbeddingGradient
from graphopt.passes.scatter_loss_gradient import ScatterLossGradient
from graphopt.passes.simplify_algebra import SimplifyAlgebra
from graphopt.passes.skip_gradient_casts import SkipGradientCasts
from graphopt.passes.tag_fp8 import TagFp8
from graphopt.pipeline.pass_base import Pass

BY_NAME: Mapping[str, type[Pass]] = {
    "batch-updates": BatchUpdates,
    "decide-memory": DecideMemory,
    "dedupe": Dedupe,
    "defer-head-gradient": DeferHeadGradient,
    "drop-dead": DropDead,
    "fold-constants": FoldConstants,
    "fold-identities": FoldIdentities,
    "fold-quantize": FoldQuantize,
    "fuse-linear-loss": FuseLinearLoss,
    "insert-quantize": InsertQuantize,
    "keep-quantized": KeepQuantized,
    "lower-precision": LowerPrecision,
    "merge-loss-gradient": MergeLossGradient,
    "offload": Offload,
    "order-for-lifetime": OrderForLifetime,
    "pack-masks": PackMasks,
    "prefetch-state": PrefetchState,
    "recast-weights": RecastWeights,
    "recompute": Recompute,
    "release-gradients": ReleaseGradients,
    "restore-attention": RestoreAttention,
    "reuse-last-use": ReuseLastUse,
    "scatter-embedding-gradient": ScatterEmbeddingGradient,
    "scatter-loss-gradient": ScatterLossGradient,
    "simplify-algebra": SimplifyAlgebra,
    "skip-gradient-casts": SkipGradientCasts,
    "tag-fp8": TagFp8,
}
"""Every pass by its name, in alphabetical order; a literal, so that an editable install finds what a wheel finds."""
