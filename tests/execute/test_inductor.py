"""backend="inductor" and "auto" on real steps: numbers, peaks, what compiles and what does not."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.execute import backend as backends
from graphopt.execute.region import Region
from graphopt.execute.region_decompositions import decompositions
from tests.support.models import tiny_model

aten = torch.ops.aten

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")

# Sums of up to 1,000 float32 terms in another order, three steps long.
TOLERANCE = 1e3 * torch.finfo(torch.float32).eps


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Equal layers with dropout, a tied head and a batch normalisation."""

    def __init__(self, num_layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.flatten(0, 1)))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels.flatten())}


def make(num_layers: int = 2) -> tuple[Blocks, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (8, 64))
    return Blocks(num_layers), {"ids": ids, "labels": ids}


def compiled(model: nn.Module, backend: str, **options):
    options = {"outputs": ["loss"], "optimizer": graphopt.optim.SGD(lr=0.1, momentum=0.9), **options}
    return graphopt.compile(model, backend=backend, **options)


def trained(backend: str, *, num_steps: int = 3, **options):
    """The step, its model's state and the generator's state after some steps from one seed."""
    model, batch = make()
    step = compiled(model, backend, **options)
    torch.manual_seed(5)
    for _ in range(num_steps):
        step(**batch)
    return step, model.state_dict(), torch.get_rng_state()


def assert_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            scale = value.abs().max().clamp(min=1e-2)
            assert (value - found[name]).abs().max() <= TOLERANCE * scale, name
        else:
            assert torch.equal(value, found[name]), name


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"clip_grad_norm": 0.5}, id="clip", marks=pytest.mark.slow),
        pytest.param({"accumulate": 2}, id="accumulate", marks=pytest.mark.slow),
    ],
)
def test_trains_as_aten_does_with_the_same_random_bits(options):
    num_steps = 4 if "accumulate" in options else 3
    _, expected, expected_random = trained("aten", num_steps=num_steps, **options)
    step, found, found_random = trained("inductor", num_steps=num_steps, **options)
    assert any(isinstance(node.target, Region) for node in step.program.ops())
    assert torch.equal(expected_random, found_random)
    assert_close(expected, found)


@needs_compiler
def test_the_peak_is_predicted_and_no_higher_than_planned_without_fusion():
    planned = trained("aten", num_steps=1)[0].report()
    report = trained("inductor", num_steps=1)[0].report(measure=True)
    assert abs(report.measured_peak_bytes - report.predicted_peak_bytes) <= 0.05 * report.measured_peak_bytes
    assert report.predicted_peak_bytes <= planned.predicted_peak_bytes
    assert (report.backend, report.backend_reason) == ("inductor", "asked for")
    assert any("regions" in note for note in report.notes)


@needs_compiler
def test_another_learning_rate_compiles_nothing():
    model, batch = make()
    step = compiled(model, "inductor")
    step(**batch)
    source, before = step.source, model.embed.weight.detach().clone()
    step.optimizer.param_groups[0]["lr"] = 0.0
    step(**batch)
    assert step.source is source and step.steps.compiled == 1
    assert torch.equal(model.embed.weight, before)


@needs_compiler
def test_more_layers_compile_no_more_regions():
    texts = []
    for num_layers in (4, 6):
        model, batch = make(num_layers)
        step = compiled(model, "inductor")
        step(**batch)
        texts.append({node.target.text for node in step.program.ops() if isinstance(node.target, Region)})
    assert texts[0] == texts[1]


@needs_compiler
def test_a_module_has_the_gradients_of_aten():
    gradients = []
    for backend in ("aten", "inductor"):
        model, batch = make()
        module = graphopt.compile(model, outputs=["loss", "logits"], backend=backend)
        torch.manual_seed(5)
        module(**batch).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        gradients[-1] |= dict(model.named_buffers())
    assert_close(*gradients)


