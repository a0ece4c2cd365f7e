"""FP8 in whole steps: dimensions that are no multiple of 16, zeros and denormals, options, and every form of a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import fp8
from graphopt.operators.fp8 import MATMUL
from tests.support.fp8 import QUANTIZES, RECIPES, num_fp8_products
from tests.support.models import tiny_model

# The largest relative error of rounding to nearest: 2**-4 for four significant bits, 2**-3 for three. The root mean
# square of a product's error, with both operands rounded, is measured below half of it: 0.04 and 0.06.
E4M3_PRODUCT, E5M2_PRODUCT = 6e-2, 9e-2


def compiled(model, precision, **options):
    """The module form, on generated Python."""
    options.setdefault("loss", lambda out, batch: (out * batch["target"]).sum())
    return graphopt.compile(_Named(model), ["loss"], precision=precision, backend="aten", **options)


class _Named(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target):
        out = self.model(x)
        return {"out": out, "loss": (out * target).sum()}


def run(model, precision, x, target):
    """Outputs and gradients of one forward and backward; the gradient of the output is ``target``."""
    model = _Named(copy.deepcopy(model))
    module = graphopt.compile(model, ["out", "loss"], precision=precision, backend="aten")
    x = x.clone().requires_grad_()
    out = module(x=x, target=target)
    out.loss.backward()
    values = {"out": out.out.detach(), "x": x.grad}
    values |= {name.removeprefix("model."): parameter.grad for name, parameter in model.named_parameters()}
    return values, module.program


def relative(expected, came):
    """The Frobenius norm of the difference over that of what was expected."""
    return ((came.double() - expected.double()).norm() / expected.double().norm()).item()


# ---- dimensions that are no multiple of 16 ---------------------------------------------------------------------------

SIZES = [(32, 48, 5), (32, 48, 16), (32, 48, 1), (18, 10, 16), (32, 2, 16), (32, 97, 16)]


@pytest.mark.parametrize(("inputs", "outputs", "tokens"), SIZES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_dimensions_that_are_no_multiple_of_16_are_no_error(recipe, inputs, outputs, tokens):
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs)
    x, target = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    plain, _ = run(model, "bf16", x, target)
    came, program = run(model, fp8.recipe_of(recipe), x, target)
    rows = {row.role: row for row in program.fp8.rows}
    assert set(rows) == {"forward", "input gradient", "weight gradient"} and all(row.reason for row in rows.values())
    for role, name in (("forward", "out"), ("input gradient", "x"), ("weight gradient", "weight")):
        if not rows[role].is_fp8:
            assert torch.equal(came[name], plain[name])
        else:
            bound = E5M2_PRODUCT if recipe == "tensorwise" and role != "forward" else E4M3_PRODUCT
            assert relative(plain[name], came[name]) <= bound
    assert torch.equal(came["bias"], plain["bias"])


# ---- zeros and denormals ---------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Two layers with something between them; the gradient of the output is ``target``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, target):
        out = self.second(self.first(x).tanh())
        return {"out": out, "loss": (out * target).sum()}


@pytest.fixture(scope="module", params=RECIPES)
def layers(request):
    """A model and its compiled form, by recipe; the model's gradients are what was computed last."""
    model = Layers()
    return model, graphopt.compile(model, ["out", "loss"], precision=fp8.recipe_of(request.param), backend="aten")


def gradients_of(layers, x, target):
    model, module = layers
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = module(x=x, target=target)
    out.loss.backward()
    assert num_fp8_products(module.program) == 6
    return out.out.detach(), x.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


def is_finite(out, x, gradients):
    return all(bool(value.isfinite().all()) for value in (out, x, *gradients.values()))


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38])
@pytest.mark.parametrize("which", ["x", "target"])
def test_zeros_and_denormals_are_finite_forward_and_backward(layers, which, amax):
    values = {"x": torch.randn(16, 32), "target": torch.randn(16, 32)}
    values[which] = values[which] / values[which].abs().max() * amax if amax else torch.zeros(16, 32)
    out, x, gradients = gradients_of(layers, **values)
    assert is_finite(out, x, gradients)
    if which == "x":
        assert gradients["first.weight"].abs().max() <= 32 * amax * 10
    if which == "target" and amax == 0:
        assert not any(value.any() for value in (x, *gradients.values()))


