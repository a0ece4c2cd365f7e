"""insert-quantize: one quantized copy for all readers, two layouts, padding, and the numbers of the rule."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphopt
from graphopt.errors import PipelineError, UnsupportedError
from graphopt.fp8 import Blockwise, Rowwise, Tensorwise
from graphopt.ir.fp8_products import find_products
from graphopt.ir.liveness import saved_bytes
from graphopt.operators.fp8 import MATMUL, QUANTIZE, QUANTIZE_BOTH, QUANTIZE_TRANSPOSED
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.pipeline.pipeline import Pipeline
from tests.support.fp8 import DYNAMIC, QUANTIZES, joint_program, num_fp8_products, quantized, tagged, to_16
from tests.support.graphs import run_pass

aten = torch.ops.aten
TOKENS, WIDTH, HIDDEN = 32, 32, 64


class Block(nn.Module):
    """Two projections of one value, as gate and up are, and one down; the loss is theirs."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x):
        h = (x * self.scale).tanh()
        return {"loss": self.down(nn.functional.silu(self.gate(h)) * self.up(h)).square().mean()}


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture(scope="module")
def block():
    return joint_program(Block(), batch())


@cache
def inserted(program, **options):
    return run_pass(InsertQuantize(**options), tagged(program))


def calls(program, *targets):
    return [node for node in program.ops() if node.target in targets]


# ---- fires -----------------------------------------------------------------------------------------------------------


def test_all_three_products_of_a_layer_run_in_fp8(block):
    after, record = inserted(block)
    assert record.changes == num_fp8_products(after) == 9
    assert calls(after, aten.mm.default, aten.addmm.default) == []


def test_a_tensorwise_value_is_quantized_once_for_all_readers(block):
    after, _ = inserted(block, recipe="tensorwise")
    # x for gate and up, the input of down; three gradients of results; three weights.
    assert len(quantized(after)) == len(set(quantized(after))) == 2 + 3 + 3
    assert [kind for _, kind in quantized(after)].count("e5m2") == 3


def test_a_llama_block_quantizes_each_value_once():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes))
    ids = torch.randint(0, 32, (1, 16))
    program = joint_program(model, {"input_ids": ids, "labels": ids})
    head = [product for product in find_products(program) if "lm_head" in product.module]
    marked = tagged(program, skip={product.node.name for product in head})
    after = Pipeline((InsertQuantize(),)).run(marked, verify="numeric")
    kinds = [(name.startswith("p_"), format) for name, format in quantized(after)]
    assert num_fp8_products(after) == 7 * 3
    # Query, key and value read one value; so do gate and up; then those of o_proj and down_proj.
    assert kinds.count((False, "e4m3")) == 4
    assert kinds.count((True, "e4m3")) == 7 and kinds.count((False, "e5m2")) == 7


def test_a_weight_whose_products_share_a_grid_is_quantized_once(block):
    numbers = {recipe: [name for name, _ in quantized(inserted(block, recipe=recipe)[0])] for recipe in DYNAMIC}
    weights = {recipe: sum(name.startswith("p_") for name in names) for recipe, names in numbers.items()}
    assert weights == {"tensorwise": 3, "rowwise": 6, "blockwise": 3}


def test_views_of_one_matrix_are_one_value():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x):
            h = x.tanh()  # [2, 4, 4, 32]
            return {
                "loss": (
                    self.a(h).flatten() + self.b(h.flatten(1, 2)).flatten() + self.c(h.view(-1, 32)).flatten()
                ).sum()
            }

    after, _ = inserted(joint_program(Twice(), {"x": torch.randn(2, 4, 4, 32)}))
    assert sum(kind == "e4m3" for _, kind in quantized(after)) == 1 + 3


