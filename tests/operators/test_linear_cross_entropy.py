"""The fused operators against ``F.cross_entropy(F.linear(...))`` in float64, in every option; shapes; workspace."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from graphopt.execute.measure import measure_memory
from graphopt.operators.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_cross_entropy_with_gradient,
)

REDUCTIONS = ("none", "mean", "sum")  # by ATen's numbers
SHAPES = ((1, 5, 3, 4), (7, 50, 8, 3), (123, 70, 16, 32))  # rows, classes, features, chunk
# float64 sums of at most 123 x 70 terms of size 1 to 100.
EXACT = 1e-10


@dataclass(frozen=True)
class Case:
    """A head, labels and options; ``tensors``: those with a gradient."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    class_weight: torch.Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    reduction: int = 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None)

    def arguments(self, chunk: int, dtype: torch.dtype) -> tuple:
        return (*(getattr(self, name) for name in self.__dataclass_fields__), dtype, chunk)

    def double(self) -> Case:
        wide = [None if value is None else value.detach().double().requires_grad_() for value in self.head]
        weight = None if self.class_weight is None else self.class_weight.double()
        options = {name: getattr(self, name) for name in list(self.__dataclass_fields__)[5:]}
        return Case(*wide, self.target, weight, **options)

    @property
    def head(self) -> tuple[torch.Tensor | None, ...]:
        return self.hidden, self.weight, self.bias

    def reference(self) -> torch.Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias) * self.logit_scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        loss = F.cross_entropy(
            logits,
            self.target,
            self.class_weight,
            reduction=REDUCTIONS[self.reduction],
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        squares = logits.logsumexp(-1).square()
        return loss + self.z_loss * (squares, squares.mean(), squares.sum())[self.reduction]


def make_case(rows, classes, features, *, dtype=torch.float64, bias=False, weighted=False, **options) -> Case:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(0, classes, (rows,), generator=generator)
    target[rows // 2 + 1 :][:3] = options.get("ignore_index", -100)
    class_weight = torch.rand(classes, generator=generator, dtype=torch.float64).to(dtype) if weighted else None
    head = normal(rows, features), normal(classes, features), normal(classes) if bias else None
    return Case(*head, target, class_weight, **options)


def results(case: Case, chunk: int, gradient: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Loss and gradients of the operator under autograd, and of the one that gives all at once."""
    dtype = gradient.dtype
    loss, _, _ = linear_cross_entropy(*case.arguments(chunk, dtype))
    apart = [loss.detach(), *torch.autograd.grad(loss, case.tensors, gradient)]
    with torch.no_grad():
        found = linear_cross_entropy_with_gradient(
            gradient, *case.arguments(chunk, dtype), [True, True, case.bias is not None]
        )
    return {"apart": apart, "together": [found[0], *found[3 : 3 + len(case.tensors)]]}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", range(3), ids=REDUCTIONS)
def test_every_combination_equals_the_unfused_form(shape, reduction):
    *sizes, chunk = shape
    choices = itertools.product((False, True), (False, True), (0.0, 0.1), (0.0, 0.3), (0.0, 2.0), (1.0, 0.5))
    for bias, weighted, label_smoothing, z_loss, softcap, logit_scale in choices:
        case = make_case(
            *sizes,
            bias=bias,
            weighted=weighted,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            reduction=reduction,
        )
        loss = case.reference()
        gradient = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
        expected = [loss, *torch.autograd.grad(loss, case.tensors, gradient)]
        for found in results(case, chunk, gradient).values():
            for actual, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("ignore_index", [-100, 0, 3])
def test_ignored_class_may_be_one_of_the_classes(ignore_index):
    case = make_case(40, 9, 4, ignore_index=ignore_index)
    loss = case.reference()
    expected = [loss, *torch.autograd.grad(loss, case.tensors)]

    for found in results(case, 7, torch.ones((), dtype=torch.float64)).values():
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("reduction", [1, 2], ids=REDUCTIONS[1:])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_labels_ignored_is_as_in_torch(reduction, smoothing):
    case = make_case(9, 20, 8, reduction=reduction, label_smoothing=smoothing)
    case.target.fill_(-100)
    loss = case.reference()
    expected = [loss.detach(), *torch.autograd.grad(loss, case.tensors)]
    assert bool(loss.isnan()) == (reduction == 1)

    for found in results(case, 4, torch.ones((), dtype=torch.float64)).values():
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_low_precision_inputs_are_summed_in_float32(dtype, softcap):
    case = make_case(123, 301, 16, dtype=dtype, bias=True, softcap=softcap, label_smoothing=0.1)
    wide = case.double()
    loss = wide.reference()
    expected = [loss, *torch.autograd.grad(loss, wide.tensors)]

    for found in results(case, 32, torch.ones(())).values():
        # float32 sums; only the gradients are rounded to the dtype, once.
        torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
        for actual, wanted in zip(found[1:], expected[1:], strict=True):
            assert actual.dtype == dtype
            error = (actual.double() - wanted).abs().max() / wanted.abs().max()
            assert error <= max(torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_hidden_rows_may_be_lower_than_the_weight(low, softcap):
    """As mixed precision has it: the weight is read as it is stored, and its gradient is never in the low type."""
    case = make_case(123, 301, 16, dtype=torch.float32, bias=True, softcap=softcap)
    hidden = case.hidden.detach().to(low).requires_grad_()
    case = replace(case, hidden=hidden)
    wide = replace(case, hidden=hidden.detach().float().requires_grad_())

    for form, found in results(case, 32, torch.ones(())).items():
        expected = results(wide, 32, torch.ones(()))[form]
        assert [value.dtype for value in found] == [torch.float32, low, torch.float32, torch.float32]
        assert torch.equal(found[1], expected[1].to(low))
        for position in (0, 2, 3):
            assert torch.equal(found[position], expected[position])


def test_gradient_of_the_log_sum_exp_is_added():
    case = make_case(30, 17, 5, softcap=3.0)
    logits = 3.0 * torch.tanh(F.linear(case.hidden, case.weight) / 3.0)
    weights = torch.linspace(-1, 1, 30, dtype=torch.float64)
    expected = torch.autograd.grad(case.reference() + logits.logsumexp(-1) @ weights, case.tensors)

    loss, _, lse = linear_cross_entropy(*case.arguments(8, torch.float64))
    found = torch.autograd.grad(loss + lse @ weights, case.tensors)
    alone = torch.autograd.grad(linear_cross_entropy(*case.arguments(8, torch.float64))[2] @ weights, case.tensors)
    unfused = torch.autograd.grad(
        (3.0 * torch.tanh(F.linear(case.hidden, case.weight) / 3.0)).logsumexp(-1) @ weights, case.tensors
    )

    for actual, wanted in zip((*found, *alone), (*expected, *unfused), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=EXACT, atol=EXACT)


def test_a_class_that_can_never_be_spoils_no_gradient():
    case = make_case(12, 10, 4, bias=True)
    with torch.no_grad():
        case.bias[0] = -torch.inf  # a padded vocabulary
    case.target.clamp_(min=1)
    case.target[3] = -100
    loss = case.reference()
    expected = [loss, *torch.autograd.grad(loss, case.tensors)]

    for found in results(case, 5, torch.ones((), dtype=torch.float64)).values():
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=EXACT, atol=EXACT)


def test_a_label_outside_the_classes_is_an_error():
    case = make_case(12, 10, 4)
    case.target[5] = 10
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(*case.arguments(5, torch.float64))


def test_gradients_keep_the_layout_of_the_weight():
    case = make_case(12, 10, 4)
    turned = torch.randn(4, 10, dtype=torch.float64).t().requires_grad_()
    loss, _, _ = linear_cross_entropy(case.hidden, turned, *case.arguments(5, torch.float64)[2:])
    (found,) = torch.autograd.grad(loss, turned)
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(case.hidden, turned), case.target), turned)

    assert found.stride() == turned.stride()
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_gradients_that_nobody_asks_for_have_no_element():
    case = make_case(12, 10, 4, bias=True)
    with torch.no_grad():
        _, _, lse = linear_cross_entropy(*case.arguments(5, torch.float64))
        arguments = case.arguments(5, torch.float64)
        one = torch.ones((), dtype=torch.float64)
        for needs in itertools.product((False, True), repeat=3):
            back = linear_cross_entropy_backward(one, None, lse, *arguments[:-2], 5, list(needs))
            joint = linear_cross_entropy_with_gradient(one, *arguments, list(needs))[3:]
            assert [bool(item.numel()) for item in back] == [bool(item.numel()) for item in joint] == list(needs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", range(3), ids=REDUCTIONS)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_fake_values_autograd_and_schema_are_what_torch_demands(dtype, reduction, is_mixed):
    case = make_case(
        12, 10, 4, dtype=torch.float32 if is_mixed else dtype, bias=True, weighted=True, reduction=reduction
    )
    if is_mixed:
        case = replace(case, hidden=case.hidden.detach().to(dtype).requires_grad_())
    torch.library.opcheck(linear_cross_entropy, case.arguments(5, torch.float32))
    with torch.no_grad():
        loss, _, lse = linear_cross_entropy(*case.arguments(5, torch.float32))
        arguments = tuple(
            value.detach() if isinstance(value, torch.Tensor) else value for value in case.arguments(5, torch.float32)
        )
        needs = [True, False, True]
        torch.library.opcheck(linear_cross_entropy_backward, (loss, None, lse, *arguments[:-2], 5, needs))
        torch.library.opcheck(linear_cross_entropy_with_gradient, (loss, *arguments, needs))


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_holds_a_chunk_of_logits_and_no_more(chunk, softcap):
    rows, classes, features = 256, 4096, 16
    case = make_case(rows, classes, features, dtype=torch.float32, softcap=softcap)
    arguments = tuple(
        value.detach() if isinstance(value, torch.Tensor) else value for value in case.arguments(chunk, torch.float32)
    )

    with torch.no_grad():
        trace = measure_memory(
            lambda: linear_cross_entropy_with_gradient(torch.ones(()), *arguments, [True, True, False])
        )

    chunk_bytes = chunk * classes * 4 * (2 if softcap else 1)
    per_row_bytes = 64 * rows  # labels, weights, losses, coefficients: a few numbers a row
    assert trace.peak_bytes <= trace.end_bytes + chunk_bytes + per_row_bytes
    assert trace.end_bytes <= (rows + classes) * features * 4 + per_row_bytes
