"""One model and one batch on which training steps are measured: the peers, and graphopt after each pass."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from benchmarks.measure import (
    StepMemory,
    interleaved_seconds,
    measure_step,
    median_seconds,
    model_tensors,
    saved_by_autograd,
)
from benchmarks.memory_settings import MemorySetting
from benchmarks.models import Batch
from benchmarks.peers import (
    EAGER,
    GRAPHOPT,
    TORCH_COMPILE,
    Contender,
    eager_contender,
    graphopt_step,
    torch_compile_contender,
    train_step_contender,
)
from benchmarks.prefixes import PassPrefix, prefix_step
from benchmarks.rows import MemoryFigures
from graphopt.errors import GraphoptError
from graphopt.execute.step import TrainStep
from graphopt.ir.liveness import saved_bytes

_NOTE_LENGTH = 200


class StepBench:
    """Measures steps of ``model`` on ``batch``. Eager's loop runs in every round beside what is measured."""

    def __init__(self, model: nn.Module, batch: Batch, outputs: Sequence[str], *, rounds: int) -> None:
        self.model = model
        self.batch = batch
        self.outputs = tuple(outputs)
        self.rounds = rounds
        self.eager = eager_contender(model, batch)

    def peers(self, *, compile_peer: bool) -> tuple[MemoryFigures, ...]:
        """Figures of eager, torch.compile and graphopt as users call them, timed in the same rounds."""
        step = graphopt_step(self.model, self.outputs)
        figures = {EAGER: self._autograd_memory(self.eager)}
        contenders = {EAGER: self.eager}
        if compile_peer:
            contenders[TORCH_COMPILE] = torch_compile_contender(self.model, self.batch)
            figures[TORCH_COMPILE] = self._foreign_memory(contenders[TORCH_COMPILE])
        contenders[GRAPHOPT] = train_step_contender(step, self.batch)
        figures[GRAPHOPT] = with_plan(self._memory(contenders[GRAPHOPT], MemoryFigures("peer", GRAPHOPT)), step)
        running = {name: contender for name, contender in contenders.items() if not figures[name].note}
        timed = self._timed(running, figures)
        torch._dynamo.reset()
        return tuple(timed.values())

    def prefix(self, prefix: PassPrefix) -> MemoryFigures:
        """Figures of the step after the passes of ``prefix``."""
        gc.collect()
        step = prefix_step(prefix, self.model, self.outputs)
        contender = train_step_contender(step, self.batch)
        start = MemoryFigures("pass", prefix.name, position=prefix.position, stage=prefix.stage)
        figures = with_plan(self._memory(contender, start), step)
        return self._timed({EAGER: self.eager, GRAPHOPT: contender}, {GRAPHOPT: figures})[GRAPHOPT]

    def setting(self, setting: MemorySetting) -> MemoryFigures:
        """Figures of the whole product told to use memory as ``setting`` says; a refusal becomes the row's note."""
        gc.collect()
        start = MemoryFigures("setting", setting.name)
        try:
            step = graphopt_step(self.model, self.outputs, **setting.options)
            contender = train_step_contender(step, self.batch)
            figures = with_plan(self._memory(contender, start), step)
        except GraphoptError as error:
            return replace(start, note=first_line(error))
        return self._timed({EAGER: self.eager, GRAPHOPT: contender}, {GRAPHOPT: figures})[GRAPHOPT]

    def _autograd_memory(self, contender: Contender) -> MemoryFigures:
        assert contender.forward is not None, "autograd takes part"
        figures = self._memory(contender, MemoryFigures("peer", contender.name))
        resident = tuple(model_tensors(self.model, self.batch))
        return replace(figures, saved_bytes=saved_by_autograd(contender.forward, resident=resident))

    def _foreign_memory(self, contender: Contender) -> MemoryFigures:
        try:
            return self._autograd_memory(contender)
        except Exception as error:  # whatever a foreign compiler raises is its result
            self.model.zero_grad(set_to_none=True)
            return MemoryFigures("peer", contender.name, note=first_line(error))

    def _memory(self, contender: Contender, figures: MemoryFigures) -> MemoryFigures:
        memory: StepMemory = measure_step(contender, self.model, self.batch)
        return replace(
            figures,
            measured_peak_bytes=memory.peak_bytes,
            resting_bytes=memory.resting_bytes,
            first_step_seconds=memory.first_step_seconds,
        )

    def _timed(self, contenders: dict[str, Contender], figures: dict[str, MemoryFigures]) -> dict[str, MemoryFigures]:
        """``figures`` with the seconds of those in ``contenders``; the others stay as they are."""
        steps = {name: contender.step for name, contender in contenders.items()}
        seconds = median_seconds(interleaved_seconds(steps, self.rounds))
        return {
            name: replace(found, step_seconds=seconds[name], eager_seconds=seconds[EAGER], rounds=self.rounds)
            if name in seconds
            else found
            for name, found in figures.items()
        }


def with_plan(figures: MemoryFigures, step: TrainStep) -> MemoryFigures:
    """``figures`` with what the plan of the step that ran last says."""
    executable = step.last_executable
    assert executable is not None, "the step has run"
    history = executable.program.history
    return replace(
        figures,
        changes=history[-1].changes if history else 0,
        num_ops=len(executable.program.ops()),
        estimated_peak_bytes=executable.plan.peak_bytes,
        saved_bytes=saved_bytes(executable.program),
    )


def first_line(error: Exception) -> str:
    """What went wrong, short enough for a table."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"[:_NOTE_LENGTH]
