"""One model and one batch: peak and time of eager, of its peers, and of graphopt under policies and budgets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from benchmarks.frontier_rows import AT_PEAK, AT_SMALL_SHARE, KEEP, SMALL_SHARE, SMALLEST, FrontierFigures, PointKey
from benchmarks.measure import WARM_UP_STEPS, interleaved_seconds, measure_step, storage_bytes
from benchmarks.memory_peers import GRADIENT_CHECKPOINTING, MakeContender
from benchmarks.memory_settings import MemorySetting
from benchmarks.models import Batch
from benchmarks.peers import EAGER, GRAPHOPT, Contender, eager_contender, graphopt_step, train_step_contender
from benchmarks.steps import first_line
from graphopt.errors import BudgetError
from graphopt.execute.step import TrainStep

# No step fits, so the error tells the smallest budget that does.
_LEAST_BUDGET = 1

Figures = FrontierFigures
Done = Mapping[PointKey, Figures]


@dataclass(frozen=True)
class FrontierPlan:
    """What to run. ``points``: budgets from the smallest feasible up to, but without, what keeping everything takes.
    ``policies`` are timed beside gradient checkpointing, whose like they are."""

    outputs: tuple[str, ...]
    backends: tuple[str, ...]
    peers: Mapping[str, MakeContender]
    policies: tuple[MemorySetting, ...]
    points: int
    rounds: int


class FrontierBench:
    """Measures one point after the other; besides eager, and the peer that a point is compared with, nothing else is
    held meanwhile. All train one and the same model, each with an optimizer state of its own.

    ``done``: rows of a run that was cut short, which are taken over as they are.
    """

    def __init__(self, model: nn.Module, batch: Batch, plan: FrontierPlan, done: Done | None = None) -> None:
        self.model = model
        self.batch = batch
        self.plan = plan
        self.done = done or {}
        self.eager = eager_contender(model, batch)
        self.eager_is_warm = False

    def measure(self) -> Iterator[Figures]:
        """All rows: eager, then graphopt's own frontier for each backend, then every peer with what is beside it."""
        yield self._row(Figures(EAGER), lambda: self.eager)
        inputs: dict[str, int] = {}
        for backend in self.plan.backends:
            keep = self._own(Figures(GRAPHOPT, backend, KEEP), {})
            yield keep
            if keep.peak_bytes is not None and keep.input_bytes is not None:
                inputs[backend] = keep.input_bytes
                yield from self._budgets(backend, keep.peak_bytes + keep.input_bytes)
        for name, make in self.plan.peers.items():
            yield from self._peer(name, make, inputs)

    def _budgets(self, backend: str, keep_bytes: int) -> Iterator[Figures]:
        """Budgets at equal distances below ``keep_bytes``, what the whole step takes if nothing is dropped."""
        start = Figures(GRAPHOPT, backend, SMALLEST)
        smallest = self.done[start.key].budget_bytes if start.key in self.done else self._smallest_budget(backend)
        if smallest is None:
            yield self.done.get(start.key, replace(start, note="every budget was met, so there is no smallest one"))
            return
        for number in range(self.plan.points):
            budget = smallest + (keep_bytes - smallest) * number // self.plan.points
            setting = SMALLEST if number == 0 else f"budget {number + 1} of {self.plan.points}"
            yield self._own(Figures(GRAPHOPT, backend, setting, budget_bytes=budget), {"memory": budget})
            if smallest >= keep_bytes:
                return

    def _smallest_budget(self, backend: str) -> int | None:
        try:
            self._make_step(backend, {"memory": _LEAST_BUDGET})(**self.batch)
        except BudgetError as error:
            return error.smallest_bytes
        return None

    def _peer(self, name: str, make: MakeContender, inputs: Mapping[str, int]) -> Iterator[Figures]:
        """The row of a peer and, while it is there to be timed beside them, those at its peak."""
        torch._dynamo.reset()
        peer = _LatePeer(lambda: make(self.model, self.batch))
        figures = self._row(Figures(name), lambda: peer.contender)
        yield figures
        if figures.peak_bytes is not None:
            for backend, input_bytes in inputs.items():
                for setting, share in _shares(name):
                    budget = input_bytes + round(share * figures.peak_bytes)
                    start = Figures(GRAPHOPT, backend, setting, name, budget_bytes=budget)
                    yield self._own(start, {"memory": budget}, beside=peer)
        if name == GRADIENT_CHECKPOINTING:
            for backend in inputs:
                for policy in self.plan.policies:
                    start = Figures(GRAPHOPT, backend, policy.name, name)
                    yield self._own(start, policy.options, beside=None if figures.note else peer)
        torch._dynamo.reset()

    def _own(self, start: Figures, options: dict[str, Any], *, beside: _LatePeer | None = None) -> Figures:
        """The row of graphopt compiled with ``options``."""
        step: list[TrainStep] = []

        def make() -> Contender:
            step.append(self._make_step(start.backend, options))
            return train_step_contender(step[0], self.batch)

        figures = self._row(start, make, beside=beside)
        return with_plan(figures, step[0]) if step and figures.peak_bytes is not None else figures

    def _make_step(self, backend: str, options: dict[str, Any]) -> TrainStep:
        return graphopt_step(self.model, self.plan.outputs, backend=backend, **options)

    def _row(self, start: Figures, make: Callable[[], Contender], *, beside: _LatePeer | None = None) -> Figures:
        """``start`` with its figures; whatever stops a contender becomes the note of its row."""
        if start.key in self.done:
            return self.done[start.key]
        gc.collect()
        try:
            if beside is not None:
                beside.warm_up()
            return self._measured(start, make(), beside)
        except Exception as error:  # a failure is the contender's result; the others are still to be measured
            self.model.zero_grad(set_to_none=True)
            return replace(start, note=first_line(error))

    def _measured(self, start: Figures, contender: Contender, beside: _LatePeer | None) -> Figures:
        with fresh_cache():  # nothing that Inductor compiled for an earlier row shortens a first step
            memory = measure_step(contender, self.model, self.batch)
        steps = {EAGER: self.eager.step, **({start.beside: beside.contender.step} if beside is not None else {})}
        if not self.eager_is_warm:
            interleaved_seconds({EAGER: self.eager.step}, WARM_UP_STEPS)
            self.eager_is_warm = True
        label = start.label
        seconds = interleaved_seconds({**steps, label: contender.step}, self.plan.rounds)
        return replace(
            start,
            peak_bytes=memory.peak_bytes,
            resting_bytes=memory.resting_bytes,
            first_step_seconds=memory.first_step_seconds,
            own_seconds=seconds[label],
            eager_seconds=seconds[EAGER],
            beside_seconds=seconds[start.beside] if beside is not None else (),
        )


