"""tag-fp8: every product of a step gets a row, each decided by itself, with a reason that a user understands."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.fp8 import Blockwise, Delayed, Rowwise, Tensorwise
from graphopt.ir.fp8_table import Fp8Row, Fp8Table
from graphopt.passes.tag_fp8 import TagFp8
from graphopt.pipeline.pass_base import Changes
from tests.support.fp8_tables import (
    ROLES,
    Block,
    Layers,
    block_batch,
    block_program,
    block_table,
    eligible,
    joint,
    of_layer,
    table,
)
from tests.support.graphs import run_pass
from tests.support.models import TINY_MODELS


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


def test_convolutions_recurrent_layers_and_batched_weights_have_rows():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lstm, self.mv = nn.Conv1d(8, 16, 3), nn.LSTM(16, 16), nn.Parameter(torch.randn(16))
            self.batched = nn.Parameter(torch.randn(8, 16, 32))

        def forward(self, x):
            x, _ = self.lstm(self.conv(x).permute(2, 0, 1))
            return {"loss": (x.flatten(0, 1) @ self.mv).square().mean() + (x @ self.batched).square().mean()}

    found = table(Mixed(), {"x": torch.randn(2, 8, 10)})
    reasons = {row.operator.rpartition(".")[0]: row.reason for row in found.rows}
    assert reasons["aten.convolution"] == reasons["aten.convolution_backward"] == "convolution: not supported yet"
    assert reasons["graphopt.lstm_layer"].startswith("recurrent layer") and "in a form" in reasons["aten.mv"]
    batched = [row for row in found.rows if row.operator == "aten.bmm.default"]
    assert len(batched) == 3 and all(row.reason == "batched product with weights: not supported yet" for row in batched)
    assert found.rows[0].shape == "16 x 16 x 24" and batched[0].shape == "8 of 2 x 32 x 16"


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


class Noisy(nn.Module):
    """Attention that drops weights: its autograd nodes in between leave the backward part without origins."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o, self.twice = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.twice.weight

    def forward(self, x):
        q, k = (layer(x)[:, None] for layer in (self.q, self.k))
        x = nn.functional.scaled_dot_product_attention(q, k, k, dropout_p=0.1)[:, 0]
        return {"loss": self.tied(self.twice(self.o(x)).tanh()).square().mean()}


def test_gradients_have_the_module_and_the_weight_of_their_forward_product():
    batch = {"x": torch.randn(2, 16, 32)}
    found = table(Noisy(), batch)
    rows = {(row.module, row.role): row for row in found.rows if "mm" in row.operator and row.role != "other"}
    expected = {(name, role) for name in ("o", "twice", "tied") for role in ROLES}
    assert set(rows) == expected | {(name, role) for name in "qk" for role in ("forward", "weight gradient")}
    assert {(name, row.weights[0]) for (name, _), row in rows.items()} == {
        (name, f"{'twice' if name == 'tied' else name}.weight") for name in ("q", "k", "o", "twice", "tied")
    }
    assert {rows[name, role].layer for name in ("twice", "tied") for role in ROLES} == {
        rows[name, "forward"].value for name in ("twice", "tied")
    }
    assert all(row.origin.is_gradient is (role != "forward") for (_, role), row in rows.items())
    excluded = table(Noisy(), batch, Tensorwise(exclude=("q", "o", "tied")))
    assert {module for module, _ in eligible(excluded)} == {"k", "twice"}


def test_a_weight_made_of_two_weights_gives_no_input_gradient_for_them():
    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.a, self.b = (nn.Parameter(torch.randn(*shape)) for shape in ((32, 48), (16, 48), (32, 16)))

        def forward(self, x):
            return {"loss": nn.functional.linear(x, self.w + self.b @ self.a).square().mean()}

    found = table(Merged(), {"x": torch.randn(64, 48)})
    reasons = [row.reason for row in found.rows if row.role == "other"]
    assert sorted(reasons) == [
        "gradient of a product of two weights: not supported yet",
        "gradient of a product of two weights: not supported yet",
        "product of two weights: not supported yet",
    ]
    assert eligible(found) == {("", "forward"), ("", "weight gradient")}


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
    assert "tag-fp8 declined" not in step.explain("k")
    assert "softmax, normalisation, activation functions and loss reductions are never in FP8" in step.explain("norm")
    report = step.report()
    name = of_layer(report.fp8, "v")["forward"].value
    assert "FP8: forward" in step.explain(name)
    text = " ".join(str(report).split())
    assert report.fp8.summary() in text and "excluded by name" in text
    assert "FP8 products: emulated on the CPU" in text and report.as_dict()["fp8_products"] == report.fp8_products
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="fp8"') == len(report.fp8.rows) and "FP8 products: emulated on the CPU" in page
    (dumped,) = tmp_path.rglob("fp8.txt")
    assert dumped.read_text() == report.fp8.text()
    (record,) = [record for record in report.records if record.name == "tag-fp8"]
    assert len(record.refusals) == len(report.fp8.rows) - len(report.fp8.eligible)


def test_a_model_whose_constants_have_no_values_is_refused():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return {"loss": (self.layer(x) * torch.tensor([0.0] * 8 + [1.0] * 8, device=x.device)).square().mean()}

    with torch.device("meta"):
        model, x = Masked(), torch.randn(16, 16)
    with pytest.raises(UnsupportedError, match=r"on the meta device.* build the model on the CPU"):
        table(model, {"x": x})


def test_a_table_says_whether_time_is_saved_or_lost_and_which_products_are_empty():
    row = Fp8Row("mm", "forward", 0, 64, 32, True, "included", bf16_seconds=1e-5, fp8_seconds=4e-5)
    assert "1 of 1 products, costs 30.0 us (estimated)" in Fp8Table("tensorwise", "H100", (row,)).summary()
    faster = replace(row, fp8_seconds=4e-6)
    assert "saves 6.0 us (estimated)" in Fp8Table("tensorwise", "H100", (faster,)).summary()
    assert row.shape == "0 x 64 x 32"
    assert replace(row, columns=0, contraction=0).shape == "no one size"
