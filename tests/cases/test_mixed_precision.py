"""Mixed precision in whole steps: what is never lowered, what recomputing leaves alone, autocast beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.precision import precision_for
from tests.support.models import TINY_MODELS, tiny_model

COMPUTE = ("bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Largest relative error of one rounding to nearest: half of the distance of two neighbours.
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12}


def compiled(model, precision, outputs=("loss",), **options):
    options.setdefault("optimizer", graphopt.optim.SGD(lr=0.1))
    return graphopt.compile(model, outputs=list(outputs), precision=precision, backend="aten", **options)


# ---- integers, booleans, doubles -------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Row i of the table is [i % 7, i % 11, i % 13, i % 16]: exact in both types."""

    def __init__(self) -> None:
        super().__init__()
        index = torch.arange(70100)
        self.table = nn.Embedding.from_pretrained(
            torch.stack([index % size for size in (7, 11, 13, 16)], -1).float(), freeze=False
        )
        self.head = nn.Linear(4, 5)

    def forward(self, ids, attention_mask=None, labels=None, keep=None, scale=None):
        rows = self.table(ids)
        logits = self.head(rows * attention_mask[..., None]) * scale
        logits = logits.masked_fill(~keep[..., None], 0.0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"rows": rows, "loss": loss, "ids": ids + 0, "scale": scale * 1}


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("compute", COMPUTE)
def test_token_ids_masks_labels_and_doubles_are_not_cast(compute, by_keyword):
    model = Rows()
    ids = torch.tensor([[257, 2049, 70001]])
    rest = {
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "labels": torch.tensor([[1, -100, 2]]),
        "keep": torch.tensor([[True, True, True]]),
        "scale": torch.tensor(1.0, dtype=torch.float64),
    }
    step = compiled(model, compute, outputs=("rows", "loss", "ids", "scale"), optimizer=graphopt.optim.SGD(lr=0.0))
    reference = model(ids, **rest)
    out = step(ids=ids, **rest) if by_keyword else step(ids, **rest)
    assert out.rows.tolist() == [[[5, 4, 10, 1], [5, 3, 8, 1], [1, 8, 9, 1]]]
    assert (out.ids.dtype, out.scale.dtype, out.rows.dtype) == (torch.int64, torch.float64, torch.float32)
    assert torch.equal(out.ids, ids)
    # The loss is a mean over the two valid labels; weights and logits are each rounded once.
    assert (out.loss - reference["loss"]).abs() <= 4 * ROUNDING[compute] * 10
    without = model(ids[:, ::2], **{name: value[:, ::2] if value.dim() else value for name, value in rest.items()})
    assert torch.allclose(reference["loss"], without["loss"])


# ---- rotary tables ---------------------------------------------------------------------------------------------------


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))
        self.layer = nn.Linear(32, 32)

    def tables(self, length):
        angles = torch.arange(length).float()[:, None] @ self.inv_freq[None, :]
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def forward(self, x):
        cos, sin = self.tables(x.shape[1])
        h = self.layer(x)
        turned = torch.cat([-h[..., 16:], h[..., :16]], -1)
        return {"cos": cos, "loss": (h * cos + turned * sin).square().mean()}


@pytest.mark.parametrize("compute", COMPUTE)
def test_rotary_tables_are_exact_far_away(compute):
    model = Rope()
    expected = model.tables(2048)[0]
    step = compiled(model, compute, outputs=("cos", "loss"))
    cos = step(torch.randn(1, 2048, 32)).cos
    assert torch.equal(cos, expected) and not torch.equal(cos[256], cos[257])
    assert model.inv_freq.dtype is torch.float32
    again = Rope()
    again.load_state_dict(model.state_dict())
    assert again.inv_freq.dtype is torch.float32 and torch.equal(again.inv_freq, model.inv_freq)


# ---- evaluation in between, recomputing, the user's own autocast -----------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def square(out, batch):
    return out.square().mean() + out.sum()


def test_nothing_is_cached_between_calls():
    x = torch.randn(4, 2)
    plain, mixed = small(), small()
    steps = [compiled(model, "bf16", loss=square) for model in (plain, mixed)]
    for _ in range(2):
        steps[0](x)
        with torch.no_grad():
            steps[1].eval(x)
        steps[1](x)
        steps[1].eval(x)
    for parameter, other in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_module_gets_gradients_in_the_dtype_of_its_parameters_after_evaluations():
    x = torch.randn(4, 2)
    plain, mixed = small(), small()
    modules = [graphopt.compile(model, precision="bf16") for model in (plain, mixed)]
    with torch.no_grad():
        before = modules[1](x)["0"]
        for parameter in (*plain.parameters(), *mixed.parameters()):
            parameter.add_(0.25)
        assert not torch.equal(modules[1](x)["0"], before)
    for module in modules:
        square(module(x)["0"], None).backward()
    for parameter, other in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert parameter.grad.dtype is torch.float32 and torch.equal(parameter.grad, other.grad)


