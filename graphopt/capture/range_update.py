"""The update of a range of one parameter's elements as a program, and the operator that runs it range by range.

All that an update does is done to each element, or each block of elements, for itself. So the update of a whole
parameter is that of its ranges, one after the other, if each begins at a block; and one program without any shape in
it, written for flat tensors, serves ranges of every size.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.capture.page_layout import PageLayout, page_layout
from graphopt.capture.parameter_update import GradientSource, ParameterWriter, UpdatedParameter, seed_of
from graphopt.capture.trace import fake_like
from graphopt.capture.update_bucket import UpdateBucket
from graphopt.errors import StateError
from graphopt.ir.program import Program, scalar_input
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, TensorSpec
from graphopt.operators.paged_update import PAGED_UPDATE
from graphopt.optim.base import Emit, Optimizer

aten = torch.ops.aten

PAGES = "pages"
"""The name of the state that holds all other state of a parameter."""

PARAMETER, GRADIENT, FACTOR, SEED, OFFSET = "parameter", "gradient", "factor", "seed", "offset"

RANGE_ELEMENTS = 1 << 18
"""Elements of a range. In float32 Adam that is 2 MiB of state: large enough for a copy over PCIe or from a disk at full
speed, and small enough that range, gradient and what the rule computes stay in a core's cache."""

_VECTOR_ELEMENTS = 256
"""Ranges begin at multiples, so that each element is computed by the same loop, vectorised or not, as in the whole: the
longest step of ATen's loops is two vectors of 64 bytes, 128 elements of one byte."""

_NOMINAL_ELEMENTS = 4 * _VECTOR_ELEMENTS
"""What the program is written for; nothing in it depends on that."""


