"""The default pipelines: the one ordered list of passes, a reason beside each. The only place that names passes."""

from __future__ import annotations

from dataclasses import replace

from graphopt.ir.program import Stage
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
from graphopt.pipeline.pipeline import Pipeline
from graphopt.planner.decide import NO_REQUEST, MemoryRequest
from graphopt.precision import FULL, Precision


def forward_pipeline(precision: Precision = FULL) -> Pipeline:
    """What runs before differentiation; ``precision``: what to compute in."""
    return Pipeline(
        (
            DropDead(),  # first: what nobody asked for need not be looked at again
            RestoreAttention(),  # before differentiation: the backward of attention follows its forward form
            FuseLinearLoss(),  # before differentiation: the fused loss brings a backward of its own
            DropDead(),  # masks, repeated heads and logits that the two left behind
            *precision_passes(precision),
        )
    )


def precision_passes(precision: Precision) -> tuple[Pass, ...]:
    """The passes that lower the compute type; none for float32."""
    if not precision.lowers:
        return ()
    lower = LowerPrecision(precision.between, "|".join(precision.keep_fp32), precision.residual)
    # After what looks for patterns, which casts would hide; before differentiation: a gradient has its value's dtype.
    return (lower, DropDead())


def joint_pipeline(precision: Precision = FULL) -> Pipeline:
    """What runs on forward and backward together; ``precision``: what to compute in."""
    return Pipeline(
        (
            DropDead(),  # gradients of unrequested values
            FoldConstants(),  # before simplification: it sees through constants
            SimplifyAlgebra(),  # leaves identities behind
            FoldIdentities(),  # makes equal expressions look equal
            ScatterLossGradient(),  # losses that are not fused, because their logits are asked for
            Dedupe(),  # after folding, when equal means equal
            DropDead(),  # what the four left without users
            *fp8_passes(precision),
        )
    )


def fp8_passes(precision: Precision) -> tuple[Pass, ...]:
    """The passes that put matrix products into FP8; none unless it is asked for."""
    if precision.fp8 is None:
        return ()
    return (
        TagFp8(precision.fp8),  # behind what removes and merges: it counts the products that really run
        InsertQuantize(precision.fp8),  # acts on the tags
        FoldQuantize(),  # behind it: weights that are stored as FP8 codes are read as they are
        KeepQuantized(precision.fp8),  # knows which codes products read; before anything is dropped for memory
        DropDead(),  # copies in bfloat16 that nothing reads any more
    )


def step_pipeline(memory: MemoryRequest = NO_REQUEST) -> Pipeline:
    """What runs on the whole step, update included; ``memory``: the checkpoint policy and the budget."""
    return Pipeline(
        (
            *gradient_passes(memory),  # before merging, which would make the whole gradient with the loss
            MergeLossGradient(),  # here alone is it known that the gradient is taken in the same step
            Dedupe(),  # bias corrections and other numbers that parameters share
            DropDead(),  # their duplicates
            ScatterEmbeddingGradient(),  # behind the appended window too, which may be what rows are added to
            SkipGradientCasts(),  # before updates move: they go with the gradient that they read
            # After merging, which would make one of two casts; before updates move, which wait for the last of them.
            RecastWeights(memory.budget, memory.reserved_bytes, memory.margin_bytes),
            ReleaseGradients(),  # before writing in place, which it makes possible where the gradient is
            OrderForLifetime(),  # when updates are where they run; it counts on the writes in place that follow
            *memory_passes(memory),
            PrefetchState(),  # when nothing moves any more, so that a fetch is as far ahead as it was meant to be
            ReuseLastUse(),  # last but one: from here on the program writes in place
            BatchUpdates(),  # behind it: what writes in place needs no names for its results, and can be one call
        )
    )


def gradient_passes(memory: MemoryRequest) -> tuple[Pass, ...]:
    """The passes that let gradients come later, where computing again is asked for or may be."""
    if memory.budget is None and not memory.recomputes:
        return ()
    return (DeferHeadGradient(memory.budget, memory.reserved_bytes, memory.margin_bytes),)


def memory_passes(memory: MemoryRequest) -> tuple[Pass, ...]:
    """The passes that decide and act on what is kept for the backward part; none when nothing is asked for."""
    if memory.is_idle:
        return ()
    return (
        PackMasks(),  # gives the decision something smaller to keep of a draw, which cannot be repeated
        # After all that changes order or calls: it plans the peak of what really runs.
        DecideMemory(memory.policy, memory.budget, memory.reserved_bytes, memory.margin_bytes),
        Recompute(),  # before offload: a value that is dropped needs no place anywhere
        DropDead(),  # forward calls that only the backward part needed, which now has its own
        Offload(memory.prefetch),  # what is still kept; after it only memory is written again
    )


def default_pipeline(stage: Stage, memory: MemoryRequest = NO_REQUEST, precision: Precision = FULL) -> Pipeline:
    """The default pipeline of a stage."""
    if stage is Stage.STEP:
        return step_pipeline(memory)
    return forward_pipeline(precision) if stage is Stage.FORWARD else joint_pipeline(precision)


def with_less_room(pipeline: Pipeline, *, reserved_bytes: int, margin_bytes: int) -> Pipeline:
    """``pipeline`` deciding about memory beside ``reserved_bytes``, ``margin_bytes`` below the budget."""
    return Pipeline(
        tuple(
            replace(item, reserved_bytes=reserved_bytes, margin_bytes=margin_bytes)
            if isinstance(item, (DecideMemory, DeferHeadGradient, RecastWeights))
            else item
            for item in pipeline
        )
    )


def with_micro_steps(pipeline: Pipeline, count: int) -> Pipeline:
    """``pipeline`` for steps whose weights serve ``count`` micro-batches."""
    return Pipeline(tuple(replace(item, micro_steps=count) if isinstance(item, TagFp8) else item for item in pipeline))
