"""FP8 in whole steps: dimensions that are no multiple of 16, zeros and denormals, options, and every form of a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import fp8
from graphopt.dry_run import bisect_model
from graphopt.operators.fp8 import MATMUL
from tests.support.fp8 import QUANTIZES, RECIPES, joint_program, num_fp8_products
from tests.support.models import TINY_MODELS, tiny_model

# A loss is a mean over logits, each of a sum of terms that are wrong by less than 6 % independently of each other; at
# the start of training logits are small beside the logarithm that they are taken off: 2 % of it is generous.
NEAR = 0.02
# The largest relative error of rounding to nearest: 2**-4 for four significant bits, 2**-3 for three. The root mean
# square of a product's error, with both operands rounded, is measured below half of it: 0.04 and 0.06.
E4M3_PRODUCT, E5M2_PRODUCT = 6e-2, 9e-2


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
CASES = [("tensorwise", *sizes) for sizes in SIZES] + [("rowwise", 32, 48, 5), ("blockwise", 32, 97, 16)]


@pytest.mark.parametrize(("recipe", "inputs", "outputs", "tokens"), CASES)
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


@pytest.mark.parametrize(
    ("recipe", "gradients", "power_of_two"), [(fp8.Tensorwise, "e4m3", True), (fp8.Rowwise, "e5m2", False)]
)
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


def step_of(precision, **options):
    options.setdefault("backend", "aten")
    return graphopt.compile(Layers(), ["loss"], optimizer=graphopt.optim.SGD(lr=0.0), precision=precision, **options)


def batch():
    return {"x": torch.randn(16, 32), "target": torch.randn(16, 32)}


@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_evaluation_computes_what_training_does(recipe):
    step, given = step_of(fp8.recipe_of(recipe), verify="infer"), batch()
    assert torch.equal(step(**given).loss, step.eval(**given).loss)


def test_a_module_without_gradients_computes_what_training_does(layers):
    _, module = layers
    given = batch()
    with torch.no_grad():
        evaluated = module(**given).out
    assert num_fp8_products(module.program) == 2
    trained, _, _ = gradients_of(layers, **given)  # behind it: what delayed scaling sees is for later steps
    assert torch.equal(trained, evaluated)


def test_micro_batches_add_up_to_what_they_are_apart():
    given = batch()
    step = graphopt.compile(
        Layers(), ["loss"], optimizer=graphopt.optim.SGD(lr=0.1), precision="fp8", backend="aten", accumulate=2
    )
    apart = graphopt.compile(Layers(), ["loss"], precision="fp8", backend="aten")
    for _ in range(2):
        apart(**given).loss.backward()
        step(**given)
    for (name, came), start in zip(step.model.named_parameters(), Layers().parameters(), strict=True):
        gradient = dict(apart.named_parameters())[name].grad  # of a sum, which a window adds up
        assert torch.allclose(came, start - 0.1 * gradient, rtol=0, atol=2e-7 * (1 + gradient.abs().max().item())), name


def test_a_frozen_layer_has_one_product_and_its_neighbour_two_or_three():
    model = Layers()
    model.first.requires_grad_(False)
    module = graphopt.compile(model, ["loss"], precision="fp8", backend="aten")
    module(**batch()).loss.backward()
    roles = [row.role for row in module.program.fp8.rows]
    assert sorted(roles) == ["forward", "forward", "weight gradient"]  # nothing below asks for the input gradient
    assert model.first.weight.grad is None and model.second.weight.grad is not None


def test_a_tied_weight_is_quantized_once_and_its_gradients_add_up():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(32, 32, bias=False)
            self.second = nn.Linear(32, 32, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x, target):
            return {"loss": (self.second(self.first(x).tanh()) * target).sum()}

    model, given = Tied(), batch()
    module = graphopt.compile(model, ["loss"], precision="fp8", backend="aten")
    module(**given).loss.backward()
    of_weight = [n for n in module.program.ops() if n.target in QUANTIZES and n.args[0].op == "placeholder"]
    assert len([node for node in of_weight if "weight" in node.args[0].name]) == 1
    plain = Tied()
    plain(**given)["loss"].backward()
    assert relative(plain.first.weight.grad, model.first.weight.grad) <= 2 * E5M2_PRODUCT


@pytest.mark.slow
def test_an_inductor_step_trains_as_generated_python_does():
    given = batch()
    losses = []
    for backend in ("aten", "inductor"):
        step = graphopt.compile(
            Layers(), ["loss"], optimizer=graphopt.optim.SGD(lr=1e-3), precision="fp8", backend=backend
        )
        losses.append([step(**given).loss.item() for _ in range(3)])
    # Regions keep float32 where generated Python rounds to bfloat16, which may move a code: 2**-4 of one product.
    assert losses[1] == pytest.approx(losses[0], rel=2.0**-4)


def test_programs_alone_take_the_passes_by_name():
    program = joint_program(Layers(), batch())
    after = graphopt.optimize(
        program, "tag-fp8{recipe=rowwise},insert-quantize{recipe=rowwise},fold-quantize,drop-dead", verify="numeric"
    )
    assert num_fp8_products(after) == 5


def test_bisection_finds_nothing_wrong():
    passes = graphopt.Pipeline.parse("drop-dead,tag-fp8,insert-quantize,drop-dead")
    found = bisect_model(Layers(), batch(), outputs=["loss"], passes=passes)
    assert found.broken is None


# ---- models ----------------------------------------------------------------------------------------------------------

FAST_MODELS = ("mlp",)


@pytest.mark.parametrize(
    "name", [name if name in FAST_MODELS else pytest.param(name, marks=pytest.mark.slow) for name in TINY_MODELS]
)
def test_every_kind_of_model_trains(name):
    """Three steps under each recipe, all losses finite and near bfloat16's."""
    recipes = ("tensorwise",) if name in FAST_MODELS else RECIPES
    losses = {}
    for precision in ("bf16", *recipes):
        torch.manual_seed(0)
        tiny = tiny_model(name)
        step = graphopt.compile(
            tiny.model,
            ["loss"],
            optimizer=graphopt.optim.AdamW(lr=1e-3),
            precision=fp8.recipe_of(precision) if precision != "bf16" else precision,
            backend="aten",
        )
        torch.manual_seed(1)
        losses[precision] = torch.tensor([step(**tiny.batch).loss.item() for _ in range(3)])
    for recipe in recipes:
        assert losses[recipe].isfinite().all()
        assert (losses[recipe] - losses["bf16"]).abs().max() <= NEAR * losses["bf16"].abs().max()


class Rounded(nn.Module):
    """A model that rounds one of its weights to FP8 by itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        rounded = self.weight.to(torch.float8_e4m3fn).to(torch.float32)
        return {"loss": (self.layer(x) @ rounded).square().mean()}


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"loss_scale": 8.0}], ids=["fp8", "loss scale"])
def test_a_gradient_that_the_model_widens_from_fp8_is_looked_at_as_it_is(options):
    torch.manual_seed(0)
    model = Rounded()
    step = graphopt.compile(model, ["loss"], optimizer=graphopt.optim.SGD(lr=1e-3), backend="aten", **options)
    before = model.weight.detach().clone()
    assert step(x=torch.randn(32, 32)).loss.isfinite()
    assert not torch.equal(model.weight, before)
