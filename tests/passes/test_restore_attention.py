"""restore-attention removes exactly the masks and repeated heads that eager does without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.functional import scaled_dot_product_attention

from graphopt.capture.batch import BatchBinder
from graphopt.capture.differentiate import differentiate
from graphopt.capture.export import OutputRequest, capture_program
from graphopt.ir import constants
from graphopt.ir.liveness import plan_memory, saved_bytes
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.restore_attention import RestoreAttention
from tests.support.graphs import assert_same_numbers, run_pass, targets

# B: batch, H: query heads, K: key and value heads, T: length, D: head size
B, H, K, T, D = 2, 4, 2, 12, 8


def causal(attention_mask: Any = None) -> torch.Tensor:
    """b1[B,1,T,T] as transformers builds it: from positions, per batch entry."""
    position_BT = torch.arange(T).unsqueeze(0).expand(B, -1)[torch.arange(B)[:, None], torch.arange(T)[None, :]]
    return (position_BT[:, None, None, :] <= position_BT[:, None, :, None]) & torch.ones((), dtype=torch.bool)


def sliding_window_of_4(attention_mask: Any = None) -> torch.Tensor:
    return causal() & ~torch.ones(T, T, dtype=torch.bool).tril(-4)


def prefix_of_3(attention_mask: Any = None) -> torch.Tensor:
    return causal() | (torch.arange(T) < 3)


def all_open(attention_mask: Any = None) -> torch.Tensor:
    return (torch.arange(T) >= 0)[:, None].expand(B, 1, T, T)


def padded(attention_mask: torch.Tensor) -> torch.Tensor:
    return causal() & attention_mask[:, None, None, :].bool()


def additive(mask: torch.Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def sees(row: int, column: int) -> str:
    return f"mask is not causal: row {row} sees column {column}"


def hides(row: int, column: int) -> str:
    return f"mask is not causal: row {row} does not see column {column}"


def repeat_heads(x_BKTD: torch.Tensor, count: int) -> torch.Tensor:
    """[B,K*count,T,D], as ``repeat_kv`` of transformers."""
    batch, heads, length, size = x_BKTD.shape
    grouped = x_BKTD[:, :, None, :, :].expand(batch, heads, count, length, size)
    return grouped.reshape(batch, heads * count, length, size)


class Attention(torch.nn.Module):
    """One attention call with a mask made by ``make_mask`` and heads repeated by ``repeat``."""

    def __init__(self, make_mask: Callable[..., Any], repeat: Callable[..., torch.Tensor], **options: Any) -> None:
        super().__init__()
        self.make_mask, self.repeat, self.options = make_mask, repeat, options

    def forward(self, q, k, v, attention_mask=None):
        mask = self.make_mask(attention_mask)
        k, v = self.repeat(k, H // k.shape[1]), self.repeat(v, H // v.shape[1])
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options) * 2


def same_heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x


def inputs_of(num_key_heads: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q [B,H,T,D], k and v [B,num_key_heads,T,D], seen through a transpose as in a model."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(B, T, heads, D, generator=generator).to(dtype).transpose(1, 2)
        for heads in (H, num_key_heads, num_key_heads)
    )


def captured(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Program:
    return capture_program(model, BatchBinder(model, allow_extra=False).bind(inputs, {}), OutputRequest(None)).program


def restore(
    make_mask: Callable[..., Any], *, heads: int = H, repeat: Any = same_heads, extra: Any = (), **options: Any
):
    """The program before and after, the record and the inputs; run_pass proves numbers and idempotence."""
    inputs = (*inputs_of(heads), *extra)
    before = captured(Attention(make_mask, repeat, **options), inputs)
    after, record = run_pass(RestoreAttention(), before, inputs=inputs)
    return before, after, record, inputs


def attention_text(program: Program) -> str:
    line = next(line for line in program.text().splitlines() if "scaled_dot_product_attention.default" in line)
    return line.split(" = ")[1].split("  #")[0].strip().removeprefix("aten.scaled_dot_product_attention.default")


def test_causal_mask_becomes_a_flag():
    before, after, record, inputs = restore(causal)
    assert record.changes == 1
    assert attention_text(after) == "(q, k, v, None, 0.0, True)"
    assert_same_numbers(before, after, inputs)


def test_open_mask_disappears():
    before, after, _, inputs = restore(all_open)
    assert attention_text(after) == "(q, k, v, None, 0.0, False)"
    assert_same_numbers(before, after, inputs)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_additive_causal_mask_becomes_a_flag(hidden):
    before, after, _, inputs = restore(lambda _: additive(causal(), hidden))
    assert attention_text(after) == "(q, k, v, None, 0.0, True)"
    assert_same_numbers(before, after, inputs)


def test_additive_mask_of_zeros_disappears():
    _, after, _, _ = restore(lambda _: torch.zeros(T, T))
    assert attention_text(after) == "(q, k, v, None, 0.0, False)"


def test_scale_and_dropout_are_kept():
    _, after, _, _ = restore(causal, scale=0.5, dropout_p=0.25)
    assert attention_text(after) == "(q, k, v, None, 0.25, True, scale=0.5)"


def test_repeated_heads_become_grouped_queries():
    before, after, record, inputs = restore(causal, heads=K, repeat=repeat_heads)
    assert record.changes == 1
    assert attention_text(after) == "(q, k, v, None, 0.0, True, enable_gqa=True)"
    assert_same_numbers(before, after, inputs)


def test_one_key_head_repeated_without_a_copy_becomes_grouped():
    _, after, _, _ = restore(causal, heads=1, repeat=repeat_heads)
    assert attention_text(after) == "(q, k, v, None, 0.0, True, enable_gqa=True)"


@pytest.mark.parametrize(
    ("make_mask", "reason"),
    [
        (sliding_window_of_4, "mask is a sliding window of 4"),
        (prefix_of_3, "mask is not causal: row 0 sees column 1"),
        (lambda _: causal() & (torch.arange(T) > 0), "mask is not causal: row 0 does not see column 0"),
        (lambda _: causal() & (torch.arange(B)[:, None, None, None] < 1), "row 0 does not see column 0"),
        (lambda _: additive(causal(), -5.0), "mask adds numbers other than 0 and minus infinity"),
        (lambda _: torch.ones(T, T).tril(1).bool(), "mask is not causal: row 0 sees column 1"),
        (lambda _: torch.arange(T)[None, :] < 1, "mask of [1, 12] is spread over 12 queries and 12 keys"),
    ],
)
def test_keeps_a_mask_that_is_needed(make_mask, reason):
    _, _, record, _ = restore(make_mask, heads=K, repeat=repeat_heads)
    assert record.changes == 0
    assert reason in record.refusals[0].reason


def test_keeps_a_mask_that_depends_on_an_input_even_if_all_ones():
    _, _, record, _ = restore(padded, extra=(torch.ones(B, T, dtype=torch.int64),))
    assert record.changes == 0
    assert record.refusals[0].reason == "mask depends on input attention_mask"


def test_keeps_a_causal_mask_for_fewer_queries_than_keys():
    def attend(q, k, v):
        return scaled_dot_product_attention(q[:, :, :5], k, v, attn_mask=torch.ones(5, T).tril().bool())

    inputs = inputs_of(H)
    _, record = run_pass(RestoreAttention(), captured(Calling(attend), inputs), inputs=inputs)
    assert record.refusals[0].reason == "mask is causal, but there are 5 queries and 12 keys"


def test_lowest_half_precision_number_is_not_minus_infinity():
    lowest = torch.finfo(torch.float16).min
    inputs = inputs_of(H, torch.float16)
    model = Attention(lambda _: additive(causal(), lowest, torch.float16), same_heads)
    _, record = run_pass(RestoreAttention(), captured(model, inputs), inputs=inputs)
    assert record.changes == 0


def test_heads_that_the_model_repeats_without_a_mask_stay_as_in_eager():
    _, _, record, _ = restore(lambda _: None, heads=K, repeat=repeat_heads, is_causal=True)
    assert record.changes == 0
    assert "the model itself repeats them" in record.refusals[0].reason


def test_regroup_all_regroups_heads_that_came_without_a_mask():
    inputs = inputs_of(K)
    before = captured(Attention(lambda _: None, repeat_heads, is_causal=True), inputs)
    after, _ = run_pass(RestoreAttention(regroup_all=True), before, inputs=inputs)
    assert attention_text(after) == "(q, k, v, None, 0.0, True, enable_gqa=True)"


def test_heads_tiled_in_another_order_stay():
    _, after, record, _ = restore(causal, heads=K, repeat=lambda x, count: x.repeat(1, count, 1, 1))
    assert "enable_gqa" not in attention_text(after)
    assert record.changes == 1


def test_heads_stay_if_only_the_keys_are_repeated():
    def attend(q, k, v):
        return scaled_dot_product_attention(q, repeat_heads(k, H // K), v.repeat(1, 2, 1, 1), attn_mask=causal())

    inputs = inputs_of(K)
    _, record = run_pass(RestoreAttention(), captured(Calling(attend), inputs), inputs=inputs)
    assert record.changes == 1
    assert record.refusals[0].reason == "key and value heads stay repeated: only the keys are repeated"


def test_one_mask_serves_several_layers_and_an_output():
    def attend(q, k, v):
        mask = causal()
        first = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return scaled_dot_product_attention(first, k, v, attn_mask=mask), mask

    inputs = inputs_of(H)
    before = captured(Calling(attend), inputs)
    after, record = run_pass(RestoreAttention(), before, inputs=inputs)
    assert record.changes == 2
    assert_same_numbers(before, after, inputs)


def test_peak_falls_by_the_mask_and_the_repeated_heads():
    before, after, _, _ = restore(causal, heads=K, repeat=repeat_heads)
    after, _ = run_pass(DropDead(), after)
    assert targets(after) == ["scaled_dot_product_attention", "mul"]
    output_bytes = B * H * T * D * 4
    assert plan_memory(before).peak_bytes >= 3 * output_bytes + B * T * T
    assert plan_memory(after).peak_bytes == 2 * output_bytes


def test_each_call_saves_no_float_mask_and_no_repeated_heads_for_backward():
    before, after, _, _ = restore(causal, heads=K, repeat=repeat_heads)
    num_saved_less = B * T * T + 2 * B * H * T * D  # k and v themselves are inputs here, held by the caller
    assert joint_saved_bytes(before) - joint_saved_bytes(after) == 4 * num_saved_less


def joint_saved_bytes(forward: Program) -> int:
    (output,) = forward.signature.outputs
    joint = differentiate(forward, roots=[output.name], wrt=["q", "k", "v"])
    return saved_bytes(run_pass(DropDead(), joint)[0])


@pytest.mark.parametrize(
    ("make_mask", "reasons"),
    [
        (causal, set()),
        (all_open, set()),
        (sliding_window_of_4, {"mask is a sliding window of 4"}),
        (lambda _: causal() & ~((torch.arange(T) == 9)[:, None] & (torch.arange(T) == 8)), {hides(9, 8)}),
        (lambda _: causal() | ((torch.arange(T) == 9)[:, None] & (torch.arange(T) == 11)), {sees(9, 11)}),
    ],
)
def test_reads_a_mask_in_pieces_as_it_does_whole(make_mask, reasons, monkeypatch):
    monkeypatch.setattr(constants, "BLOCK_ELEMENTS", 5 * T)
    _, _, record, _ = restore(make_mask)
    assert {refusal.reason for refusal in record.refusals} == reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 33, 130])
def test_gradients_without_the_mask_are_bit_equal(dtype, length):
    """The fact that the pass rests on: on CPU a causal mask and the flag round alike, forward and backward."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 16, generator=generator).to(dtype) for _ in range(3))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    with_mask = gradients(lambda *qkv: scaled_dot_product_attention(*qkv, attn_mask=mask), (q, k, v))
    with_flag = gradients(lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True), (q, k, v))
    assert all(torch.equal(left, right) for left, right in zip(with_mask, with_flag, strict=True))


