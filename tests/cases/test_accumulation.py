"""C23 (clipping over a window), C55 to C57 and C59: the window equals the full batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Accumulate, optim


class ShiftedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def labelled(valid_counts):
    """8 rows of 6 tokens; each pair of rows holds the given number of valid labels after the shift."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (2 * len(valid_counts), 6), generator=generator)
    labels = torch.full_like(ids, -100)
    for pair, count in enumerate(valid_counts):
        places = [(row, column) for row in (2 * pair, 2 * pair + 1) for column in range(1, 6)]
        for row, column in places[:count]:
            labels[row, column] = ids[row, column]
    return ids, labels


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_window_equals_full_batch_by_tokens(micro_batches, reverse):
    torch.manual_seed(0)
    model = ShiftedLanguageModel()
    twin = copy.deepcopy(model)
    ids, labels = labelled([1, 3, 7, 10])
    expected = twin(ids, labels)["loss"]
    expected.backward()
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=micro_batches)
    before = copy.deepcopy(model.state_dict())
    chunks = list(zip(ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
    for ids_part, labels_part in reversed(chunks) if reverse else chunks:
        step(ids=ids_part, labels=labels_part)
    for name, parameter in twin.named_parameters():
        applied = before[name] - model.state_dict()[name]
        assert torch.allclose(applied, parameter.grad, rtol=0, atol=1e-6), name
    assert abs(step.last_update.loss - expected.item()) < 1e-6
    assert step.last_update.micro_batches == micro_batches


def test_mean_over_items_by_hand():
    w = nn.Parameter(torch.zeros(()))

    class PerToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, losses, mask):
            return {"loss": ((losses + self.w) * mask).sum() / mask.sum()}

    step = graphopt.compile(PerToken(), outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=2)
    step(torch.tensor([1.0, 1, 9, 9, 9, 9]), torch.tensor([1.0, 1, 0, 0, 0, 0]))
    step(torch.full((6,), 5.0), torch.ones(6))
    assert abs(step.last_update.loss - 4.0) < 1e-6
    assert abs(w.item() + 1.0) < 1e-6


class OneWeight(nn.Module):
    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, scale):
        return {"loss": self.w * scale}


def test_incomplete_window_is_divided_by_what_it_holds():
    model = OneWeight()
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=4)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1, gamma=1.0)
    updates = 0
    for epoch in (1, 2):
        for _ in range(10):
            seen = step.state.updates
            step(scale=torch.tensor(1.0))
            if step.state.updates > seen:
                updates += 1
                schedule.step()
        step.flush()
        updates += 1
        schedule.step()
        assert model.w.item() == -3.0 * epoch
        assert model.w.grad is None
    assert updates == step.state.updates == 6
    assert schedule.last_epoch == 6


def test_fewer_micro_batches_than_a_window_make_one_update():
    model = OneWeight()
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=4)
    for _ in range(3):
        step(scale=torch.tensor(1.0))
    assert model.w.item() == 0.0
    assert step.flush().micro_batches == 3
    assert model.w.item() == -1.0 and step.flush() is None


def test_micro_batches_without_labels_count_nothing():
    torch.manual_seed(0)
    model = ShiftedLanguageModel()
    twin = copy.deepcopy(model)
    ids, labels = labelled([5, 0, 3, 0])
    expected = twin(ids, labels)["loss"]
    expected.backward()
    before = copy.deepcopy(model.state_dict())
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=4)
    losses = [step(ids=i, labels=j).loss for i, j in zip(ids.chunk(4), labels.chunk(4), strict=True)]
    assert all(loss.isfinite() for loss in losses) and losses[1] == 0.0
    for name, parameter in twin.named_parameters():
        assert torch.allclose(before[name] - model.state_dict()[name], parameter.grad, rtol=0, atol=1e-6), name
    assert abs(step.last_update.loss - expected.item()) < 1e-6


def test_window_without_any_label_updates_nothing():
    model = ShiftedLanguageModel()
    before = copy.deepcopy(model.state_dict())
    ids, labels = labelled([0, 0])
    step = graphopt.compile(
        model,
        outputs=["loss"],
        optimizer=optim.AdamW(lr=0.1, weight_decay=0.1),
        accumulate=2,
        clip_grad_norm=1.0,
    )
    for i, j in zip(ids.chunk(2), labels.chunk(2), strict=True):
        assert step(ids=i, labels=j).loss == 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step.last_update.loss == 0.0 and "no item" in step.last_update.skipped
    assert step.state.updates == 0


def test_low_precision_gradients_add_up_in_float32():
    model = OneWeight(torch.bfloat16)
    step = graphopt.compile(
        model, outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=Accumulate(257, reduction="sum")
    )
    step(scale=torch.tensor(256.0, dtype=torch.bfloat16))
    for _ in range(256):
        step(scale=torch.tensor(1.0, dtype=torch.bfloat16))
    assert model.w.item() == -512.0


def test_clipping_sees_the_whole_window():
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, c):
            return {"loss": (self.w * c).sum()}

    model = Picked()
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=1.0), accumulate=2, clip_grad_norm=1.0)
    step(torch.tensor([3.0, 0.0]))
    step(torch.tensor([0.0, 4.0]))
    assert torch.allclose(model.w, torch.tensor([-0.6, -0.8]), rtol=0, atol=1e-6)
    assert step.last_update.grad_norm == 5.0
    before = model.w.detach().clone()
    step(torch.tensor([float("inf"), 0.0]))
    step(torch.tensor([0.0, 4.0]))
    assert torch.equal(model.w, before) and "norm is inf" in step.last_update.skipped
    step(torch.tensor([0.25, 0.0]))
    step(torch.tensor([0.0, 0.25]))
    assert torch.allclose(before - model.w, torch.tensor([0.25, 0.25]))


def test_non_finite_norm_skips_a_plain_step():
    model = nn.Linear(2, 1)
    before = copy.deepcopy(model.state_dict())
    step = graphopt.compile(
        model, outputs=["loss"], loss=lambda out, batch: out.sum(), optimizer=optim.AdamW(lr=0.1), clip_grad_norm=1.0
    )
    step(torch.tensor([[float("inf"), 1.0]]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step.state.skipped == 1 and step.state.updates == 0


def test_only_one_micro_batch_is_alive_at_a_time():
    from graphopt.execute.measure import measure_memory

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    step = graphopt.compile(
        model, outputs=["loss"], loss=lambda out, batch: out.square().mean(), optimizer=optim.SGD(lr=0.1), accumulate=4
    )
    x = torch.randn(256, 64)
    for _ in range(5):
        step(x)
    peaks = []
    for _ in range(3):
        peaks.append(measure_memory(lambda: step(x)).peak_bytes)
    assert len(set(peaks)) == 1
