"""fuse-linear-loss fires on every form of a cross-entropy over a linear layer, and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphopt.ir.linear_loss import LOSS, chunk_of, default_chunk, named_arguments, set_chunk
from graphopt.ir.program import Program
from graphopt.passes.fuse_linear_loss import FuseLinearLoss
from tests.support.graphs import run_pass, targets
from tests.support.heads import CLASSES, FEATURES, HeadModel, forward_program, head_batch

ALWAYS = FuseLinearLoss(min_logits_bytes=0, chunk=5)
CLASS_WEIGHT = torch.linspace(0.1, 2, CLASSES)


def flat(logits, y):
    return logits.reshape(-1, CLASSES), y.reshape(-1)


def z_loss(logits, y, coefficient=1e-2):
    logits, y = flat(logits, y)
    return F.cross_entropy(logits, y) + coefficient * logits.logsumexp(-1).square().mean()


def capped(logits, cap=3.0):
    return cap * torch.tanh(logits / cap)


FORMS = {
    "flat": lambda o, y: F.cross_entropy(o.view(-1, CLASSES), y.view(-1)),
    "flatten": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "float": lambda o, y: F.cross_entropy(o.double().view(-1, CLASSES), y.view(-1)),
    "shifted": lambda o, y: F.cross_entropy(*flat(o[..., :-1, :].contiguous(), y[..., 1:].contiguous())),
    "shifted_views": lambda o, y: F.cross_entropy(*flat(o[:, :-1], y[:, 1:])),
    "padded_labels": lambda o, y: F.cross_entropy(*flat(o, F.pad(y, (0, 1), value=-100)[:, 1:])),
    "every_other": lambda o, y: F.cross_entropy(*flat(o[:, ::2], y[:, ::2])),
    "classes_second": lambda o, y: F.cross_entropy(o.transpose(1, 2), y),
    "classes_permuted": lambda o, y: F.cross_entropy(o.permute(0, 2, 1), y, reduction="none").mean(),
    "sum": lambda o, y: F.cross_entropy(*flat(o, y), reduction="sum"),
    "none": lambda o, y: F.cross_entropy(*flat(o, y), reduction="none").sum(),
    "ignored": lambda o, y: F.cross_entropy(*flat(o, y.clamp(min=0)), ignore_index=1),
    "weighted": lambda o, y: F.cross_entropy(*flat(o, y), CLASS_WEIGHT),
    "smoothed": lambda o, y: F.cross_entropy(*flat(o, y), label_smoothing=0.1),
    "weighted_smoothed": lambda o, y: F.cross_entropy(*flat(o, y), CLASS_WEIGHT, label_smoothing=0.1),
    "log_softmax": lambda o, y: F.nll_loss(F.log_softmax(flat(o, y)[0], -1), y.view(-1)),
    "log_softmax_float": lambda o, y: F.nll_loss(
        F.log_softmax(flat(o, y)[0], -1, dtype=torch.float64), y.view(-1), reduction="sum"
    ),
    "scaled": lambda o, y: F.cross_entropy(*flat(o * 0.5, y)),
    "capped": lambda o, y: F.cross_entropy(*flat(capped(o), y)),
    "scaled_capped_shifted": lambda o, y: F.cross_entropy(*flat(capped(o * 2)[:, :-1] / 4, y[:, 1:])),
    "z_loss": z_loss,
    "z_loss_first": lambda o, y: 1e-2 * o.logsumexp(-1).square().mean() + F.cross_entropy(*flat(o, y)),
    "z_loss_of_valid": lambda o, y: (
        F.cross_entropy(*flat(o, y)) + (o.logsumexp(-1) ** 2 * (y != -100)).sum() / (y != -100).sum()
    ),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_fires_and_no_logits_are_left(form, bias):
    batch = head_batch()
    program = forward_program(HeadModel(FORMS[form], bias=bias), batch)

    after, record = run_pass(ALWAYS, program, inputs=inputs_of(program, HeadModel(FORMS[form], bias=bias), batch))

    assert record.changes == 1 and record.refusals == ()
    assert not any(holds_logits(after, node) for node in after.ops())


def inputs_of(program: Program, model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of ``program``, in its order."""
    named = {**dict(model.named_parameters()), **batch}
    return [named[entry.name].detach() for entry in program.signature.inputs]


def holds_logits(program: Program, node) -> bool:
    value = program.value(node)
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == CLASSES


