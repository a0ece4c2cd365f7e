"""A model's training graph, built and looked at without training: what ``graphopt dump`` and ``graphopt bisect`` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphopt.api import capture
from graphopt.build import Builder, bind_batch, training_program
from graphopt.ir.numeric import random_inputs
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import InputKind
from graphopt.options import DEFAULT_MAX_SIGNATURES, Accumulate, CompileOptions
from graphopt.pipeline.bisect import BisectResult, bisect
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.dump import Dump
from graphopt.pipeline.pass_base import Pass
from graphopt.pipeline.pipeline import Pipeline, Verify
from graphopt.precision import FULL, Precision, precision_for
from graphopt.report.build import build_report
from graphopt.report.data import Report

_STAGES = (Stage.FORWARD, Stage.JOINT, Stage.STEP)


def dump_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    outputs: Sequence[str],
    passes: Pipeline | None,
    directory: Path,
    precision: Precision = FULL,
) -> tuple[Path, Report]:
    """The folder of a new dump of forward and backward, and the report in it. ``passes`` None: the default ones."""
    Dump(directory)  # an unwritable folder is found before the model is captured
    options = CompileOptions(
        outputs=tuple(outputs),
        loss=None,
        optimizer=None,
        accumulate=Accumulate(1),
        clip_grad_norm=None,
        backend="aten",
        dump=directory,
        verify=Verify.STRUCTURE,
        passes=None if passes is None else stage_pipelines(passes),
        max_signatures=DEFAULT_MAX_SIGNATURES,
        precision=precision,
    )
    builder = Builder(model, options)
    wrt = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    built = builder.gradient(bind_batch(model, batch), wrt=wrt, title="forward-backward")
    executable = builder.module_step(built)
    assert built.dump is not None and built.dump.folder is not None, "the options ask for a dump"
    return built.dump.folder, build_report(executable)


def bisect_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    outputs: Sequence[str],
    passes: Pipeline | None,
    precision: Precision = FULL,
) -> BisectResult:
    """The first broken pass on the model's own parameters and batch: forward passes, then joint, then step ones.

    ``passes`` None: the default ones of ``precision``.
    """
    wanted = precision_for(model, precision)
    if passes is not None:
        pipelines = stage_pipelines(passes)
    else:
        forward, joint, step = (default_pipeline(stage, precision=wanted) for stage in _STAGES)
        pipelines = forward, joint, step
    num_passes, num_before = sum(map(len, pipelines)), 0
    program = capture(model, batch, outputs=outputs)
    for pipeline, stage in zip(pipelines, _STAGES, strict=True):
        if stage is Stage.JOINT:
            program = training_program(model, batch, outputs=outputs, precision=wanted)
        program = program.copy()
        program.stage = stage
        found = bisect(program, pipeline, inputs=known_inputs(program, model, batch))
        if found.position is not None:
            return replace(found, num_passes=num_passes, position=num_before + found.position)
        program, num_before = found.program, num_before + len(pipeline)
    return BisectResult(num_passes, program)


def stage_pipelines(passes: Pipeline) -> tuple[Pipeline, Pipeline, Pipeline]:
    """The passes of the forward, joint and step stages; one for ANY runs on the joint program, or last if in place."""

    def stage_of(item: Pass) -> Stage:
        if item.stage is not Stage.ANY:
            return item.stage
        return Stage.STEP if item.in_place else Stage.JOINT

    forward, joint, step = (Pipeline(tuple(item for item in passes if stage_of(item) is stage)) for stage in _STAGES)
    return forward, joint, step


def known_inputs(program: Program, model: torch.nn.Module, batch: Any) -> tuple[Any, ...]:
    """Inputs for ``program``: the model's parameters and buffers and the batch; random numbers for the rest."""
    bound = bind_batch(model, batch)
    known: dict[InputKind, dict[str, torch.Tensor]] = {
        InputKind.PARAM: dict(model.named_parameters(remove_duplicate=False)),
        InputKind.BUFFER: dict(model.named_buffers(remove_duplicate=False)),
        InputKind.BATCH: dict(zip(bound.names, bound.tensors, strict=True)),
    }
    pairs = zip(program.signature.inputs, random_inputs(program), strict=True)
    values = (known.get(entry.kind, {}).get(entry.name, number) for entry, number in pairs)
    return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)
