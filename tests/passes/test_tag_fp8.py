"""tag-fp8: every product of a step gets a row, each decided by itself, with a reason that a user understands."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import graphopt
from graphopt.api import optimize
from graphopt.build import training_program
from graphopt.errors import UnsupportedError
from graphopt.fp8 import Blockwise, Delayed, Rowwise, Tensorwise
from graphopt.ir.fp8_table import Fp8Row, Fp8Table
from graphopt.passes.tag_fp8 import TagFp8
from graphopt.pipeline.pass_base import Changes
from graphopt.planner.fp8_decide import decide_products
from graphopt.precision import Precision
from tests.support.graphs import run_pass
from tests.support.models import TINY_MODELS

ROLES = ("forward", "input gradient", "weight gradient")


class Layers(nn.Module):
    """Layers of ``sizes`` with an activation between them, and a loss that makes none of them a head."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean()}


class Block(nn.Module):
    """Projections of one input, attention, a norm, a router over experts, and a head with a cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.wo, self.word = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.gate, self.out = nn.LayerNorm(32), nn.Linear(32, 4), nn.Linear(32, 48)

    def forward(self, x, y):
        q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
        x = self.norm(x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]))
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        x = self.word(x) * weights.sum(-1, keepdim=True) + chosen.sum()
        return {"loss": nn.functional.cross_entropy(self.out(x).flatten(0, 1), y.flatten())}


def block_batch():
    return {"x": torch.randn(2, 16, 32), "y": torch.randint(0, 48, (2, 16))}


def joint(model, batch, precision=None):
    return training_program(model, batch, outputs=["loss"], precision=precision or Precision(compute="fp8"))


def table(model, batch, recipe="tensorwise", **options) -> Fp8Table:
    return graphopt.fp8_table(model, batch, recipe, outputs=["loss"], **options)


@cache
def block_program():
    """The joint program of a Block, captured once for all tests that only look at it."""
    return optimize(joint(Block(), block_batch()), "drop-dead,fold-identities,dedupe,drop-dead")


def block_table(recipe=None, target=None) -> Fp8Table:
    return decide_products(block_program(), replace(recipe or Tensorwise(), target=target))


def of_layer(found: Fp8Table, module: str) -> dict[str, Fp8Row]:
    return {row.role: row for row in found.rows if row.module == module}


def eligible(found: Fp8Table) -> set[tuple[str, str]]:
    return {(row.module, row.role) for row in found.eligible}


def x_of(rows: int, columns: int):
    return {"x": torch.randn(rows, columns, requires_grad=True)}


@pytest.mark.parametrize("recipe", [Tensorwise(), Rowwise(), Blockwise(), Delayed(history=16)], ids=lambda r: r.name)
def test_every_recipe_takes_the_same_products_where_costs_are_not_counted(recipe):
    found = block_table(recipe)
    assert found.recipe == recipe.name and "emulation" in found.device
    assert eligible(found) == eligible(block_table())


def test_all_three_products_of_a_layer_are_eligible_and_the_graph_stays():
    program = joint(Layers(32, 48, 64), {"x": torch.randn(16, 32)})
    after, record = run_pass(TagFp8(), program)
    assert record.changes == 0 and after.text() == program.text()
    # Nothing asks for the gradient of the batch.
    assert set(of_layer(after.fp8, "layers.0")) == {"forward", "weight gradient"}
    assert eligible(after.fp8) == {
        *((("layers.1"), role) for role in ROLES),
        ("layers.0", "forward"),
        ("layers.0", "weight gradient"),
    }


def test_sizes_and_parameters_are_those_of_each_product():
    rows = of_layer(table(Layers(32, 48, 64), {"x": torch.randn(16, 32)}), "layers.1")
    sizes = {role: (row.rows, row.columns, row.contraction) for role, row in rows.items()}
    assert sizes == {"forward": (16, 64, 48), "input gradient": (16, 48, 64), "weight gradient": (64, 48, 16)}
    assert {row.weights for row in rows.values()} <= {("layers.1.weight",), ()}
    assert rows["weight gradient"].weights == rows["forward"].weights


def test_the_three_products_of_each_layer_are_shown_together():
    found = block_table().by_layer()
    modules = [row.module for row in found]
    assert len([1 for a, b in pairwise(modules) if a != b]) == len(set(modules)) - 1


def test_a_program_that_is_tagged_is_left():
    program = block_program().copy()
    assert TagFp8("rowwise").apply(program).count == 0
    once = program.fp8
    assert TagFp8(Tensorwise(exclude=("q",))).apply(program) == Changes(0)
    assert program.fp8 == once and once.recipe == "rowwise"


def test_convolutions_and_recurrent_layers_have_rows():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lstm, self.mv = nn.Conv1d(8, 16, 3), nn.LSTM(16, 16), nn.Parameter(torch.randn(16))

        def forward(self, x):
            x, _ = self.lstm(self.conv(x).permute(2, 0, 1))
            return {"loss": (x.flatten(0, 1) @ self.mv).square().mean()}

    found = table(Mixed(), {"x": torch.randn(2, 8, 10)})
    reasons = {row.operator.rpartition(".")[0]: row.reason for row in found.rows}
    assert reasons["aten.convolution"] == reasons["aten.convolution_backward"] == "convolution: not supported yet"
    assert reasons["graphopt.lstm_layer"].startswith("recurrent layer") and "in a form" in reasons["aten.mv"]
    assert next(row.shape for row in found.rows) == "16 x 16 x 24"


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_product_of_every_model_has_a_row_and_a_reason(name):
    made = TINY_MODELS[name]()
    found = graphopt.fp8_table(made.model, made.batch, outputs=["loss"])
    assert found.rows and all(row.reason for row in found.rows)
    assert found.text().count("\n") == len(found.rows) + 3
    kinds = {"mixtral": "experts", "cnn": "convolution", "lstm": "recurrent", "gpt2": "two activations"}
    assert kinds.get(name, "") in found.text()


def test_attention_and_its_gradient_are_never_taken():
    rows = [row for row in block_table().rows if "attention" in row.operator]
    assert len(rows) == 2 and not any(row.is_fp8 for row in rows)
    assert all(row.reason.startswith("attention product: never") for row in rows)


def test_products_of_two_activations_and_their_gradients_are_not_taken_for_those_of_a_layer():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x):
            return {"loss": (self.q(x) @ self.k(x).t()).tanh().mean()}

    found = table(Scores(), {"x": torch.randn(16, 32)})
    others = [row for row in found.rows if row.module not in ("q", "k")]
    assert [row.role for row in others] == ["other"] * 3
    assert all("two activations" in row.reason for row in others) and len(found.eligible) == 4


def test_a_batched_product_with_weights_is_told_from_one_of_activations():
    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 32, 16))

        def forward(self, x):
            return {"loss": (x.tanh() @ self.weight).square().mean()}

    rows = table(Batched(), {"x": torch.randn(2, 16, 32)}).rows
    assert rows and all(row.reason == "batched product with weights: not supported yet" for row in rows)
    assert rows[0].shape == "2 of 16 x 16 x 32"


def test_the_fused_loss_has_rows_for_its_three_products():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 2**14)

        def forward(self, x, y):
            return {"loss": nn.functional.cross_entropy(self.head(self.body(x)), y)}

    found = table(Head(), {"x": torch.randn(256, 16), "y": torch.randint(0, 99, (256,))})
    fused = [row for row in found.rows if "linear_cross_entropy" in row.operator]
    assert {row.role for row in fused} == set(ROLES) and not any(row.is_fp8 for row in fused)
    assert all("fused loss" in row.reason for row in fused)


def test_a_head_and_a_router_are_found_by_where_their_results_go():
    found = block_table()
    assert {row.reason for row in of_layer(found, "out").values()} == {
        "head: its result goes into the loss over classes"
    }
    (reason,) = {row.reason for row in of_layer(found, "gate").values()}
    assert reason == "router: its result goes into a softmax over 4 columns"
    assert {module for module, _ in eligible(found)} == {"q", "k", "v", "wo", "word"}


def test_a_requested_output_called_logits_makes_a_head():
    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            logits = self.last(self.body(x))
            return {"logits": logits, "loss": logits.square().mean()}

    batch = {"x": torch.randn(16, 16)}
    both = graphopt.fp8_table(Regression(), batch, outputs=["loss", "logits"])
    assert of_layer(both, "last")["forward"].reason == "head: its result is the output 'logits'"
    assert ("last", "forward") in eligible(graphopt.fp8_table(Regression(), batch, outputs=["loss"]))


def test_a_router_of_sigmoids_with_a_bias_is_one():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.bias = nn.Linear(32, 16, bias=False), nn.Buffer(torch.zeros(16))

        def forward(self, x):
            scores = self.gate(x).sigmoid()
            _, chosen = (scores + self.bias).topk(4)
            return {"loss": scores.gather(1, chosen).square().mean()}

    found = table(Gate(), {"x": torch.randn(16, 32)})
    assert of_layer(found, "gate")["forward"].reason == "router: the largest of its 16 columns are chosen"
    assert not found.eligible


def test_a_sigmoid_gate_of_a_wide_layer_is_no_router():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)

        def forward(self, x):
            return {"loss": (self.gate(x).sigmoid() * self.up(x)).square().mean()}

    assert len(table(Gated(), {"x": torch.randn(16, 32)}).eligible) == 4


# ---- sizes -----------------------------------------------------------------------------------------------------------


def single(columns: int, out: int, tokens: int, recipe="tensorwise", **options) -> dict[str, Fp8Row]:
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.layer = nn.Parameter(torch.zeros(columns)), nn.Linear(columns, out)

        def forward(self, x):
            return {"loss": self.layer(x + self.shift).square().mean()}

    return of_layer(table(One(), {"x": torch.randn(tokens, columns)}, recipe, **options), "layer")


def test_a_size_that_is_no_multiple_of_16_is_padded_where_that_is_little_work():
    rows = single(32, 97, 16)
    assert all(row.is_fp8 for row in rows.values()) and set(rows) == set(ROLES)
    # 97 is columns of the forward product, contraction of the input gradient, and rows of the weight gradient.
    assert [rows[role].pad for role in ROLES] == [(0, 15, 0), (0, 0, 15), (0, 0, 0)]
    assert rows["forward"].padded_to == "16 x 112 x 32"
    assert "output features 97 to 112, the next multiple of 16: 15% more work" in rows["forward"].reason


@pytest.mark.parametrize(("columns", "out"), [(32, 2), (18, 10)])
def test_padding_that_does_not_pay_falls_back(columns, out):
    rows = single(columns, out, 16)
    for role in ("forward", "input gradient"):
        assert not rows[role].is_fp8 and rows[role].pad == (0, 0, 0)
        assert rows[role].reason.startswith("padding does not pay") and "at most 25%" in rows[role].reason
    assert f"output features {out} to 16" in rows["forward"].reason


def test_few_tokens_are_the_contraction_of_the_weight_gradient_alone():
    for tokens in (1, 5):
        rows = single(32, 48, tokens)
        assert rows["forward"].is_fp8 and rows["input gradient"].is_fp8
        assert not rows["weight gradient"].is_fp8 and f"tokens {tokens} to 16" in rows["weight gradient"].reason
    assert single(32, 48, 125)["weight gradient"].pad == (0, 0, 3)


def test_a_size_is_named_by_what_it_is_where_weights_lie_the_other_way():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(32, 2)), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return {"loss": torch.addmm(self.bias, x, self.weight).square().mean()}

    rows = {row.role: row for row in table(Conv1D(), {"x": torch.randn(16, 32)}).rows}
    assert "output features 2 to 16" in rows["weight gradient"].reason


# ---- dtypes, names, predicates ---------------------------------------------------------------------------------------


def test_products_that_are_kept_in_float32_say_so():
    model = Layers(32, 32, 32)
    precision = Precision(compute="fp8", keep_fp32=("layers.0",))
    found = decide_products(joint(model, {"x": torch.randn(16, 32)}, precision), Tensorwise())
    assert of_layer(found, "layers.0")["forward"].reason.startswith("operands are f32, not of two bytes")
    assert ("layers.1", "forward") in eligible(found)


def test_a_double_model_stays_double():
    found = table(Layers(32, 32).double(), {"x": torch.randn(16, 32, dtype=torch.float64)})
    assert found.rows and all("operands are f64" in row.reason for row in found.rows)


def test_weight_gradients_in_bf16_are_asked_for_by_the_recipe():
    found = block_table(Rowwise(weight_gradient="bf16"))
    assert {role for _, role in eligible(found)} == {"forward", "input gradient"}
    assert 'weight_gradient="bf16"' in of_layer(found, "q")["weight gradient"].reason


def test_names_match_whole_paths():
    found = block_table(Tensorwise(exclude=("wo",)))
    assert {row.reason for row in of_layer(found, "wo").values()} == {"excluded by name ('wo')"}
    assert all(row.is_fp8 for row in of_layer(found, "word").values())


def test_a_name_includes_what_rules_would_leave_out_but_not_what_cannot_be():
    found = block_table(Tensorwise(include=("out", "gate")))
    assert all(row.is_fp8 for row in of_layer(found, "out").values())
    gate = of_layer(found, "gate")["forward"]
    assert gate.is_fp8 and gate.pad == (0, 12, 0) and gate.reason.startswith("included by name ('gate'); padded")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, y):
            return self.block(x, y)

    kept = table(Attention(), block_batch(), Tensorwise(include=("block",)))
    attention = next(row for row in kept.rows if "attention" in row.operator)
    assert not attention.is_fp8 and attention.reason.endswith("included by name ('block') in vain")


def test_exclude_goes_before_include():
    found = block_table(Tensorwise(include=("*",), exclude=("q",)))
    assert not any(row.is_fp8 for row in of_layer(found, "q").values())


@pytest.mark.parametrize("option", ["exclude", "include"])
def test_a_pattern_of_no_product_is_an_error_with_close_names(option):
    with pytest.raises(UnsupportedError, match=f"{option} expects patterns of module paths, came 'worm', .*word"):
        block_table(Tensorwise(**{option: ("worm",)}))
    with pytest.raises(UnsupportedError, match=r"came 'norm', which no module with a matrix product matches"):
        block_table(Tensorwise(**{option: ("norm",)}))
    with pytest.raises(UnsupportedError, match=r"there are \*\.1"):
        table(Layers(32, 32, 32), {"x": torch.randn(16, 32)}, Tensorwise(**{option: ("1",)}))


def test_a_predicate_decides_in_the_place_of_places_and_not_of_names():
    seen = []

    def choose(facts):
        seen.append(facts)
        return facts.module in ("out", "q") and facts.role != "weight gradient"

    found = block_table(Tensorwise(choose=choose, include=("v",)))
    assert eligible(found) == {
        ("out", "forward"),
        ("out", "input gradient"),
        ("q", "forward"),
        *(("v", role) for role in ("forward", "weight gradient")),
    }
    assert of_layer(found, "k")["forward"].reason == "not chosen by choose"
    facts = next(item for item in seen if item.module == "q" and item.role == "weight gradient")
    assert (facts.rows, facts.columns, facts.contraction, facts.weights) == (32, 32, 32, ("q.weight",))


def test_what_a_predicate_raises_is_shown_with_the_facts():
    with pytest.raises(UnsupportedError, match=r"choose raised ZeroDivisionError.*ProductFacts\(module='q', role="):
        block_table(Tensorwise(choose=lambda facts: 1 // 0 == 0))


def test_first_and_last_layers_are_left_out_by_count():
    model, batch = Layers(32, 32, 32, 32, 32), {"x": torch.randn(16, 32)}
    found = table(model, batch, Tensorwise(skip_first=1, skip_last=2))
    assert {module for module, _ in eligible(found)} == {"layers.1"}
    assert of_layer(found, "layers.3")["forward"].reason == "among the last 2 of 4 layers (skip_last)"
    with pytest.raises(UnsupportedError, match="skip_first=1, skip_last=0 expect layers with numbers"):
        block_table(Tensorwise(skip_first=1))


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_costs_of_a_target_decide_on_a_machine_without_it():
    small = block_table(target="h100")
    assert small.device == "H100 (estimated rates), run as emulation on cpu" and not small.eligible
    row = of_layer(small, "q")["forward"]
    assert row.reason == "below break-even on H100 (estimated rates)" and row.bf16_seconds > 0
    assert row.bf16_seconds < row.fp8_seconds + row.quantize_seconds
    assert "us in bf16" in str(row) and "us to quantize" in str(row)
    with torch.device("meta"):
        large, batch = Layers(4096, 4096), {"x": torch.randn(8192, 4096)}
    found = table(large, batch, Tensorwise(target="H100"))
    assert len(found.eligible) == len(found.rows) and found.seconds_saved > 0
    assert all(row.reason == "saves time on H100 (estimated rates)" for row in found.rows)


def test_a_device_without_fp8_has_no_eligible_product():
    found = block_table(target="A100")
    assert not found.eligible
    assert "no FP8 here: sm_80" in of_layer(found, "q")["forward"].reason


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match=r"target expects one of A100, L4, .*H100, .*came 'V100'"):
        block_table(target="V100")


def test_several_readers_of_one_input_pay_for_it_together():
    class Projections(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(count))

        def forward(self, x):
            return {"loss": sum(layer(x).square().mean() for layer in self.layers)}

    def quantizing(count):
        with torch.device("meta"):
            model, batch = Projections(count), {"x": torch.randn(16384, 512)}
        recipe = Delayed(target="L4", include=("layers",))
        found = table(model, batch, recipe)
        return sum(row.quantize_seconds for row in found.eligible if row.role == "forward") / count

    assert quantizing(4) < 0.6 * quantizing(1)


def test_bytes_are_saved_where_codes_alone_are_read_by_the_backward_part():
    found = table(Layers(32, 48, 64), {"x": torch.randn(16, 32)})
    # The batch is cast to two bytes for the products alone; tanh's backward reads its result, the input of layers.1.
    assert {row.module: row.bytes_saved for row in found.rows if row.bytes_saved} == {"layers.0": 16 * 32}

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            x = self.first(x)
            return {"loss": (self.a(x) + self.b(x)).square().mean()}

    twice = table(Twice(), {"x": torch.randn(16, 32)})
    assert [row.bytes_saved for row in twice.rows if row.bytes_saved] == [16 * 32, 16 * 32]
    assert {row.module for row in twice.rows if row.bytes_saved} in ({"first", "a"}, {"first", "b"})
    assert table(Twice(), {"x": torch.randn(16, 32)}, replace(Tensorwise(), saved="none")).bytes_saved == 0


# ---- looking inside --------------------------------------------------------------------------------------------------


def test_explain_the_report_and_the_dump_say_it(tmp_path):
    step = graphopt.compile(
        Block(),
        ["loss"],
        optimizer=graphopt.optim.SGD(lr=0.1),
        precision=Tensorwise(exclude=("k",)),
        backend="aten",
        dump=tmp_path,
    )
    step(**block_batch())
    assert "FP8: forward" in step.explain("q") and "FP8: weight gradient" in step.explain("q.weight")
    assert "not FP8: excluded by name ('k')" in step.explain("k")
    assert "declined" not in step.explain("k")
    assert "softmax, normalisation, activation functions and loss reductions are never in FP8" in step.explain("norm")
    report = step.report()
    name = of_layer(report.fp8, "v")["forward"].value
    assert "FP8: forward" in step.explain(name)
    text = " ".join(str(report).split())
    assert report.fp8.summary() in text and "excluded by name" in text
    report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count('class="fp8"') == len(report.fp8.rows)
    (dumped,) = tmp_path.rglob("fp8.txt")
    assert dumped.read_text() == report.fp8.text()
    (record,) = [record for record in report.records if record.name == "tag-fp8"]
    assert len(record.refusals) == len(report.fp8.rows) - len(report.fp8.eligible)
