"""Running two Programs on the same numbers and saying which output differs, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, TensorSpec

_SEED = 0
_SMALLEST_VOCABULARY = 2  # integers drawn below this index any embedding table or class list of at least two rows


@dataclass(frozen=True)
class Difference:
    """One output that differs: its name and kind, the largest absolute error and that error over the largest value."""

    output: str
    kind: str
    max_abs: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.output}: max |difference| {self.max_abs:.3e} ({self.relative:.3e} of the largest value)"
        )


def random_inputs(program: Program, *, seed: int = _SEED) -> tuple[Any, ...]:
    """Inputs for ``program``: normal floats (positive for state and buffers), small integers, 1 for tangents."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(_random_input(entry.kind, entry.spec, generator) for entry in program.signature.inputs)


def differences(before: Program, after: Program, inputs: Sequence[Any], *, tolerance: float) -> tuple[Difference, ...]:
    """Outputs of ``after`` that differ from ``before`` by more than ``tolerance`` of the output's largest value.

    Both run from the same generator state on copies of ``inputs``, with uninitialised memory filled alike: what happens
    to lie in it is no difference. Tolerance 0 means bit-equal, NaN equal to NaN.
    """
    expected = _run_isolated(before, inputs)
    actual = _run_isolated(after, inputs)
    found = []
    for left, right, output in zip(expected, actual, before.signature.outputs, strict=True):
        difference = _difference(left, right, output.name, output.kind)
        if difference is None and tolerance == 0.0 and _signs_differ(left, right):
            difference = Difference(output.name, output.kind, 0.0, float("inf"))
        if difference is not None and not difference.relative <= tolerance:
            found.append(difference)
    return tuple(found)


def _run_isolated(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        return tuple(_FillingInterpreter(program.module).run(*copies, enable_io_processing=False))


class _FillingInterpreter(fx.Interpreter):
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


def _difference(left: Any, right: Any, name: str, kind: str) -> Difference | None:
    if not isinstance(left, torch.Tensor):
        return None if left == right else Difference(name, kind, float("inf"), float("inf"))
    if left.shape != right.shape or left.dtype != right.dtype:
        return Difference(name, kind, float("inf"), float("inf"))
    if torch.equal(left, right) or left.numel() == 0:
        return None
    wide_left, wide_right = left.double(), right.double()
    same = (wide_left == wide_right) | (wide_left.isnan() & wide_right.isnan())
    if bool(same.all()):
        return None
    error = float((wide_left - wide_right).abs()[~same].max())
    largest = float(wide_left[wide_left.isfinite()].abs().max()) if bool(wide_left.isfinite().any()) else 0.0
    error = float("inf") if error != error else error
    return Difference(name, kind, error, error / largest if largest else float("inf"))


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