class Layers(nn.Module):
    """Three layers with what is lowered, what is not, and dropout; the middle one may be kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
            for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean().exp().log1p()}


@pytest.mark.parametrize("keep", [(), ("layers.1.1",)])
@pytest.mark.parametrize("compute", COMPUTE)
def test_recomputing_changes_no_bit(compute, keep):
    results = []
    for checkpoint in (None, graphopt.checkpoint.EveryN(1)):
        model = Layers()
        step = compiled(model, graphopt.Precision(compute, keep_fp32=keep), checkpoint=checkpoint)
        torch.manual_seed(3)
        losses = [float(step(torch.randn(8, 16)).loss) for _ in range(2)]
        results.append((losses, list(model.parameters())))
    assert step.report().decisions.with_action("recompute")
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("compute", COMPUTE)
def test_the_predicted_peak_is_the_measured_one(compute):
    step = compiled(Layers(), compute)
    step(torch.randn(64, 16))
    report = step.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes


@pytest.mark.parametrize("compute", COMPUTE)
def test_the_users_own_autocast_does_not_conflict(compute):
    class Inside(Layers):
        def forward(self, x):
            for layer in self.layers:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    h = layer[:3](x)
                with torch.autocast("cpu", enabled=False):
                    x = x + layer[3:](h.float())
            return {"loss": x.square().mean()}

    for checkpoint in (None, graphopt.checkpoint.EveryN(1)):
        step = compiled(Inside(), compute, checkpoint=checkpoint)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert step(torch.randn(4, 16)).loss.isfinite()
        assert step(torch.randn(4, 16)).loss.isfinite()


# ---- parameters in two bytes -----------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return {"loss": (self.base(x) + self.b(self.a(x))).float().square().mean()}


def test_a_model_in_float16_computes_in_float16_and_trains():
    torch.manual_seed(0)
    model = Adapted().half()
    step = compiled(model, "fp16", optimizer=graphopt.optim.AdamW(lr=1e-3))
    x = torch.randn(8, 4, dtype=torch.float16)
    losses = [float(step(x).loss) for _ in range(8)]
    assert losses[-1] < losses[0] and {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_a_window_adds_up_in_float32():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, 1))

        def forward(self, x):
            return {"loss": (x @ self.w).sum()}

    model = Sum()
    step = compiled(
        model, "bf16", optimizer=graphopt.optim.SGD(lr=1.0), accumulate=graphopt.Accumulate(257, reduction="sum")
    )
    step(torch.full((1, 1), 256.0))
    for _ in range(256):
        step(torch.ones(1, 1))
    assert model.w.item() == -512.0


# ---- beside torch.autocast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_every_product_that_autocast_lowers_is_lowered(name):
    tiny = tiny_model(name)
    table = graphopt.autocast_table(tiny.model, tiny.batch, outputs=["loss"])
    products = [row for row in table if row.is_product]
    assert len(products) >= 8
    assert [row for row in products if row.autocast == "bf16" and row.ours != "bf16"] == []
    assert {row.ours for row in table if row.reason == "sensitive: loss"} == {"f32"}


def eager_losses(tiny, optimizer, dtype, num_steps):
    losses = []
    for _ in range(num_steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = tiny.model(**tiny.batch)
        loss = out["loss"] if isinstance(out, dict) else out.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert", "vit"))]
)
def test_training_follows_autocast(name):
    def fresh():
        tiny = tiny_model(name)
        for module in tiny.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        torch.manual_seed(1)
        return tiny

    def adamw(tiny):
        return torch.optim.AdamW(tiny.model.parameters(), lr=1e-3)

    num_steps = 30
    reference, twin = fresh(), fresh()
    exact = eager_losses(reference, adamw(reference), None, num_steps)
    mixed = eager_losses(twin, adamw(twin), torch.bfloat16, num_steps)
    tiny = fresh()
    step = compiled(tiny.model, "bf16", optimizer=graphopt.optim.AdamW(lr=1e-3))
    ours = [float(step(**tiny.batch).loss) for _ in range(num_steps)]
    assert ours[-1] < ours[0]
    # A loss is a mean of logits' differences; logits carry the roundings of about 2 * num_layers + 2 sums through
    # layers. These are random, so they add up as their root; each is half a unit of 8 bits of the largest logit, and
    # training may shift the loss by as much again in each direction.
    tolerance = 4 * (2 * 2 + 2) ** 0.5 * ROUNDING["bf16"] * max(exact)
    assert max(abs(a - b) for a, b in zip(ours, mixed, strict=True)) <= tolerance
    assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_every_tiny_model_trains_and_matches_eager(name, compute):
    tiny, twin = tiny_model(name), tiny_model(name)
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    expected = eager_losses(twin, optimizer, None, 3)
    step = compiled(tiny.model, compute, optimizer=graphopt.optim.SGD(lr=1e-3), verify="infer")
    torch.manual_seed(1)
    losses = [float(step(**tiny.batch).loss) for _ in range(3)]
    assert all(parameter.isfinite().all() for parameter in tiny.model.parameters())
    # One rounding of each of about ten values in a row, of a loss of a few units.
    tolerance = 10 * ROUNDING[compute] * max(map(abs, expected))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= tolerance


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_the_loss_of_every_tiny_model_is_that_of_float32_but_for_rounding(name):
    tiny = tiny_model(name)
    tiny.model.eval()
    plain = graphopt.capture(tiny.model, tiny.batch, outputs=["loss"])
    by_name = {**dict(tiny.model.named_parameters()), **dict(tiny.model.named_buffers()), **tiny.batch}
    inputs = [by_name[entry.name].detach() for entry in plain.signature.inputs]
    (expected,) = plain.run(inputs)[:1]
    for compute in COMPUTE:
        lowered = graphopt.optimize(plain, f"lower-precision{{compute={compute}}}", verify="infer")
        assert lowered.history[-1].changes or lowered.history[-1].refusals  # no LSTM in float16 on a CPU
        assert (lowered.run(inputs)[0] - expected).abs() <= 10 * ROUNDING[compute] * expected.abs()


def test_the_modules_that_transformers_keeps_in_float32_are_kept():
    tiny = tiny_model("t5")
    half = precision_for(tiny.model, graphopt.Precision("fp16"))
    assert half.keep_fp32 == ("wo", "*.wo")
    assert precision_for(tiny.model, graphopt.Precision("bf16")).keep_fp32 == ()
    table = graphopt.autocast_table(tiny.model, tiny.batch, outputs=["loss"], precision="fp16")
    kept = {row.module.rpartition(".")[2] for row in table if row.reason == "kept by keep_fp32 pattern '*.wo'"}
    assert kept == {"wo"} and {row.ours for row in table if row.module.endswith(".wi")} == {"f16"}


# ---- the option ------------------------------------------------------------------------------------------------------


def test_fp32_changes_nothing():
    results = []
    for options in ({}, {"precision": "fp32"}, {"precision": graphopt.Precision("fp32", master="none")}):
        model = Layers()
        step = graphopt.compile(
            model, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1), backend="aten", **options
        )
        torch.manual_seed(3)
        step(torch.randn(8, 16))
        records = [(record.name, record.changes, record.ops_after) for record in step.report().records]
        results.append((records, step.report().precision, [parameter.tolist() for parameter in model.parameters()]))
    assert results[0] == results[1] == results[2] and results[0][1].rows == ()


def test_a_mistake_in_the_option_says_what_there_is():
    model = small()
    with pytest.raises(UnsupportedError, match="precision expects 'fp32', 'bf16'"):
        compiled(model, "half", loss=square)
    with pytest.raises(UnsupportedError, match="compute expects one of"):
        graphopt.Precision("float8")
    with pytest.raises(UnsupportedError, match="write keep_fp32="):
        graphopt.Precision(keep_fp32="lm_head")
    with pytest.raises(UnsupportedError, match="'head', which no module matches; there are 0, 1"):
        compiled(model, graphopt.Precision(keep_fp32=("head",)), loss=square)


def test_decisions_are_printed_with_their_reasons(tmp_path):
    step = compiled(Layers(), graphopt.Precision("bf16", keep_fp32=("layers.1",)), dump=tmp_path)
    step(torch.randn(8, 16))
    assert "in bf16: matrix product" in step.explain("layers.0.1")
    assert "in bf16: matrix product" in step.explain("layers.0.1.weight")
    assert "in f32: kept by keep_fp32 pattern 'layers.1'" in step.explain("layers.1.1")
    assert "computed in bf16" in str(step.report())
    (found,) = tmp_path.glob("*/precision.txt")
    assert "float32 arrives" in found.read_text() and "sensitive: steep function" in found.read_text()
    assert "Precision" in next(tmp_path.glob("*/report.html")).read_text()


def test_bisection_lets_a_lossy_pass_be_lossy():
    from graphopt.dry_run import bisect_model

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    found = bisect_model(
        model, {"input": torch.randn(4, 8)}, outputs=["0"], passes=graphopt.Pipeline.parse("lower-precision")
    )
    assert found.broken is None
