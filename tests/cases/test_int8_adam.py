"""Public failures of 8-bit Adam, as small as they get: dtypes lost on load, outliers, embeddings, odd sizes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from tests.support.eight_bit import same_bits

BLOCK = 256


class Weighted(nn.Module):
    """A loss that is linear in every parameter: the batch is its gradient."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}
        )

    def forward(self, **gradients: torch.Tensor) -> dict[str, torch.Tensor]:
        # In double, so that the gradient arrives as the batch has it.
        terms = [(self.p[name].double() * gradient.double()).sum() for name, gradient in gradients.items()]
        return {"loss": torch.stack(terms).sum()}


def compiled(model, optimizer, **options):
    return graphopt.compile(model, outputs=["loss"], optimizer=optimizer, backend="aten", **options)


def forced(**options):
    """AdamW8bit that keeps everything in 8 bits, however small."""
    return optim.AdamW8bit(groups=[{"params": ["*"], "state": "int8"}], **options)


# ---- dtype and scales survive a load -----------------------------------------------------------------------------

SHAPES = {"vector": (300,), "matrix": (7, 13), "bias": (3,)}


def gradients(shapes, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Reordered(Weighted):
    """The same parameters, made in another order."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__(dict(reversed(shapes.items())), dtype)


@pytest.mark.parametrize("kind", [Weighted, Reordered])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_a_run_saved_and_loaded_elsewhere_ends_like_a_whole_one(dtype, kind):
    items = [gradients(SHAPES, seed, dtype) for seed in range(6)]
    straight = compiled(Weighted(SHAPES, dtype), forced(lr=1e-2))
    for item in items[:3]:
        straight(**item)
    stream = io.BytesIO()
    torch.save({"model": straight.model.state_dict(), "optimizer": straight.optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    again = compiled(kind(SHAPES, dtype), forced(lr=1e-2))
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    for name, parameter in again.model.p.items():
        state, before = again.optimizer.state[parameter], straight.optimizer.state[straight.model.p[name]]
        assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq")] == [torch.int8, torch.uint8]
        assert state["exp_avg_scale"].dtype == torch.float32 and float(state["step"]) == 3
        assert sum(value.nbytes for value in state.values()) == sum(value.nbytes for value in before.values())
    for item in items[3:]:
        straight(**item)
        again(**item)
    for name, parameter in straight.model.p.items():
        assert same_bits(again.model.p[name].detach(), parameter.detach()), name


# ---- an outlier beside ordinary coordinates ----------------------------------------------------------------------


def outlier_run(order: torch.Tensor, *, steps: int, pauses: bool, **options) -> torch.Tensor:
    """Where 256 parameters end whose coordinate ``order[0]`` has gradient 1 and the others 0.02, that one first."""
    model = Weighted({"w": (BLOCK,)})
    nn.init.zeros_(model.p["w"])
    step = compiled(model, forced(lr=1e-3, weight_decay=0.0, **options))
    for count in range(1, steps + 1):
        gradient = torch.full((BLOCK,), 0.0 if pauses and count % 2 == 0 else 0.02)
        gradient[order[0]] = 1.0
        before = model.p["w"].detach().clone()
        step(w=gradient)
        assert float((model.p["w"].detach() - before).abs().max()) <= 2e-3
    return model.p["w"].detach()[order]


@pytest.mark.parametrize(
    "options", [{}, {"stochastic_state": False}, {"stochastic_state": False, "map": "dynamic"}], ids=str
)
@pytest.mark.parametrize(("steps", "pauses", "expected"), [(20, True, -0.01451), (100, False, -0.1)])
def test_small_second_moments_beside_a_large_one_keep_their_size(steps, pauses, expected, options):
    in_order = outlier_run(torch.arange(BLOCK), steps=steps, pauses=pauses, **options)
    reversed_order = outlier_run(torch.arange(BLOCK).flip(0), steps=steps, pauses=pauses, **options)
    for found in (in_order, reversed_order):
        assert found.isfinite().all()
        assert float((found[1:] / expected - 1).abs().max()) < 0.25
    if options:  # nothing is left to chance
        assert torch.equal(in_order, reversed_order)


def test_the_naive_linear_map_fails_that():
    with pytest.raises(AssertionError):
        outlier_run(torch.arange(BLOCK), steps=20, pauses=True, map="linear", stochastic_state=False)


def test_the_order_inside_a_block_is_irrelevant_when_nothing_is_left_to_chance():
    model, other = Weighted({"w": (BLOCK,)}), Weighted({"w": (BLOCK,)})
    order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(1))
    other.p["w"].data.copy_(model.p["w"].data[order])
    options = {"lr": 1e-3, "stochastic_state": False}
    first, second = compiled(model, forced(**options)), compiled(other, forced(**options))
    for seed in range(5):
        gradient = gradients({"w": (BLOCK,)}, seed, torch.float32)["w"]
        first(w=gradient)
        second(w=gradient[order])
    assert torch.equal(model.p["w"][order], other.p["w"])


# ---- embeddings and norms in 32 bits -----------------------------------------------------------------------------


class TiedLM(nn.Module):
    """Embedding (600, 8) tied to the head, whose parameter may be met first under either name."""

    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, head = nn.Embedding(600, 8), nn.Linear(8, 600, bias=False)
        head.weight = embedding.weight
        parts = {"embed": embedding, "norm": nn.LayerNorm(8), "body": nn.Linear(8, 8), "head": head}
        for name in ("head", "embed", "norm", "body") if head_first else parts:
            self.add_module(name, parts[name])

    def forward(self, ids):
        logits = self.head(self.body(self.norm(self.embed(ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())}


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("excluded", [None, "head.weight", "embed.weight"])
def test_a_tied_embedding_keeps_32_bits_under_either_name_and_after_a_load(head_first, excluded, tmp_path):
    ids = torch.randint(0, 600, (4, 6), generator=torch.Generator().manual_seed(2))
    name = "head.weight" if head_first else "embed.weight"
    options = {"min_8bit_size": 32, "embeddings": "int8" if excluded else "fp32"}
    groups = [{"params": [excluded, "norm.*"], "state": "fp32"}] if excluded else []
    model = TiedLM(head_first=head_first)
    twin = copy.deepcopy(model)
    step = compiled(model, optim.Adam8bit(lr=1e-3, groups=groups, **options))
    whole = compiled(twin, optim.Adam(lr=1e-3))
    for count in range(10):
        if count == 5:
            graphopt.save_checkpoint(tmp_path / "half.safetensors", model=model, step=step)
            model = TiedLM(head_first=head_first)
            step = compiled(model, optim.Adam8bit(lr=1e-3, groups=groups, **options))
            graphopt.load_checkpoint(tmp_path / "half.safetensors", model=model, step=step)
            assert step.optimizer.state[model.embed.weight]["exp_avg"].dtype == torch.float32
        # The other parameters are those of the 8-bit run, so that the embedding sees the same gradients.
        twin.body.load_state_dict(model.body.state_dict())
        step(ids=ids)
        whole(ids=ids)
        torch.testing.assert_close(model.embed.weight, twin.embed.weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(model.norm.weight, twin.norm.weight, rtol=0, atol=1e-6)
    rows = {row.parameter: row for row in step.report().state}
    assert rows[name].format == "float32"
    assert rows[name].reason == (
        "state='fp32'" if excluded else "an embedding table: updates of rare rows need more digits"
    )
    assert rows["body.weight"].format == "int8 by blocks of 256, companded"
    assert rows["norm.weight"].format == "float32" and len(rows) == 5


def test_state_in_8_bits_can_be_forced_and_is_asked_for_by_name():
    ids = torch.randint(0, 600, (4, 6))
    model = TiedLM(head_first=False)
    step = compiled(model, optim.AdamW8bit(groups=[{"params": ["embed.weight"], "state": "int8"}]))
    step(ids=ids)
    rows = {row.parameter: row.format for row in step.report().state}
    assert rows["embed.weight"] == "int8 by blocks of 256, companded" and rows["body.weight"] == "float32"
    every = compiled(TiedLM(head_first=True), optim.AdamW8bit(embeddings="int8"))
    every(ids=ids)
    assert every.state.choice("head.weight").reason == "4800 elements"


# ---- empty, 0-dim, tiny and odd sizes ----------------------------------------------------------------------------

ODD = {"empty": (0, 10), "scalar": (), "one": (1,), "odd": (257,), "matrix": (7, 13), "long": (5000,)}


class OddSizes(Weighted):
    """``unused`` has no gradient."""

    def __init__(self) -> None:
        super().__init__(ODD)
        self.unused = nn.Parameter(torch.ones(5))


@pytest.mark.parametrize("state", ["auto", "int8"])
@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_odd_sizes_train_and_the_norm_is_eagers(state, clip):
    model = OddSizes()
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    step = compiled(model, optim.AdamW8bit(groups=[{"params": ["*"], "state": state}], **options), clip_grad_norm=clip)
    reference = torch.optim.AdamW(twin.parameters(), **options)
    for seed in range(5):
        item = gradients(ODD, seed, torch.float32)
        step(**item)
        reference.zero_grad()
        twin(**item)["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        reference.step()
        assert step.last_update.grad_norm == pytest.approx(float(norm), abs=1e-6 * max(1.0, float(norm)))
    assert torch.equal(model.unused, torch.ones(5)) and model.unused not in step.optimizer.state
    for name, parameter in model.p.items():
        assert parameter.isfinite().all()
        # In float32 by default: fewer than 4,096 elements, or one dimension. Alone in a block: its own, exact scale.
        exact = state == "auto" or name in ("scalar", "one")
        # Else five steps of 1e-2, each wrong by a few percent.
        torch.testing.assert_close(parameter, twin.p[name], rtol=0, atol=1e-6 if exact else 2e-2)


def test_the_element_behind_a_full_block_is_updated_as_if_alone():
    both, alone = Weighted({"w": (BLOCK + 1,)}), Weighted({"w": (1,)})
    alone.p["w"].data.copy_(both.p["w"].data[-1:])
    options = {"lr": 1e-2, "stochastic_state": False}
    first, second = compiled(both, forced(**options)), compiled(alone, forced(**options))
    for seed in range(5):
        gradient = gradients({"w": (BLOCK + 1,)}, seed, torch.float32)["w"]
        first(w=gradient)
        second(w=gradient[-1:])
    assert torch.equal(both.p["w"][-1:], alone.p["w"])


@pytest.mark.parametrize("optimizer", [optim.Lion8bit, optim.Adam8bit, optim.AdamW8bit])
def test_empty_parameters_alone_are_no_trouble(optimizer):
    model = Weighted({"empty": (0, 10), "w": (2, 3)})
    step = compiled(model, optimizer(groups=[{"params": ["*"], "state": "int8"}]), clip_grad_norm=1.0)
    step(empty=torch.zeros(0, 10), w=torch.ones(2, 3))
    assert step.last_update.grad_norm == pytest.approx(6**0.5)
    saved = copy.deepcopy(step.optimizer.state_dict())
    step.optimizer.load_state_dict(saved)
    assert optim.export_state(step)["state"][0]["exp_avg"].shape == (0, 10)
