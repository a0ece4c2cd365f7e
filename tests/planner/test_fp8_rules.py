"""What decides about FP8 before costs do: places in the model, sizes, dtypes, names, predicates; each has a reason."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.fp8 import Rowwise, Tensorwise
from graphopt.ir.fp8_table import Fp8Row
from graphopt.passes.tag_fp8 import TagFp8
from graphopt.planner.fp8_decide import decide_products
from graphopt.planner.fp8_rules import idle_options
from graphopt.precision import Precision, precision_for, precision_of
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


class Sides(nn.Module):
    """A layer for each of ``sizes`` (tokens, inputs, outputs), side by side, each with all three products."""

    def __init__(self, *sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.shifts = nn.ParameterList(torch.zeros(read) for _, read, _ in sizes)
        for number, (_, read, written) in enumerate(sizes):
            setattr(self, f"layer{number}", nn.Linear(read, written))

    def forward(self, x):
        parts = ((x[:tokens, :read], number) for number, (tokens, read, _) in enumerate(self.sizes))
        results = (getattr(self, f"layer{number}")(part + self.shifts[number]) for part, number in parts)
        return {"loss": sum(result.square().mean() for result in results)}


@cache
def sides() -> tuple[dict[str, Fp8Row], ...]:
    sizes = ((16, 32, 97), (16, 32, 2), (16, 18, 10), (1, 32, 48), (5, 32, 48), (125, 32, 48))
    found = table(Sides(*sizes), {"x": torch.randn(125, 32)})
    return tuple(of_layer(found, f"layer{number}") for number in range(len(sizes)))


def test_a_size_that_is_no_multiple_of_16_is_padded_where_that_is_little_work():
    rows = sides()[0]
    assert all(row.is_fp8 for row in rows.values()) and set(rows) == set(ROLES)
    # 97 is columns of the forward product, contraction of the input gradient, and rows of the weight gradient.
    assert [rows[role].pad for role in ROLES] == [(0, 15, 0), (0, 0, 15), (0, 0, 0)]
    assert rows["forward"].padded_to == "16 x 112 x 32"
    assert "output features 97 to 112, the next multiple of 16: 15% more work" in rows["forward"].reason


@pytest.mark.parametrize(("position", "out"), [(1, 2), (2, 10)])
def test_padding_that_does_not_pay_falls_back(position, out):
    rows = sides()[position]
    for role in ("forward", "input gradient"):
        assert not rows[role].is_fp8 and rows[role].pad == (0, 0, 0)
        assert rows[role].reason.startswith("padding does not pay") and "at most 25%" in rows[role].reason
    assert f"output features {out} to 16" in rows["forward"].reason


def test_few_tokens_are_the_contraction_of_the_weight_gradient_alone():
    for position, tokens in ((3, 1), (4, 5)):
        rows = sides()[position]
        assert rows["forward"].is_fp8 and rows["input gradient"].is_fp8
        assert not rows["weight gradient"].is_fp8 and f"tokens {tokens} to 16" in rows["weight gradient"].reason
    assert sides()[5]["weight gradient"].pad == (0, 0, 3)


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
    reasons = {row.reason for row in found.rows if row.module == "layers.0"}
    assert reasons == {"operands are f32, not of two bytes: kept by keep_fp32 pattern 'layers.0'"}


def test_a_product_of_a_batch_with_a_buffer_says_why_it_is_wide():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(32, 32))
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return {"loss": self.layer((x @ self.table).tanh()).square().mean()}

    row = table(Fixed(), {"x": torch.randn(16, 32)}).rows[0]
    assert row.reason == "operands are f32, not of two bytes: no parameter takes part, and a buffer does"


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
def test_a_pattern_of_no_module_is_an_error_with_close_names(option):
    with pytest.raises(UnsupportedError, match=f"{option} expects patterns of module paths, came 'worm', .*word"):
        precision_for(Block(), precision_of(Tensorwise(**{option: ("worm",)})))


def test_options_that_name_no_product_of_a_program_are_told_and_no_error():
    recipe = Tensorwise(exclude=("norm", "q"), include=("ou*",), skip_last=1)
    found = idle_options(recipe, [row.module for row in block_table().rows])
    assert found == {
        "exclude='norm'": "names no matrix product of this program",
        "skip_last=1": "no repeated layers in this program",
    }
    assert idle_options(Tensorwise(skip_last=1), ["layers.0", "layers.1"]) == {}
    _, record = run_pass(TagFp8(recipe), block_program())
    assert {refusal.node for refusal in record.refusals} >= set(found)


def test_a_pattern_that_lacks_the_path_before_it_is_told_how_to_write_it():
    with pytest.raises(UnsupportedError, match=r"there are \*\.wo"):
        precision_for(nn.Sequential(Block(), Block()), precision_of(Tensorwise(exclude=("wo",))))


def test_the_root_is_named_by_a_star():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            return {"loss": nn.functional.linear(x, self.weight).square().mean()}

    batch = {"x": torch.randn(16, 32)}
    left = table(Root(), batch, Tensorwise(exclude=("*",)))
    assert {row.reason for row in left.rows} == {"excluded by name ('*')"}
    taken = table(Root(), batch, Tensorwise(include=("*",)))
    assert {row.reason for row in taken.rows} == {"included by name ('*')"}


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


@pytest.mark.parametrize("answer", [None, "yes", 1])
def test_a_predicate_says_true_or_false(answer):
    with pytest.raises(UnsupportedError, match=rf"to say True or False .*came {answer!r} for Product"):
        block_table(Tensorwise(choose=lambda facts: answer))


def test_what_a_predicate_raises_is_shown_with_the_facts():
    with pytest.raises(UnsupportedError, match=r"choose raised ZeroDivisionError.*ProductFacts\(module='q', role="):
        block_table(Tensorwise(choose=lambda facts: 1 // 0 == 0))


def test_first_and_last_layers_are_left_out_by_count():
    model, batch = Layers(32, 32, 32, 32, 32), {"x": torch.randn(16, 32)}
    found = table(model, batch, Tensorwise(skip_first=1, skip_last=2))
    assert {module for module, _ in eligible(found)} == {"layers.1"}
    assert of_layer(found, "layers.3")["forward"].reason == "among the last 2 of 4 layers (skip_last)"
    with pytest.raises(UnsupportedError, match="skip_first=1, skip_last=0 expect layers with numbers"):
        table(Block(), block_batch(), Tensorwise(skip_first=1))