def test_a_weight_is_quantized_from_what_is_stored(block):
    after, _ = inserted(block)
    sources = [node.args[0] for node in calls(after, *QUANTIZES) if node.args[0].op == "placeholder"]
    assert {after.spec(node).dtype for node in sources} == {torch.float32}
    assert not [node for node in calls(after, aten._to_copy.default) if node.args[0] in sources]


def test_a_weight_in_bfloat16_is_quantized_directly():
    after, _ = inserted(joint_program(Block().bfloat16(), {"x": batch()["x"].bfloat16()}, precision="fp32"))
    assert sum(name.startswith("p_") for name, _ in quantized(after)) == 3


def test_a_weight_of_addmm_lies_the_other_way():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(48))

        def forward(self, x):
            return {"loss": torch.addmm(self.bias, x, self.weight).square().mean()}

    model, x = Conv1D(), torch.randn(16, 32)
    after, record = inserted(joint_program(model, {"x": x}))
    assert record.changes == 2 and "p_weight" in [name for name, _ in quantized(after)]


def test_a_bias_is_added_before_the_rounding():
    after, _ = inserted(joint_program(Block(bias=True), batch()))
    assert sum(node.args[6] is not None for node in calls(after, MATMUL)) == 3


# ---- must not fire ---------------------------------------------------------------------------------------------------


def test_what_is_not_tagged_stays(block):
    after, record = run_pass(InsertQuantize(), tagged(block, roles=("forward", "input gradient")))
    assert record.changes == 6 and len(calls(after, aten.mm.default)) == 3
    untagged, record = run_pass(InsertQuantize(), block)
    assert record.changes == 0 and untagged.text() == block.text()


def test_a_product_in_float32_is_refused_with_its_reason():
    _, record = inserted(joint_program(Block(), batch(), precision="fp32"))
    assert record.changes == 0
    assert {"bf16 or f16" in refusal.reason for refusal in record.refusals} == {True} and len(record.refusals) == 9


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_two_layouts_are_made_in_one_pass_over_a_value(block, recipe):
    after, _ = inserted(block, recipe=recipe, layouts="two")
    names = [name for name, _ in quantized(after)]
    assert len(names) == len(set(names)) == 2 + 3 + 3
    assert len(calls(after, QUANTIZE_BOTH)) == 8  # each is contracted along one dimension here, along the other there


def test_what_is_read_one_way_is_made_one_way(block):
    after, _ = run_pass(InsertQuantize(layouts="two"), tagged(block, roles=("forward",)))
    assert {node.target for node in calls(after, *QUANTIZES)} == {QUANTIZE}
    after, _ = run_pass(InsertQuantize(layouts="two"), tagged(block, roles=("weight gradient",)))
    assert {node.target for node in calls(after, *QUANTIZES)} == {QUANTIZE_TRANSPOSED}


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_with_two_layouts_every_operand_has_its_contraction_contiguous(block, recipe):
    after, _ = inserted(block, recipe=recipe, layouts="two")
    for node in calls(after, MATMUL):
        assert after.spec(node.args[0]).stride[1] == 1 and after.spec(node.args[3]).stride[0] == 1
    one, _ = inserted(block, recipe=recipe, layouts="one")
    assert any(one.spec(node.args[0]).stride[1] != 1 for node in calls(one, MATMUL))


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_two_layouts_change_no_bit(block, recipe):
    inputs = [torch.randn(entry.spec.shape) for entry in block.signature.inputs]
    one, two = (inserted(block, recipe=recipe, layouts=layouts)[0].run(inputs) for layouts in ("one", "two"))
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize(("target", "is_two"), [("H100", True), ("L4", True), ("B200", False)])
def test_the_target_says_how_many_layouts_there_are(block, target, is_two):
    after, _ = inserted(block, recipe=Tensorwise(target=target))
    assert bool(calls(after, QUANTIZE_BOTH)) is is_two


def test_on_a_cpu_one_layout_is_enough(block):
    assert {node.target for node in calls(inserted(block)[0], *QUANTIZES)} == {QUANTIZE}


