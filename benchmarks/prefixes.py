"""Every prefix of the whole pipeline as options of a real compiled step: nothing is assembled by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

import graphopt
from graphopt.build import Builder
from graphopt.execute.step import TrainStep
from graphopt.ir.program import Stage
from graphopt.options import Accumulate, CompileOptions
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline, Verify

STAGES = (Stage.FORWARD, Stage.JOINT, Stage.STEP)
NO_PASS = "no pass"


@dataclass(frozen=True)
class PassPrefix:
    """The first ``position`` passes of the whole pipeline, split by stage; ``name`` is the last one's."""

    position: int
    name: str
    stage: str
    pipelines: tuple[Pipeline, Pipeline, Pipeline]


def pass_prefixes() -> tuple[PassPrefix, ...]:
    """From no pass at all (captured, differentiated, update appended) to the whole default pipeline."""
    pipelines = [default_pipeline(stage) for stage in STAGES]
    prefixes = [_prefix(pipelines, 0, NO_PASS, "")]
    for stage, pipeline in zip(STAGES, pipelines, strict=True):
        for item in pipeline:
            prefixes.append(_prefix(pipelines, len(prefixes), item.name, str(stage)))
    return tuple(prefixes)


def prefix_step(prefix: PassPrefix, model: nn.Module, outputs: Sequence[str]) -> TrainStep:
    """The training step that ``graphopt.compile`` would give if its pipeline ended there."""
    options = CompileOptions(
        outputs=tuple(outputs),
        loss=None,
        optimizer=graphopt.optim.AdamW(),
        accumulate=Accumulate(1),
        clip_grad_norm=None,
        backend="aten",
        dump=None,
        verify=Verify.STRUCTURE,
        passes=prefix.pipelines,
        max_signatures=1,
    )
    return TrainStep(Builder(model, options))


def _prefix(pipelines: Sequence[Pipeline], position: int, name: str, stage: str) -> PassPrefix:
    left = position
    parts = []
    for pipeline in pipelines:
        parts.append(Pipeline(pipeline.passes[:left]))
        left = max(0, left - len(pipeline))
    forward, joint, step = parts
    return PassPrefix(position, name, stage, (forward, joint, step))