class Normalised(nn.Module):
    """A product of two bytes that a normalisation with float32 weights reads."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = layer, norm, copy.deepcopy(layer)

    def forward(self, x):
        h = self.first(x) + 1
        return {"loss": (self.last(self.norm(h) + h) - x).square().mean()}


NORMALISED = {
    "layer": (nn.Linear(80, 80), nn.LayerNorm(80), (16, 80)),
    "group": (nn.Conv1d(16, 16, 1), nn.GroupNorm(4, 16), (8, 16, 32)),
    "batch": (nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16), (8, 16, 32)),
}


@needs_compiler
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NORMALISED)
def test_gradients_through_a_normalisation_in_mixed_precision_are_those_of_aten(name, precision):
    layer, norm, shape = NORMALISED[name]
    torch.manual_seed(0)
    model, x = Normalised(layer, norm), torch.randn(shape)
    gradients = {}
    for backend in ("aten", "inductor"):
        twin = copy.deepcopy(model)
        graphopt.compile(twin, outputs=["loss"], precision=precision, backend=backend)(x)["loss"].backward()
        gradients[backend] = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for parameter, expected in gradients["aten"].items():
        # The biases before a batch normalisation have a gradient of rounding errors alone.
        scale = max(expected.norm(), 1e-2 * gradients["aten"]["last.weight"].norm())
        assert (gradients["inductor"][parameter] - expected).norm() < 4 * torch.finfo(torch.bfloat16).eps * scale


@needs_compiler
@pytest.mark.parametrize("name", NORMALISED)
def test_a_decomposed_normalisation_has_the_statistics_of_the_operator(name):
    _, norm, shape = NORMALISED[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() + 3
    calls = {
        "layer": (aten.native_layer_norm.default, (x, [shape[-1]], norm.weight, norm.bias, 1e-5)),
        "group": (aten.native_group_norm.default, (x, norm.weight, norm.bias, *shape, 4, 1e-5)),
        "batch": (
            aten._native_batch_norm_legit_functional.default,
            (x, norm.weight, norm.bias, torch.zeros(shape[1]), torch.ones(shape[1]), True, 0.1, 1e-5),
        ),
    }
    operator, arguments = calls[name]
    with torch.no_grad():
        expected, found = operator(*arguments), decompositions()[operator](*arguments)
    for mine, its in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype is its.dtype is torch.float32
        torch.testing.assert_close(mine.reshape(its.shape), its, rtol=1e-5, atol=1e-6)


def test_resumes_bit_for_bit_and_evaluates():
    model, batch = make()
    step = compiled(model, "inductor")
    step(**batch)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(step.state_dict())
    first = float(step(**batch).loss)
    other, _ = make()
    other.load_state_dict(weights)
    resumed = compiled(other, "inductor")
    resumed.load_state_dict(state)
    assert float(resumed(**batch).loss) == first
    expected = compiled(other, "aten").eval(**batch).loss
    assert abs(resumed.eval(**batch).loss - expected) <= TOLERANCE * expected.abs()


@needs_compiler
def test_dumps_show_the_regions(tmp_path):
    model, batch = make()
    step = compiled(model, "inductor", dump=tmp_path)
    step(**batch)
    names = [path.name for path in step.dumps[0].iterdir()]
    assert any("inductor" in name for name in names)
    emitted = next(path for path in step.dumps[0].iterdir() if path.name.endswith("emitted.py")).read_text()
    assert "region_" in emitted and "def region_" not in emitted
    assert "aten.mm" in (step.dumps[0] / "regions.txt").read_text()


def test_without_a_compiler_inductor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backends.shutil, "which", lambda name: None)
    model, batch = make()
    with pytest.raises(UnsupportedError, match=r"install g\+\+"):
        compiled(model, "inductor")(**batch)
    step = compiled(model, "auto")
    step(**batch)
    assert step.report().backend == "aten" and "install g++" in step.report().backend_reason


def test_auto_leaves_a_small_model_on_aten_and_says_why():
    model, batch = make()
    step = compiled(model, "auto")
    step(**batch)
    report = step.report()
    assert report.backend == "aten" and "too small to repay" in report.backend_reason


@needs_compiler
def test_auto_compiles_what_repays_it(monkeypatch):
    monkeypatch.setattr(backends, "STEPS_TO_REPAY", 10**9)
    model, batch = make()
    step = compiled(model, "auto")
    step(**batch)
    report = step.report()
    assert report.backend == "inductor" and report.backend_reason.startswith("auto: saves")


def test_an_unknown_backend_is_refused():
    with pytest.raises(UnsupportedError, match="'aten', 'inductor' or 'auto'"):
        compiled(make()[0], "xla")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "t5", "mixtral", "odd-dropouts", "lstm"])
def test_models_train_as_on_aten(name):
    states = []
    for backend in ("aten", "inductor"):
        tiny = tiny_model(name)
        step = compiled(tiny.model, backend, outputs=list(tiny.outputs), optimizer=graphopt.optim.SGD(lr=0.01))
        torch.manual_seed(5)
        for _ in range(2):
            step(**tiny.batch)
        states.append({**tiny.model.state_dict(), "random": torch.get_rng_state()})
    assert_close(*states)


def test_statistics_of_a_normalisation_cross_regions_in_the_dtype_of_the_plan():
    """In bfloat16 with float32 weights the kernel gives float32 statistics; Inductor's own way gives bfloat16."""
    losses = {}
    for backend in ("aten", "inductor"):
        tiny = tiny_model("bert")
        for module in tiny.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        step = graphopt.compile(
            tiny.model, ["loss"], optimizer=graphopt.optim.SGD(lr=0.5), precision="bf16", backend=backend
        )
        losses[backend] = [float(step(**tiny.batch).loss) for _ in range(3)]
    # bfloat16 has 8 bits: three steps away from each other by a few roundings of 0.4 % each.
    assert losses["inductor"] == pytest.approx(losses["aten"], rel=0.02)