class _LatePeer:
    """A peer that is made when it is first needed: a run that goes on with old rows may not need it at all."""

    def __init__(self, make: Callable[[], Contender]) -> None:
        self._make = make
        self._made: Contender | None = None
        self._is_warm = False

    @property
    def contender(self) -> Contender:
        """The peer; who asks for it runs it, so it is taken to be warm."""
        if self._made is None:
            self._made = self._make()
        self._is_warm = True
        return self._made

    def warm_up(self) -> None:
        """Run the peer until its steps are steady, if it has not run yet."""
        if not self._is_warm:
            interleaved_seconds({"warm up": self.contender.step}, WARM_UP_STEPS)


def with_plan(figures: Figures, step: TrainStep) -> Figures:
    """``figures`` with what the plan of ``step`` says, and the constants of its graph counted into the peak."""
    executable = step.last_executable
    assert executable is not None and figures.peak_bytes is not None, "the step has run"
    program, plan = executable.program, executable.plan
    constants = storage_bytes(program.constant(node) for node in program.constants())
    return replace(
        figures,
        peak_bytes=figures.peak_bytes + constants,
        predicted_peak_bytes=plan.peak_bytes + constants,
        constant_bytes=constants,
        input_bytes=plan.resident_bytes - constants,
    )


def num_rows(plan: FrontierPlan) -> int:
    """How many rows ``FrontierBench.measure`` gives if nothing fails."""
    beside = sum(len(_shares(name)) for name in plan.peers)
    policies = len(plan.policies) if GRADIENT_CHECKPOINTING in plan.peers else 0
    return 1 + len(plan.peers) + len(plan.backends) * (1 + plan.points + beside + policies)


def _shares(peer: str) -> tuple[tuple[str, float], ...]:
    at_peak = ((AT_PEAK, 1.0),)
    return (*at_peak, (AT_SMALL_SHARE, SMALL_SHARE)) if peer == GRADIENT_CHECKPOINTING else at_peak