# ---- padding ---------------------------------------------------------------------------------------------------------


@cache
def odd_program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(18, 34), nn.Tanh(), nn.Linear(34, 10))
    return joint_program(model, {"input": torch.randn(5, 18)}, loss=lambda out, batch: out.square().mean())


@pytest.mark.parametrize(("recipe", "layouts"), [("tensorwise", "two"), ("rowwise", "one"), ("blockwise", "two")])
def test_a_padded_product_gives_what_the_unpadded_one_gives(recipe, layouts):
    program = odd_program()
    inputs = [torch.randn(entry.spec.shape) for entry in program.signature.inputs]
    plain, _ = run_pass(InsertQuantize(recipe, layouts), tagged(program))
    padded, record = run_pass(InsertQuantize(recipe, layouts), tagged(program, pad=to_16))
    sizes = [(padded.spec(n.args[0]).shape[1], padded.spec(n.args[3]).shape[1]) for n in calls(padded, MATMUL)]
    assert record.changes == 5 and all(size % 16 == 0 for pair in sizes for size in pair)
    for expected, came in zip(plain.run(inputs), padded.run(inputs), strict=True):
        # Zeros add nothing to a sum of float32, but may change its order: by one rounding to bfloat16 at most.
        assert (came - expected).abs().max() <= 2.0**-8 * expected.abs().max()


def test_codes_that_are_padded_alike_are_padded_once():
    after, _ = run_pass(InsertQuantize(), tagged(odd_program(), pad=to_16))
    pads = [(node.args[0], tuple(node.args[1])) for node in calls(after, aten.constant_pad_nd.default)]
    assert len(pads) == len(set(pads)) > 0


def test_rows_can_be_padded_too():
    program = odd_program()
    inputs = [torch.randn(entry.spec.shape) for entry in program.signature.inputs]
    plain, padded = (
        run_pass(InsertQuantize("rowwise"), tagged(program, pad=pad))[0]
        for pad in (to_16, lambda product: (-product.rows % 16, *to_16(product)[1:]))
    )
    assert {padded.spec(node).shape[0] % 16 for node in calls(padded, MATMUL)} == {0}
    assert all(map(torch.equal, plain.run(inputs), padded.run(inputs)))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_an_activation_that_only_products_read_is_kept_as_codes():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x):
            return {"loss": self.second(self.first(x * 2)).mean()}

    program = joint_program(Chain(), {"x": torch.randn(512, 64)})
    after, _ = run_pass(DropDead(), inserted(program)[0])
    values, weights = 512 * 64, 64 * 64
    # Two bytes of each activation and of the second weight, which the input gradient reads.
    assert saved_bytes(program) == 2 * (2 * values + weights)
    # One byte, and a float32 scale for each of the three.
    assert saved_bytes(after) == 2 * values + weights + 3 * 4


# ---- options ---------------------------------------------------------------------------------------------------------


def test_the_pass_prints_what_parses_to_the_same():
    for item in (
        InsertQuantize(),
        InsertQuantize("rowwise"),
        InsertQuantize(Blockwise(gradients="e5m2", exclude=("lm_head", "*.gate")), layouts="two"),
        InsertQuantize(Tensorwise(power_of_two=True, weight_gradient="bf16")),
    ):
        (again,) = graphopt.Pipeline.parse(str(item)).passes
        assert again == item and str(again) == str(item)
    assert str(InsertQuantize(Rowwise())) == "insert-quantize{recipe=rowwise}"


def test_a_wrong_option_says_what_there_is():
    with pytest.raises(UnsupportedError, match="tensorwise, rowwise"):
        InsertQuantize("colwise")
    with pytest.raises(UnsupportedError, match="'auto', 'one' or 'two'"):
        InsertQuantize(layouts="both")
    with pytest.raises(PipelineError, match="no option"):
        Pipeline.parse("insert-quantize{grid=128}")