class Calling(torch.nn.Module):
    """A module around a function of q, k and v."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


def gradients(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    weights = torch.arange(result.numel()).reshape(result.shape).sin().to(result.dtype)
    return (result.detach(), *torch.autograd.grad(result, leaves, weights))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
WINDOW = {"sliding_window": 4}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "options", "changes", "reasons"),
    [
        ("Llama", {}, 2, set()),
        ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}, 2, set()),
        ("Mistral", {**WINDOW}, 0, {"mask is a sliding window of 4"}),
        ("Mistral", {"sliding_window": 4096}, 2, set()),
        ("Qwen3", {**SOME_WINDOWS}, 1, {"mask is a sliding window of 4"}),
    ],
)
def test_captured_transformers_models_have_the_gradients_of_eager(family, options, changes, reasons):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    tokens = torch.randint(0, 64, (2, 40))
    batch = {"input_ids": tokens, "labels": tokens}
    program, inputs = captured_loss(model, batch)
    after, record = run_pass(RestoreAttention(), program, inputs=[value.detach() for value in inputs])
    assert (record.changes, {refusal.reason for refusal in record.refusals}) == (changes, reasons)
    assert_gradients_of_eager(after, inputs, model, batch)


def captured_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[Program, list[torch.Tensor]]:
    """The program of the loss, and its inputs: the model's own parameters and buffers, and the batch."""
    bound = BatchBinder(model, allow_extra=True).bind((), {**batch, "use_cache": False})
    program = capture_program(model, bound, OutputRequest(("loss",), "loss")).program
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    return program, [values[entry.name] for entry in program.signature.inputs]


def assert_gradients_of_eager(
    program: Program, inputs: list[torch.Tensor], model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> None:
    kinds = [entry.kind for entry in program.signature.inputs]
    parameters = [value for value, kind in zip(inputs, kinds, strict=True) if kind is InputKind.PARAM]
    eager_loss = model(**batch, use_cache=False).loss
    (loss,) = fx.Interpreter(program.module).run(*inputs)
    assert torch.equal(loss, eager_loss)
    expected = torch.autograd.grad(eager_loss, parameters)
    actual = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))