class Products(nn.Module):
    """The forms in which a model may multiply with its head; ``kind`` names one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES))
        self.bias = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x, y):
        rows = x.view(-1, FEATURES)
        logits = {
            "matmul": lambda: x @ self.weight,
            "mm": lambda: torch.mm(rows, self.weight),
            "conv1d": lambda: torch.addmm(self.bias, rows, self.weight),
            "bias_behind": lambda: rows @ self.weight + self.bias,
            "bias_before": lambda: self.bias + x @ self.weight,
            "turned": lambda: x @ self.weight.t().contiguous().t(),
        }[self.kind]()
        return {"loss": F.cross_entropy(*flat(logits, y))}


@pytest.mark.parametrize("kind", ["matmul", "mm", "conv1d", "bias_behind", "bias_before", "turned"])
def test_fires_on_every_product(kind):
    model, batch = Products(kind), head_batch()
    program = forward_program(model, batch)
    after, record = run_pass(ALWAYS, program, inputs=inputs_of(program, model, batch))
    assert record.changes == 1 and not any(holds_logits(after, node) for node in after.ops())


def test_z_loss_that_is_a_mean_over_all_rows_becomes_a_part_of_the_operator():
    for form, expected in (("z_loss", 1e-2), ("z_loss_of_valid", 0.0)):
        after, _ = run_pass(ALWAYS, forward_program(HeadModel(FORMS[form]), head_batch(ignored=0)))
        assert named_arguments(fused_node(after))["z_loss"] == expected


def fused_node(program: Program):
    return next(node for node in program.ops() if node.target is LOSS)


KEPT = {
    "argmax": (lambda o, y: F.cross_entropy(*flat(o, y)) + 0 * o.argmax(-1).sum(), "logits also used by argmax"),
    "two_losses": (
        lambda o, y: F.cross_entropy(*flat(o, y)) + F.cross_entropy(*flat(o, y.flip(0))),
        "logits also used by",
    ),
    "soft_labels": (lambda o, y: F.cross_entropy(*flat(o, y)[:1], o.new_full((12, 50), 0.02)), "probabilities"),
    "masked_logits": (lambda o, y: F.cross_entropy(*flat(o.masked_fill(o > 9, 0.0), y)), "not straight from a linear"),
    "summed_rows": (lambda o, y: F.cross_entropy(o.sum(1), y[:, 0]), "not straight from a linear"),
    "two_biases": (lambda o, y: F.cross_entropy(*flat(o * 2 + CLASS_WEIGHT, y)), "a bias, a scale or a cap already"),
    "capped_twice": (lambda o, y: F.cross_entropy(*flat(capped(capped(o)), y)), "capped already"),
    "other_groups": (
        lambda o, y: F.cross_entropy(*flat(o, y)) + o.view(-1, CLASSES // 2).logsumexp(-1).mean(),
        "logits also used by view",
    ),
    "negative_cap": (lambda o, y: F.cross_entropy(*flat(-torch.tanh(o), y)), "not straight from a linear"),
    "shifted_z_loss": (
        lambda o, y: F.cross_entropy(*flat(o[:, 1:], y[:, 1:])) + o.logsumexp(-1).mean(),
        "logits also used by logsumexp",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_must_not_fire(case):
    loss, reason = KEPT[case]
    _, record = run_pass(ALWAYS, forward_program(HeadModel(loss), head_batch(ignored=0)))
    assert record.changes == 0 and all(reason in refusal.reason for refusal in record.refusals) and record.refusals


def test_keeps_logits_that_are_a_required_output():
    model = HeadModel(FORMS["shifted"], extra=lambda logits: {"logits": logits})
    _, record = run_pass(ALWAYS, forward_program(model, head_batch(), ("loss", "logits")))
    assert record.changes == 0 and record.refusals[0].reason == "logits are a required output"


def test_keeps_small_logits_by_default():
    _, record = run_pass(FuseLinearLoss(), forward_program(HeadModel(FORMS["flat"]), head_batch()))
    assert record.changes == 0 and "2.34 KiB, too little" in record.refusals[0].reason


def test_fires_by_default_where_logits_are_large():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 20_000)

        def forward(self, x, y):
            return {"loss": F.cross_entropy(self.head(x), y)}

    batch = {"x": torch.randn(150, 4), "y": torch.zeros(150, dtype=torch.long)}
    after, record = run_pass(FuseLinearLoss(), forward_program(Large(), batch))
    assert record.changes == 1 and chunk_of(fused_node(after)) == 128
    assert record.peak_bytes_after < record.peak_bytes_before / 100


def test_two_heads_with_a_loss_each_are_both_fused():
    def loss(o, y):
        return F.cross_entropy(*flat(o, y))

    class Two(HeadModel):
        def forward(self, x, y):
            return {"loss": loss(self.head(x), y) + loss(self.head(self.body(x)), y)}

    _, record = run_pass(ALWAYS, forward_program(Two(loss), head_batch()))
    assert record.changes == 2


def test_low_precision_keeps_the_dtype_of_the_loss():
    batch = head_batch()
    batch["x"] = batch["x"].bfloat16()
    program = forward_program(HeadModel(FORMS["flat"]).bfloat16(), batch)
    after = program.copy()
    assert ALWAYS.apply(after).count == 1
    assert after.spec(after.output_named("loss")).dtype == torch.bfloat16


def test_labels_made_behind_the_first_use_of_the_logits_move_up():
    def loss(o, y):
        log_sum_exp = o.logsumexp(-1)
        return F.cross_entropy(*flat(o, y + 0)) + log_sum_exp.mean()

    after, record = run_pass(ALWAYS, forward_program(HeadModel(loss), head_batch(ignored=0)))
    names = targets(after)
    assert record.changes == 1 and names.index("add") < names.index("graphopt")


def test_chunk_can_be_changed_later():
    batch, model = head_batch(), HeadModel(FORMS["flat"])
    after, _ = run_pass(ALWAYS, forward_program(model, batch))
    inputs = inputs_of(after, model, batch)
    before = after.run(inputs)

    set_chunk(after, fused_node(after), 3)

    assert chunk_of(fused_node(after)) == 3
    torch.testing.assert_close(after.run(inputs)[0], before[0], rtol=1e-6, atol=0)  # four float32 roundings


@pytest.mark.parametrize(
    ("rows", "classes", "features", "expected"),
    [(1022, 32_000, 768, 128), (64, 128_256, 2048, 64), (8192, 128_256, 4096, 773), (2044, 256, 512, 511)],
)
def test_default_chunk_follows_the_gradients(rows, classes, features, expected):
    assert default_chunk(rows, classes, features) == expected
