"""The default pipelines: the one ordered list of passes, a reason beside each. The only place that names passes."""

from __future__ import annotations

from graphopt.ir.program import Stage
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.fold_constants import FoldConstants
from graphopt.passes.fold_identities import FoldIdentities
from graphopt.passes.offload import Offload
from graphopt.passes.restore_attention import RestoreAttention
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.passes.simplify_algebra import SimplifyAlgebra
from graphopt.pipeline.pipeline import Pipeline


def forward_pipeline() -> Pipeline:
    """What runs before differentiation."""
    return Pipeline(
        (
            DropDead(),  # first: what nobody asked for need not be looked at again
            RestoreAttention(),  # before differentiation: the backward of attention follows its forward form
            DropDead(),  # masks and repeated heads that restored attention left behind
        )
    )


def joint_pipeline() -> Pipeline:
    """What runs on forward and backward together."""
    return Pipeline(
        (
            DropDead(),  # gradients of unrequested values
            FoldConstants(),  # before simplification: it sees through constants
            SimplifyAlgebra(),  # leaves identities behind
            FoldIdentities(),  # makes equal expressions look equal
            Dedupe(),  # after folding, when equal means equal
            DropDead(),  # what the four left without users
        )
    )


def step_pipeline() -> Pipeline:
    """What runs on the whole step, update included."""
    return Pipeline(
        (
            Dedupe(),  # bias corrections and other numbers that parameters share
            DropDead(),  # their duplicates
            Offload(),  # executes decisions; after dedupe, so that names are final, and before memory is written again
            ReuseLastUse(),  # last: from here on the program writes in place
        )
    )


def default_pipeline(stage: Stage) -> Pipeline:
    """The default pipeline of a stage."""
    return {
        Stage.FORWARD: forward_pipeline,
        Stage.JOINT: joint_pipeline,
        Stage.STEP: step_pipeline,
    }[stage]()
