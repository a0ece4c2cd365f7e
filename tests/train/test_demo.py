"""The demo: a tiny run trains as plain PyTorch does, reports what it measured, and leaves dumps and a report."""

from __future__ import annotations

import ast
import copy

import pytest
import torch

import graphopt
from graphopt.errors import DataError, UnsupportedError
from graphopt.train.byte_gpt import NUM_BYTES, ByteGPT, ByteGPTConfig
from graphopt.train.demo import DemoRecipe, run_demo

TINY = ByteGPTConfig(width=16, num_layers=1, num_heads=2, max_length=32)
RECIPE = DemoRecipe(model=TINY, batch_size=2)


def run(tmp_path, **changes):
    return run_demo(**{"text": None, "steps": 3, "out": tmp_path / "out", "recipe": RECIPE} | changes)


def test_trains_and_reports_what_it_measured(tmp_path, capsys):
    result = run(tmp_path, steps=8)
    printed = capsys.readouterr().out
    assert result.held_out_after < result.held_out_before < 6.0
    assert result.ours.rest_bytes == result.eager.rest_bytes and result.ours.peak_bytes > 0
    assert f"{result.held_out_after:.3f} nats/byte" in printed and "drop-dead" in printed
    assert "plain PyTorch" in printed and str(result.report) in printed
    assert "step     8 of 8: loss" in printed and "\x1b" not in printed


def test_leaves_dumps_that_parse_and_a_report(tmp_path):
    result = run(tmp_path, quiet=True)
    emitted = [path for folder in result.dumps for path in folder.glob("*-emitted.py")]
    assert len(emitted) == len(result.dumps) == 2  # the step and the evaluation
    assert all(ast.parse(path.read_text()) for path in emitted)
    assert result.report.parent == tmp_path / "out" and "<html" in result.report.read_text()


def test_quiet_prints_nothing_and_the_random_state_stays(tmp_path, capsys):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = (run(tmp_path, quiet=True, out=tmp_path / name) for name in ("a", "b"))
    assert capsys.readouterr().out == ""
    assert first.held_out_after == second.held_out_after and first.sample == second.sample
    assert torch.equal(torch.get_rng_state(), state)


def test_trains_on_a_file_and_refuses_a_short_one(tmp_path):
    (tmp_path / "long").write_text("To be, or not to be, that is the question. " * 40)
    (tmp_path / "short").write_text("To be.")
    assert run(tmp_path, text=tmp_path / "long", quiet=True).steps == 3
    with pytest.raises(DataError, match="at least"):
        run(tmp_path, text=tmp_path / "short", quiet=True)
    with pytest.raises(UnsupportedError, match="at least 1 step"):
        run(tmp_path, steps=0)


def test_the_model_trains_as_in_plain_pytorch_bit_by_bit():
    model = ByteGPT(TINY)
    plain = copy.deepcopy(model)
    step = graphopt.compile(
        model, outputs=["loss"], optimizer=graphopt.optim.AdamW(lr=1e-2, weight_decay=0.01), clip_grad_norm=1.0
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for seed in range(4):
        ids = torch.randint(0, NUM_BYTES, (2, 32), generator=torch.Generator().manual_seed(seed))
        loss = step(ids=ids, labels=ids).loss
        plain_loss = plain(ids, labels=ids)["loss"]
        plain_loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, plain_loss)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_no_position_sees_a_later_byte():
    model = ByteGPT(TINY).eval()
    ids = torch.randint(0, NUM_BYTES, (1, 10))
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % NUM_BYTES
    same = (model(ids)["logits"] == model(changed)["logits"]).all(-1)[0]
    assert same[:6].all() and not same[6]


def test_the_loss_predicts_the_next_byte():
    model = ByteGPT(TINY)
    ids = torch.randint(0, NUM_BYTES, (2, 10))
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    # Two float32 means of 18 numbers in another order: a few units in the last place of about 5.5.
    assert torch.allclose(out["loss"], expected, rtol=1e-6)


def test_generates_beyond_its_length_and_keeps_its_mode():
    model = ByteGPT(TINY).train()
    first, again = (model.generate(b"ab", 40, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert first == again and first.startswith(b"ab") and len(first) == 42
    assert model.training and all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="at least one byte"):
        model.generate(b"", 3)


def test_the_head_is_the_embedding():
    model = ByteGPT(TINY)
    assert model.head.weight is model.embed.weight
