"""C37 (views, addresses that are used again, views that hold big memory, in-place changes, integers and numbers)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt.execute.cpu_copier import CopyPace
from graphopt.ir import ops
from graphopt.ir.liveness import forward_end, plan_memory, saved_bytes
from graphopt.ir.spec import TensorSpec
from graphopt.ir.transfer_ops import OFFLOAD, PREFETCH
from tests.support.offload import offload_all

NUM_REPEATS = 10


class Plain(nn.Module):
    """A function of the batch and a square parameter ``w`` (or several, stacked) as a model."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(*shape) / 2)

    def forward(self, x):
        return {"loss": self.function(x, self.w)}


def square_and_its_transpose(x, w):
    """(a) as the case has it: the views are of the batch, which never leaves."""
    return ((x @ w).sin() * (x.t() @ w).cos()).sum()


def computed_square_and_its_transpose(x, w):
    """(a) with views that can leave: a square, its transpose, and slices of it at offsets."""
    h = (x @ w).tanh()
    late = (h[1:] @ w).sin().sum() + (h[:, 2:].t() @ h).exp().mean()
    return ((h @ w).sin() * (h.t() @ w).cos()).sum() + late


def twenty_layers(x, w):
    """(b) intermediates of one shape, whose addresses repeat."""
    for layer in w.unbind():
        x = (x @ layer).tanh()
    return x.square().mean()


def first_row_alone(x, w):
    """(c) only a view of the big value is read again."""
    return ((x @ w)[:1].sin() * 3).sum() + (x @ w).sum() * 0


def integers_and_numbers(x, w):
    """(e) a mask, indices of a maximum, indices to gather with, and a 0-dim norm are kept for the backward."""
    h = x @ w
    kept = torch.where(h > 0, h, h * 0.1)
    highest, _ = kept.max(dim=1, keepdim=True)
    order = kept.argsort(dim=1)
    gathered = kept.gather(1, order)[:, ::2]
    scale = h.square().mean().sqrt()
    return (gathered.t().contiguous() * highest.t().expand(2, -1) / scale).sin().sum()


def dropout_mask(x, w):
    """(e) a random boolean mask is kept, in the memory order of its input."""
    return nn.functional.dropout((x @ w).t(), 0.5).sin().sum()


CASES = {
    "a": (square_and_its_transpose, (4, 4)),
    "a, computed": (computed_square_and_its_transpose, (4, 4)),
    "b": (twenty_layers, (20, 4, 4)),
    "c": (first_row_alone, (4, 4)),
    "e": (integers_and_numbers, (4, 4)),
    "e, random mask": (dropout_mask, (4, 4)),
}


def compiled_pair(function, *shape: int, prefetch: int = 2) -> tuple[nn.Module, nn.Module]:
    model = Plain(function, *shape)
    plain = graphopt.compile(copy.deepcopy(model), outputs=["loss"])
    return plain, graphopt.compile(model, outputs=["loss"], passes=offload_all(prefetch), verify="numeric")


def loss_and_gradient(module: nn.Module, x: torch.Tensor, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    module.zero_grad()
    loss = module(x).loss
    loss.backward()
    return loss.detach(), module.w.grad.clone()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_without_offload(name, prefetch):
    function, shape = CASES[name]
    plain, module = compiled_pair(function, *shape, prefetch=prefetch)
    generator = torch.Generator().manual_seed(11)
    for repeat in range(NUM_REPEATS):
        x = torch.randn(4, 4, generator=generator)
        expected = loss_and_gradient(plain, x, seed=repeat)
        actual = loss_and_gradient(module, x, seed=repeat)
        assert torch.equal(expected[0], actual[0]) and torch.equal(expected[1], actual[1])
        if repeat == 0:
            module._ran().offload.set_pace(CopyPace(random_seconds=0.004, seed=repeat))
    assert module._ran().offload.statistics.values_in >= NUM_REPEATS
    assert module._ran().offload.statistics.far_bytes == 0


def sent_from(module: nn.Module) -> list[torch.fx.Node]:
    return [node.args[0] for node in module.program.ops() if ops.is_call(node, OFFLOAD)]


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_inputs_are_never_copied_out(name):
    function, shape = CASES[name]
    _, module = compiled_pair(function, *shape)
    loss_and_gradient(module, torch.randn(4, 4), seed=0)
    program = module.program
    owned = {program.value(node).untyped_storage()._cdata for node in program.placeholders()}
    assert [node for node in sent_from(module) if program.value(node).untyped_storage()._cdata in owned] == []
    assert sent_from(module)


def test_the_base_of_a_view_that_alone_is_read_again_is_released():
    def big(x, w):
        return ((x @ w)[:1].sin() * 3).sum()

    plain, module = compiled_pair(big, 64, 64)
    for compiled in (plain, module):
        loss_and_gradient(compiled, torch.randn(64, 64), seed=0)
    big_bytes = 64 * 64 * 4
    assert saved_bytes(plain.program) == big_bytes  # one row of it is needed
    assert saved_bytes(module.program) == 8  # the ticket
    program = module.program
    border = plan_memory(program).live_bytes[forward_end(program) - 1]
    assert border < big_bytes / 16
    record = next(item for item in module.report().records[::-1] if item.name == "offload")
    assert (record.saved_bytes_before, record.saved_bytes_after) == (big_bytes, 8)
    row = program.decisions.of(sent_from(module)[0].name)
    assert row.action == "offload"


def test_a_value_that_the_model_changes_in_place_after_saving_it_is_right():
    """(d) The graph is functional: the change is a new value, and the gradient is that of the value that was read.

    Eager raises here, since the memory it kept has changed. No memory changes here, with offload or without it.
    """

    def changed(x, w):
        y = (x @ w).exp()
        z = y.sin()
        y.add_(1)
        return (z * y).sum()

    def unchanged(x, w):
        y = (x @ w).exp()
        return (y.sin() * (y + 1)).sum()

    x = torch.randn(4, 4)
    plain, module = compiled_pair(changed, 4, 4)
    without, within = loss_and_gradient(plain, x, seed=0), loss_and_gradient(module, x, seed=0)
    reference = loss_and_gradient(compiled_pair(unchanged, 4, 4)[0], x, seed=0)
    assert torch.equal(without[1], within[1]) and torch.equal(within[1], reference[1])
    assert sent_from(module)


def test_what_a_user_changes_between_forward_and_backward_raises_eagers_error():
    """(d) Parameters and batches stay where autograd checks their version; they never leave."""
    _, module = compiled_pair(computed_square_and_its_transpose, 4, 4)
    eager = Plain(computed_square_and_its_transpose, 4, 4)
    x = torch.randn(4, 4)
    loss_and_gradient(module, x, seed=0)
    for model in (eager, module):
        loss = model(x)["loss"]
        with torch.no_grad():
            model.w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    del loss
    assert module._ran().offload.statistics.far_bytes == 0


def test_dtypes_shapes_and_strides_of_what_left_come_back():
    _, module = compiled_pair(integers_and_numbers, 4, 4)
    loss_and_gradient(module, torch.randn(4, 4), seed=0)
    program = module.program
    sent = [TensorSpec.of(program.value(node)) for node in sent_from(module)]
    fetched = [program.spec(node) for node in program.ops() if ops.is_call(node, PREFETCH)]
    assert sorted(map(repr, sent)) == sorted(map(repr, fetched))
    assert {torch.bool, torch.int64, torch.float32} <= {spec.dtype for spec in sent}
    assert any(spec.shape == () for spec in sent)