@dataclass(frozen=True)
class RangeRule:
    """All that decides which operators update a range: the same for many parameters, steps and processes.

    ``divides``: the gradient is divided by the factor, not multiplied; ``widens``: in at least float32.
    """

    optimizer: Optimizer
    bucket: UpdateBucket
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    factor_dtype: torch.dtype | None
    divides: bool
    widens: bool
    device: torch.device

    @property
    def range_elements(self) -> int:
        """Elements of a full range: whole blocks, and whole steps of vectorised loops."""
        step = math.lcm(_VECTOR_ELEMENTS, *(slot.block or 1 for slot in self.bucket.slots))
        return -(-RANGE_ELEMENTS // step) * step

    def layout(self, numel: int) -> PageLayout:
        """Where the state of ``numel`` elements lies."""
        return page_layout(self.bucket.slots, numel, self.bucket.updated_spec(self._spec(self.parameter_dtype)).dtype)

    def _spec(self, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec((_NOMINAL_ELEMENTS,), dtype, (1,), self.device)


_RULES: dict[str, RangeRule] = {}
_NUMBERS = itertools.count()


def rule_name(rule: RangeRule) -> str:
    """The name by which programs of this process refer to ``rule``; equal rules have one."""
    # Numbers of the optimizer enter a program as inputs, and its groups decide nothing within a bucket.
    plain = replace(rule, optimizer=rule.optimizer.without_groups(), bucket=_anonymous(rule.bucket))
    for name, known in _RULES.items():
        if known == plain:
            return name
    name = f"{type(rule.optimizer).__name__}_{next(_NUMBERS)}"
    _RULES[name] = plain
    return name


def rule_named(name: str) -> RangeRule:
    """The rule called ``name``; StateError for one of another process."""
    if name not in _RULES:
        raise StateError(
            f"there is no rule {name!r} in this process: a program with paged state runs where it was made"
        )
    return _RULES[name]


def _anonymous(bucket: UpdateBucket) -> UpdateBucket:
    return replace(bucket, name="", parameters=())


def append_paged_update(
    program: Program,
    emit: Emit,
    name: str,
    source: GradientSource,
    numbers: Mapping[str, fx.Node],
    request: tuple[Optimizer, UpdateBucket],
    add_pages: Callable[[TensorSpec], fx.Node],
) -> UpdatedParameter:
    """The update of the parameter ``name`` as one operator; ``add_pages`` makes the input that holds its state."""
    optimizer, bucket = request
    parameter = program.input_named(name)
    spec = program.spec(parameter)
    factor, divides = source.factor() if bucket.is_by_blocks else source.scalar, source.divides
    rule = RangeRule(
        optimizer,
        bucket,
        spec.dtype,
        program.spec(source.gradient).dtype,
        None if factor is None else program.spec(factor).dtype,
        divides=divides and not bucket.is_by_blocks,
        widens=source.widens,
        device=torch.device(spec.device.type),
    )
    pages = add_pages(pages_spec(bucket, spec))
    values = [numbers[number] for number in bucket.numbers]
    staging = rule.layout(min(rule.range_elements, spec.numel)).nbytes
    place = (rule_name(rule), seed_of(name), staging)
    results = emit(PAGED_UPDATE, parameter, source.gradient, pages, factor, values, *place)
    new, kept = (emit(operator.getitem, results, position) for position in (0, 1))
    return UpdatedParameter(new, {PAGES: kept})


def pages_layout(bucket: UpdateBucket, parameter: TensorSpec) -> PageLayout:
    """Where the state of ``parameter`` lies in its pages."""
    return page_layout(bucket.slots, parameter.numel, bucket.updated_spec(parameter).dtype)


def pages_spec(bucket: UpdateBucket, parameter: TensorSpec) -> TensorSpec:
    """The spec of the pages of ``parameter``: bytes on the host."""
    return TensorSpec((pages_layout(bucket, parameter).nbytes,), torch.uint8, (1,), torch.device("cpu"))


def range_program(rule: RangeRule, program: Program) -> Program:
    """The update of one range appended to the empty ``program``, before any pass.

    Inputs: ``parameter``, ``gradient``, ``factor`` (if there is one), the state tensors by name, the numbers, ``seed``
    and ``offset`` (where the range begins in the whole parameter). Updates are written where the inputs lie.
    """
    writer = _RangeWriter(rule, program)
    writer.write()
    program.finish()
    return program


class _RangeWriter:
    def __init__(self, rule: RangeRule, program: Program) -> None:
        self.rule = rule
        self.program = program

    def write(self) -> None:
        rule, bucket = self.rule, self.rule.bucket
        parameter = self._tensor(PARAMETER, InputKind.PARAM, rule.parameter_dtype)
        gradient = self._tensor(GRADIENT, InputKind.BATCH, rule.gradient_dtype)
        factor = None
        if rule.factor_dtype is not None:
            spec = TensorSpec((), rule.factor_dtype, (), rule.device)
            factor = self._add(Input(FACTOR, InputKind.BATCH, spec))
        specs = bucket.state_specs(self.program.spec(parameter))
        state = {name: self._add(Input(name, InputKind.STATE, spec)) for name, spec in specs.items()}
        numbers = {name: self._number(name) for name in bucket.numbers}
        source = GradientSource(
            gradient,
            scaled=lambda node: self._scaled(node, factor),
            factor=lambda: factor,
            seed=self._number(SEED, "int"),
            offset=self._number(OFFSET, "int"),
        )
        writer = ParameterWriter(self.program, self._emit, rule.optimizer)
        result = writer.update(PARAMETER, source, state, numbers, bucket)
        applied = self._applied(factor)
        self._output(PARAMETER, OutputKind.PARAM_UPDATE, result.parameter, parameter, applied)
        for name, value in result.state.items():
            self._output(name, OutputKind.STATE_UPDATE, value, state[name], applied)

    def _scaled(self, gradient: fx.Node, factor: fx.Node | None) -> fx.Node:
        if factor is None:
            return gradient
        dtype = torch.promote_types(self.program.spec(gradient).dtype, torch.float32)
        if self.rule.widens and self.program.spec(gradient).dtype != dtype:
            gradient = self._emit(aten._to_copy.default, gradient, dtype=dtype)
        return self._emit(aten.div.Tensor if self.rule.divides else aten.mul.Tensor, gradient, factor)

    def _applied(self, factor: fx.Node | None) -> fx.Node | None:
        """Whether the update counts (bool[]), where that is decided on a device; on a CPU the host decides."""
        if factor is None or self.rule.device.type == "cpu" or self.rule.bucket.is_by_blocks:
            return None
        return self._emit(aten.eq.Scalar, self._emit(aten.sub.Tensor, factor, factor), 0)

    def _output(self, name: str, kind: OutputKind, value: fx.Node, old: fx.Node, applied: fx.Node | None) -> None:
        if applied is not None:
            value = self._emit(aten.where.self, applied, value, old)
        output = Output(name, kind, self.program.spec(value))
        self.program.set_outputs([*self.program.output_values(), value], [*self.program.signature.outputs, output])

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.program.insert_before(self.program.output_node(), target, *args, **kwargs)

    def _tensor(self, name: str, kind: InputKind, dtype: torch.dtype) -> fx.Node:
        return self._add(Input(name, kind, TensorSpec((_NOMINAL_ELEMENTS,), dtype, (1,), self.rule.device)))

    def _add(self, entry: Input) -> fx.Node:
        assert isinstance(entry.spec, TensorSpec), "numbers have no memory"
        return self.program.add_input(entry, fake_like(self.program.fake_mode, entry.spec), name=entry.name)

    def _number(self, name: str, type_name: str = "float") -> fx.Node:
        # 0.5 keeps every rule finite while values are inferred: no division by zero, no negative root.
        value = 0 if type_name == "int" else 0.5
        return self.program.add_input(scalar_input(name, InputKind.SCALAR, type_name), value, name=name)
