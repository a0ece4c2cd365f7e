"""Numbers as 0-dim tensors inside regions: the same result as with Python numbers."""

from __future__ import annotations

import operator

import pytest
import torch

from graphopt.execute.region_scalars import call_with_tensors, can_take_numbers
from graphopt.ir.program import Program, scalar_input
from graphopt.ir.spec import InputKind
from tests.support.graphs import program_of

aten = torch.ops.aten

CALLS = {
    "add": (aten.add.Tensor, ("x", "number"), {}),
    "add-alpha": (aten.add.Tensor, ("x", "y"), {"alpha": "number"}),
    "sub-alpha": (aten.sub.Tensor, ("x", "y"), {"alpha": "number"}),
    "mul": (aten.mul.Tensor, ("x", "number"), {}),
    "mul-scalar": (aten.mul.Scalar, ("x", "number"), {}),
    "div": (aten.div.Tensor, ("x", "number"), {}),
    "div-scalar": (aten.div.Scalar, ("x", "number"), {}),
    "lerp": (aten.lerp.Scalar, ("x", "y", "number"), {}),
    "addcmul": (aten.addcmul.default, ("x", "y", "y"), {"value": "number"}),
    "addcdiv": (aten.addcdiv.default, ("x", "x", "y"), {"value": "number"}),
    "clamp-max": (aten.clamp.default, ("x", None, "number"), {}),
    "clamp-min": (aten.clamp.default, ("x", "number"), {}),
    "pow": (aten.pow.Tensor_Scalar, ("y", "number"), {}),
}


def program_with(target, args, kwargs, *, dtype: torch.dtype, shape: tuple[int, ...]) -> Program:
    """``target`` on x, y (positive) and a Python number."""
    program = program_of(lambda x, y: (x + y,), torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype))
    nodes = dict(zip(("x", "y"), program.placeholders(), strict=True))
    nodes["number"] = program.add_input(scalar_input("number", InputKind.SCALAR), 0.5, name="number")
    arguments = [nodes.get(name, name) if isinstance(name, str) else name for name in args]
    program.insert_before(
        program.output_node(), target, *arguments, **{key: nodes[name] for key, name in kwargs.items()}
    )
    return program


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3), ()])
def test_gives_the_number_as_a_tensor(name, dtype, shape):
    target, args, kwargs = CALLS[name]
    node = program_with(target, args, kwargs, dtype=dtype, shape=shape).ops()[-1]
    assert can_take_numbers(node)
    torch.manual_seed(0)
    real = {"x": torch.randn(shape).to(dtype), "y": torch.rand(shape).to(dtype) + 1}
    number = 0.3
    plain = [number if item == "number" else real.get(item) for item in args]
    expected = target(*plain, **dict.fromkeys(kwargs, number))
    tensor = torch.tensor(number, dtype=torch.float64)
    given = [tensor if item == "number" else real.get(item) for item in args]
    found = call_with_tensors(node, tuple(given), dict.fromkeys(kwargs, tensor))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    # Two roundings more than the fused kernel, of values of the size of the operands (below 8).
    assert (found - expected).abs().max() <= 2 * torch.finfo(dtype).eps * 8


def test_leaves_what_wants_a_number_and_has_no_other_form():
    program = program_of(lambda x: (x.sin(),), torch.ones(3))
    number = program.add_input(scalar_input("number", InputKind.SCALAR), 0.5, name="number")
    node = program.insert_before(program.output_node(), aten.leaky_relu.default, program.placeholders()[0], number)
    assert not can_take_numbers(node)


def test_numbers_alone_are_no_part_of_a_region():
    program = program_of(lambda x: (x.sin(),), torch.ones(3))
    number = program.add_input(scalar_input("number", InputKind.SCALAR), 0.5, name="number")
    node = program.insert_before(program.output_node(), operator.mul, number, number)
    assert not can_take_numbers(node)
