"""Running two Programs on the same numbers and saying which output differs, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.ambient import plain_execution
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, TensorSpec

NORM_SHARE = 1 / 4
"""Of a tolerance: what all errors of a value may be together, as norms. An operand that is rounded to E4M3 or E5M2
leaves 31 or 25 dB of signal over error; a quarter of the tolerances that those passes have is 24 and 18 dB. A result
that is halved keeps 6 dB, one that is dropped none."""

_SEED = 0
_SMALLEST_VOCABULARY = 2  # integers drawn below this index any embedding table or class list of at least two rows


@dataclass(frozen=True)
class Difference:
    """One value that differs: its name and kind, the largest absolute error, that error over the largest value, and the
    norm of all errors over the norm of the value.
    """

    output: str
    kind: str
    max_abs: float
    relative: float
    norm: float

    @property
    def decibels(self) -> float:
        """Signal over error."""
        return -20 * math.log10(self.norm) if self.norm else math.inf

    def within(self, tolerance: float) -> bool:
        """Whether no error is beyond ``tolerance`` of the largest value, nor their norm beyond NORM_SHARE of that."""
        return self.relative <= tolerance and self.norm <= NORM_SHARE * tolerance

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.output}: max |difference| {self.max_abs:.3e} ({self.relative:.3e} of the largest "
            f"value), {self.decibels:.1f} dB of signal over error"
        )


def random_inputs(program: Program, *, seed: int = _SEED) -> tuple[Any, ...]:
    """Inputs for ``program``: normal floats (positive for state and buffers), small integers, 1 for tangents."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(_random_input(entry.kind, entry.spec, generator) for entry in program.signature.inputs)


def differences(before: Program, after: Program, inputs: Sequence[Any], *, tolerance: float) -> tuple[Difference, ...]:
    """Outputs of ``after`` that differ from ``before`` by more than ``tolerance``, as ``Difference.within`` has it.

    Both run from the same generator state on copies of ``inputs``, with uninitialised memory filled alike: what happens
    to lie in it is no difference. Tolerance 0 means bit-equal, NaN equal to NaN.
    """
    expected = run_isolated(FillingInterpreter(before.module), inputs)
    actual = run_isolated(FillingInterpreter(after.module), inputs)
    found = []
    for left, right, output in zip(expected, actual, before.signature.outputs, strict=True):
        difference = difference_of(left, right, output.name, output.kind)
        if difference is None and tolerance == 0.0 and _signs_differ(left, right):
            difference = Difference(output.name, output.kind, 0.0, math.inf, math.inf)
        if difference is not None and not difference.within(tolerance):
            found.append(difference)
    return tuple(found)


def run_isolated(interpreter: fx.Interpreter, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs on copies of ``inputs``; the caller's generator is left as it is."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.random.fork_rng(), plain_execution():
        torch.manual_seed(_SEED)
        return tuple(interpreter.run(*copies, enable_io_processing=False))


class FillingInterpreter(fx.Interpreter):
    """Runs a graph with NaN, or the largest integer, wherever memory is uninitialised: no value passes for it."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if ops.is_uninitialised(n):
            result.fill_(_least_likely(result.dtype))
        return result


def _least_likely(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def difference_of(left: Any, right: Any, name: str, kind: str) -> Difference | None:
    """How ``right`` differs from ``left``, the value called ``name``; None where they are equal."""
    infinite = Difference(name, kind, math.inf, math.inf, math.inf)
    if not isinstance(left, torch.Tensor):
        return None if left == right else infinite
    if left.shape != right.shape or left.dtype != right.dtype:
        return infinite
    if torch.equal(left, right) or left.numel() == 0:
        return None
    wide = torch.complex128 if left.is_complex() else torch.float64
    wide_left, wide_right = left.to(wide), right.to(wide)
    same = (wide_left == wide_right) | (wide_left.isnan() & wide_right.isnan())
    if bool(same.all()):
        return None
    errors = (wide_left - wide_right).abs().masked_fill(same, 0.0)
    finite = wide_left.abs()[wide_left.isfinite()]
    if not bool(errors.isfinite().all()) or not bool(finite.any()):
        return replace(infinite, max_abs=float(errors.nan_to_num(math.inf, math.inf).max()))
    error = float(errors.max())
    return Difference(name, kind, error, error / float(finite.max()), float(errors.norm() / finite.norm()))


def _signs_differ(left: Any, right: Any) -> bool:
    """Whether equal values differ in the sign of a zero."""
    if not isinstance(left, torch.Tensor) or not left.is_floating_point():
        return False
    wide_left, wide_right = left.float(), right.float()  # torch 2.13 tells no sign of an FP8 number
    return bool((wide_left.signbit() != wide_right.signbit()).logical_and(wide_left == 0).any())


def _random_input(kind: InputKind, spec: Any, generator: torch.Generator) -> Any:
    if not isinstance(spec, TensorSpec):
        return 1 if spec.type_name == "int" else 0.5
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    if kind is InputKind.TANGENT:
        return tensor.fill_(1).to(spec.device)
    if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
        return tensor.copy_(torch.randint(0, _SMALLEST_VOCABULARY, spec.shape, generator=generator)).to(spec.device)
    values = torch.randn(spec.shape, generator=generator)
    if kind in (InputKind.STATE, InputKind.BUFFER):
        values = values.abs() + 0.5
    return tensor.copy_(values).to(spec.device)
