"""The public functions: compile, capture, optimize."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from graphopt.build import Builder, bind_batch
from graphopt.capture.export import OutputRequest, capture_program
from graphopt.capture.function_module import as_module
from graphopt.checkpoint import policy_of
from graphopt.errors import OutputError, UnsupportedError
from graphopt.execute.module import CompiledModule
from graphopt.execute.step import TrainStep
from graphopt.fp8 import Recipe
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import OutputKind
from graphopt.loss_scale import LossScale, loss_scale_of
from graphopt.optim.base import Optimizer
from graphopt.options import DEFAULT_MAX_SIGNATURES, Accumulate, CompileOptions
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pass_base import Pass
from graphopt.pipeline.pipeline import Pipeline, Verify
from graphopt.planner.decide import MemoryRequest, check_budget
from graphopt.precision import Precision, precision_of

DUMP_VARIABLE = "GRAPHOPT_DUMP"

Passes = str | Pipeline | Sequence[Pass]


def compile(
    model: torch.nn.Module | Callable[..., Any],
    outputs: Sequence[str] | None = None,
    *,
    loss: str | Callable[[Any, Any], Any] | None = None,
    optimizer: Optimizer | None = None,
    accumulate: int | Accumulate = 1,
    clip_grad_norm: float | None = None,
    precision: str | Precision | Recipe = "fp32",
    loss_scale: str | float | LossScale | None = "auto",
    checkpoint: Any = None,
    memory: Any = None,
    backend: str = "auto",
    dump: str | Path | None = None,
    verify: str = "structure",
    passes: Passes | None = None,
    max_signatures: int = DEFAULT_MAX_SIGNATURES,
    release_gradients: bool = True,
) -> Any:
    """A compiled training step (with ``optimizer``) or a compiled module whose ``backward()`` fills ``.grad``.

    ``outputs``: names of what is required (None: every tensor the model returns); everything else may be removed.
    ``loss``: the name of the loss among the outputs (default "loss"), or ``function(outputs, batch)`` that computes it.
    ``accumulate``: micro-batches per update, or an ``Accumulate``. ``clip_grad_norm``: largest global gradient norm.
    ``precision``: "fp32", "bf16", "fp16", "fp8", a ``graphopt.fp8`` recipe or a ``Precision``; parameters keep theirs.
    ``loss_scale``: "dynamic", a number or a ``LossScale``: what the loss is multiplied by before backward, which the
    update undoes; None for nothing; "auto" is "dynamic" where ``precision`` computes in float16 and None elsewhere.
    ``checkpoint``: a policy such as ``graphopt.checkpoint.SqrtN()`` (several in a list), which says what the backward
    part computes again or brings back from host memory. ``memory``: the most bytes that the whole step may take,
    parameters, state and all, as a number, text such as "6GiB", or a ``Fraction`` of what it takes without; the planner
    then chooses what to compute again. BudgetError names the smallest feasible budget if it cannot be met.
    ``dump``: a folder for program texts, emitted code and reports (default: the variable GRAPHOPT_DUMP).
    ``verify``: "structure", "infer" or "numeric", how much each pass is checked. ``passes``: passes beyond the default
    ones, as text or values, run at the stage each names (ANY: on the joint program). ``release_gradients``: whether
    each parameter is updated as soon as its gradient is complete (less memory; False: a failure before the last part of
    a step leaves everything as it was).

    Compiling happens at the first batch. Raises UnsupportedError for options that this version does not have.
    """
    policy, budget, requested = policy_of(checkpoint), check_budget(memory), precision_of(precision)
    _refuse_other_optimizer(optimizer)
    options = CompileOptions(
        outputs=_names(outputs),
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulate if isinstance(accumulate, Accumulate) else Accumulate(accumulate),
        clip_grad_norm=clip_grad_norm,
        backend=backend,
        dump=_writable(dump if dump is not None else os.environ.get(DUMP_VARIABLE) or None),
        verify=Verify(verify),
        passes=None if passes is None else _extended(passes, MemoryRequest(policy, budget), requested),
        max_signatures=max_signatures,
        checkpoint=policy,
        memory=budget,
        release_gradients=release_gradients,
        precision=requested,
        loss_scale=_loss_scale(loss_scale, requested, optimizer),
    )
    builder = Builder(as_module(model), options)
    return CompiledModule(builder) if optimizer is None else TrainStep(builder)


def capture(
    model: torch.nn.Module | Callable[..., Any],
    batch: Any,
    *,
    outputs: Sequence[str] | None = None,
    loss: str | Callable[[Any, Any], Any] | None = None,
) -> Program:
    """The forward Program of ``model`` for ``batch`` (dict: keywords; tuple: positions; a tensor: the only input)."""
    module = as_module(model)
    bound = bind_batch(module, batch, allow_extra=callable(loss))
    return capture_program(module, bound, OutputRequest(_names(outputs), loss)).program


def optimize(
    program: Program,
    passes: Passes | None = None,
    *,
    outputs: Sequence[str] | None = None,
    verify: str = "structure",
) -> Program:
    """A new Program after ``passes`` (None: the default ones of its stage), with a record of each in ``history``.

    ``outputs``: the user outputs that stay required (None: all); gradients and updates always stay.
    """
    pipeline = default_pipeline(program.stage) if passes is None else _as_pipeline(passes)
    if outputs is not None:
        program = _with_outputs(program, outputs)
    return pipeline.run(program, verify=verify)


def _with_outputs(program: Program, outputs: Sequence[str]) -> Program:
    there = [output.name for _, output in program.signature.outputs_of(OutputKind.USER)]
    unknown = [name for name in outputs if name not in there]
    if unknown:
        raise OutputError(f"the program has no output {', '.join(map(repr, unknown))}; there are {there}")
    narrowed = program.copy()
    kept = [
        (value, output)
        for value, output in zip(program.copy().output_values(), program.signature.outputs, strict=True)
        if output.kind is not OutputKind.USER or output.name in outputs
    ]
    by_name = {node.name: node for node in narrowed.graph.nodes}
    narrowed.set_outputs([by_name[value.name] for value, _ in kept], [output for _, output in kept])
    narrowed.finish()
    return narrowed


def _refuse_other_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"optimizer expects a graphopt.optim value such as graphopt.optim.AdamW(lr=1e-4), came "
            f"{type(optimizer).__name__}; a torch optimizer works with the compiled module: leave optimizer out"
        )


def _loss_scale(value: Any, precision: Any, optimizer: Optimizer | None) -> LossScale | None:
    if optimizer is not None:
        return loss_scale_of(value, precision=precision)
    if value not in ("auto", None):
        raise UnsupportedError(
            f"loss_scale={value!r} is undone in the update and needs optimizer=; without it, scale the loss before "
            "backward() and unscale with torch.amp.GradScaler"
        )
    return None


def _names(outputs: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(outputs, str):
        raise OutputError(f"outputs expects a list of names, came the string {outputs!r}: write outputs=[{outputs!r}]")
    if outputs is None:
        return None
    if not outputs:
        raise OutputError("outputs is empty: name at least one output, such as outputs=['loss']")
    return tuple(outputs)


def _as_pipeline(passes: Passes) -> Pipeline:
    if isinstance(passes, str):
        return Pipeline.parse(passes)
    return passes if isinstance(passes, Pipeline) else Pipeline(tuple(passes))


def _extended(passes: Passes, memory: MemoryRequest, precision: Precision) -> tuple[Pipeline, Pipeline, Pipeline]:
    """The default pipelines of forward, joint and step, with ``passes`` added behind those of their stage."""
    added = _as_pipeline(passes).passes
    result = []
    for stage in (Stage.FORWARD, Stage.JOINT, Stage.STEP):
        own = [item for item in added if item.stage == stage or (item.stage == Stage.ANY and stage is Stage.JOINT)]
        default = list(default_pipeline(stage, memory, precision).passes)
        # Behind the functional passes, before the one that writes in place.
        tail = [item for item in default if item.in_place]
        result.append(Pipeline((*(item for item in default if not item.in_place), *own, *tail)))
    return result[0], result[1], result[2]


def _writable(folder: str | Path | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".graphopt-write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UnsupportedError(f"dump={str(folder)!r} cannot be written ({error}); give a folder that can") from error
    return path


__all__ = ["capture", "compile", "optimize"]
