"""The fused loss in whole steps: values, memory to the byte, accumulation, eval, a backward that is called later."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import graphopt
from graphopt import Accumulate, optim
from graphopt.passes.fuse_linear_loss import FuseLinearLoss
from tests.support.heads import CLASSES, HeadModel, head_batch

VOCABULARY = 97
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ALWAYS = FuseLinearLoss(min_logits_bytes=0, chunk=5)
# Three steps of SGD in float32: some hundred roundings of values around 1.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, tie_word_embeddings=True, **SIZES)
    )


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **SIZES))


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=8, **SIZES)
    return transformers.Gemma2ForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def token_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 8:] = -100
    return {"input_ids": ids, "labels": labels}


def changes(step, name: str) -> int:
    return sum(record.changes for record in step.report().records if record.name == name)


@pytest.mark.parametrize("make", [llama, gpt2, bert, gemma2, t5])
def test_training_equals_the_unfused_step(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    plain_model = make()
    fused_model, batch = copy.deepcopy(plain_model), token_batch()
    plain = graphopt.compile(plain_model, outputs=["loss"], optimizer=optim.SGD(lr=0.1))
    fused = graphopt.compile(fused_model, outputs=["loss"], optimizer=optim.SGD(lr=0.1), passes=[ALWAYS])

    losses = []
    for step in (plain, fused):
        torch.manual_seed(1)
        losses.append([float(step(**batch).loss) for _ in range(3)])

    assert changes(fused, "fuse-linear-loss") == changes(fused, "merge-loss-gradient") == 1
    assert changes(plain, "fuse-linear-loss") == 0
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
    torch.testing.assert_close(dict(fused_model.named_parameters()), dict(plain_model.named_parameters()), **CLOSE)


class WideHead(nn.Module):
    """Little but a head: 256 rows of 8,192 classes, whose logits take 8 MiB."""

    def __init__(self, *, bias: bool = False, dtype: torch.dtype = torch.float32, softcap: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8192, bias=bias, dtype=dtype)
        self.softcap = softcap

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x).tanh()).float()
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


LOGITS_BYTES = 256 * 8192 * 4


def wide_batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator).to(dtype)
    return {"x": x, "y": torch.randint(0, 8192, (256,), generator=generator)}


def test_peak_of_a_step_is_below_the_bytes_of_the_logits():
    step = graphopt.compile(WideHead(), outputs=["loss"], optimizer=optim.AdamW(lr=1e-3))
    step(**wide_batch())
    report = step.report(measure=True)

    assert report.measured_peak_bytes == report.predicted_peak_bytes < LOGITS_BYTES
    assert report.measured_peak_bytes > LOGITS_BYTES / 2  # 128 of 256 rows


def test_logits_that_are_asked_for_are_kept():
    step = graphopt.compile(WideHead(), outputs=["loss", "logits"], optimizer=optim.AdamW(lr=1e-3))
    assert step(**wide_batch()).logits.shape == (256, 8192)
    (refusal,) = [r for record in step.report().records if record.name == "fuse-linear-loss" for r in record.refusals]
    assert refusal.reason == "logits are a required output"


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"softcap": 5.0}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "softcap": 5.0}],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 100, 200])
def test_peak_is_predicted_to_the_byte(options, chunk):
    batch = {name: value[:200] for name, value in wide_batch(options.get("dtype", torch.float32)).items()}
    peaks = []
    for passes in ([], [FuseLinearLoss(min_logits_bytes=0, chunk=chunk)]):
        step = graphopt.compile(WideHead(**options), outputs=["loss"], optimizer=optim.SGD(lr=0.1), passes=passes)
        step(**batch)
        report = step.report(measure=True)
        assert report.measured_peak_bytes == report.predicted_peak_bytes
        assert changes(step, "fuse-linear-loss") == len(passes)
        peaks.append(report.measured_peak_bytes)
    assert peaks[1] < peaks[0]


LOSSES = {
    "mean": lambda o, y: F.cross_entropy(o.reshape(-1, CLASSES), y.reshape(-1)),
    "smoothed": lambda o, y: F.cross_entropy(o.reshape(-1, CLASSES), y.reshape(-1), label_smoothing=0.1),
    "weighted": lambda o, y: F.cross_entropy(o.reshape(-1, CLASSES), y.reshape(-1), torch.linspace(1, 2, CLASSES)),
    "sum": lambda o, y: F.cross_entropy(o.reshape(-1, CLASSES), y.reshape(-1), reduction="sum"),
}


@pytest.mark.parametrize("form", LOSSES)
def test_window_equals_the_full_batch(form):
    batch = head_batch(ignored=0)
    batch["y"][0, 1:] = -100  # one valid label in the first micro-batch, six in the second
    full_model = HeadModel(LOSSES[form])
    parts_model = copy.deepcopy(full_model)
    full = graphopt.compile(full_model, outputs=["loss"], optimizer=optim.SGD(lr=0.1))
    parts = graphopt.compile(
        parts_model, outputs=["loss"], optimizer=optim.SGD(lr=0.1), accumulate=Accumulate(2), passes=[ALWAYS]
    )

    full(**batch)
    for i in range(2):
        parts(**{name: value[i : i + 1] for name, value in batch.items()})

    assert changes(parts, "merge-loss-gradient") == 1
    torch.testing.assert_close(dict(parts_model.named_parameters()), dict(full_model.named_parameters()), **CLOSE)


def test_micro_batch_without_a_label_counts_for_nothing():
    batch = head_batch(ignored=0)
    full_model = HeadModel(LOSSES["mean"])
    parts_model = copy.deepcopy(full_model)
    full = graphopt.compile(full_model, outputs=["loss"], optimizer=optim.SGD(lr=0.1))
    parts = graphopt.compile(
        parts_model, outputs=["loss"], optimizer=optim.SGD(lr=0.1), accumulate=Accumulate(2), passes=[ALWAYS]
    )

    full(**batch)
    parts(**batch)
    parts(batch["x"], torch.full_like(batch["y"], -100))

    torch.testing.assert_close(dict(parts_model.named_parameters()), dict(full_model.named_parameters()), **CLOSE)


def test_eval_gives_the_loss():
    model, batch = HeadModel(LOSSES["smoothed"]), head_batch()
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=0.1), passes=[ALWAYS])
    torch.testing.assert_close(step.eval(**batch).loss, model(**batch)["loss"].detach(), **CLOSE)


@pytest.mark.parametrize("form", LOSSES)
def test_backward_that_is_called_later_takes_its_own_gradient(form):
    model, batch = HeadModel(LOSSES[form], bias=True), head_batch()
    expected = torch.autograd.grad(model(**batch)["loss"] * 3, list(model.parameters()))
    compiled = graphopt.compile(model, outputs=["loss"], passes=[ALWAYS])

    loss = compiled(**batch)["loss"]
    other = compiled(batch["x"] * 2, batch["y"])["loss"]
    (loss * 3).backward()
    del other

    assert changes(compiled, "fuse-linear-loss") == 1 and changes(compiled, "merge-loss-gradient") == 0
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected), **CLOSE)