def test_zero_weights_give_zeros(layers):
    model, _ = layers
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.second.weight.zero_()
    out, x, gradients = gradients_of(layers, torch.randn(16, 32), torch.randn(16, 32))
    assert is_finite(out, x, gradients) and not x.any() and gradients["second.weight"].any()
    assert torch.equal(out, model.second.bias.detach().bfloat16().float().expand(16, 32))
    model.load_state_dict(kept)


def test_a_zero_row_changes_no_other_row():
    model = Layers()
    module = graphopt.compile(model, ["out", "loss"], precision=fp8.Rowwise(), backend="aten")
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    with_zero = x.clone()
    with_zero[3] = 0
    others = [i for i in range(16) if i != 3]
    with torch.no_grad():
        expected, came = (module(x=value, target=target).out for value in (x, with_zero))
    assert torch.equal(came[others], expected[others]) and came.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_that_begins_at_zero_trains(recipe):
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.base = nn.Linear(32, 32).requires_grad_(False)
            self.a, self.b = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return {"loss": (self.base(x) + self.b(self.a(x))).square().mean()}

    model = Adapter()
    start = copy.deepcopy(model.state_dict())
    step = graphopt.compile(
        model, ["loss"], optimizer=graphopt.optim.SGD(lr=0.1), precision=fp8.recipe_of(recipe), backend="aten"
    )
    x = torch.randn(16, 32)
    losses = [step(x).loss.item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert not torch.equal(model.a.weight, start["a.weight"]) and model.b.weight.any()
    assert torch.equal(model.base.weight, start["base.weight"])


# ---- options ---------------------------------------------------------------------------------------------------------


def test_weight_gradients_in_bfloat16_read_what_was_not_quantized():
    torch.manual_seed(0)
    model = nn.Linear(32, 48)
    x, target = torch.randn(16, 32), torch.randn(16, 48)
    plain, _ = run(model, "bf16", x, target)
    came, _ = run(model, fp8.Rowwise(weight_gradient="bf16"), x, target)
    assert torch.equal(came["weight"], plain["weight"]) and not torch.equal(came["x"], plain["x"])


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", [fp8.Tensorwise, fp8.Rowwise])
def test_formats_and_scales_are_those_that_were_asked_for(recipe, gradients, power_of_two):
    _, program = run(
        nn.Linear(32, 32),
        recipe(gradients=gradients, power_of_two=power_of_two),
        torch.randn(16, 32),
        torch.randn(16, 32),
    )
    quantize = [node for node in program.ops() if node.target in QUANTIZES]
    assert {node.args[-1] for node in quantize} == {power_of_two}
    assert {node.args[1] for node in quantize} == {"e4m3", gradients}


def test_what_is_kept_in_float32_stays():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    precision = graphopt.Precision("fp8", keep_fp32=("model.2",))
    _, program = run(model, precision, torch.randn(16, 32), torch.randn(16, 32))
    products = [node for node in program.ops() if node.target is MATMUL]
    assert {program.origin(node).module for node in products} == {"model.0"}


def test_double_precision_stays():
    model = nn.Linear(32, 32).double()
    came, program = run(model, "fp8", torch.randn(16, 32).double(), torch.randn(16, 32).double())
    assert num_fp8_products(program) == 0 and came["out"].dtype is torch.float64


# ---- every form of a step --------------------------------------------------------------------------------------------


def language(precision, seed=0, **options):
    torch.manual_seed(seed)
    tiny = tiny_model(options.pop("name", "llama"))
    options.setdefault("optimizer", graphopt.optim.SGD(lr=0.0))
    options.setdefault("backend", "aten")
    return graphopt.compile(tiny.model, ["loss"], precision=precision, **options), tiny.batch


def test_evaluation_computes_what_training_does():
    step, batch = language("fp8", verify="infer")
    assert torch.equal(step(**batch).loss, step.eval(**batch).loss)


def test_evaluation_with_state_runs_between_products_types():
    step, batch = language(fp8.Delayed())
    step(**batch)
    bf16, _ = language("bf16")
    bf16(**batch)
    assert torch.equal(step.eval(**batch).loss, bf16.eval(**batch).loss)
