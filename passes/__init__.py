"""The passes that ship with graphopt: one pass, one file, the file named as the pass."""

from __future__ import annotations

from collections.abc import Mapping

from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.fold_constants import FoldConstants
from graphopt.passes.fold_identities import FoldIdentities
from graphopt.passes.offload import Offload
from graphopt.passes.restore_attention import RestoreAttention
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.passes.simplify_algebra import SimplifyAlgebra
from graphopt.pipeline.pass_base import Pass

BY_NAME: Mapping[str, type[Pass]] = {
    "dedupe": Dedupe,
    "drop-dead": DropDead,
    "fold-constants": FoldConstants,
    "fold-identities": FoldIdentities,
    "offload": Offload,
    "restore-attention": RestoreAttention,
    "reuse-last-use": ReuseLastUse,
    "simplify-algebra": SimplifyAlgebra,
}
"""Every pass by its name, in alphabetical order; a literal, so that an editable install finds what a wheel finds."""
