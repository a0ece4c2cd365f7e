"""Optimizer state to torch.optim and back, and out of bitsandbytes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from graphopt import optim
from graphopt.errors import StateError
from graphopt.kernels.block_maps import tree
from graphopt.kernels.block_quantize import dequantize_reference, quantize_reference
from graphopt.kernels.block_update import Moment
from graphopt.optim.state import Weights
from tests.support.eight_bit import OPTIMIZERS, batches, odd_model, run, same_bits, same_state, state_of, step_of

NAMES = [name for name, _ in odd_model().named_parameters()]
MATRIX, VECTOR = NAMES.index("matrix"), NAMES.index("vector")
TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def train(model, optimizer, items):
    for batch in items:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


def through_a_file(saved):
    stream = io.BytesIO()
    torch.save(saved, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def trained_in_torch(kind, **options):
    model = odd_model()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    train(model, optimizer, batches(3))
    return model, optimizer


@pytest.fixture(scope="module")
def eight_bit():
    """An 8-bit step after three updates, only read by the tests."""
    step = step_of(odd_model(), OPTIMIZERS["adamw8bit"])
    run(step, batches(3))
    return step


@pytest.mark.parametrize("name", list(TORCH))
def test_torch_to_ours_to_torch_is_bit_equal_and_trains_on_alike(name):
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.1} if name == "sgd" else {}
    model, reference = trained_in_torch(TORCH[name], weight_decay=0.05, **options)
    saved = through_a_file(reference.state_dict())
    twin = copy.deepcopy(model)
    step = step_of(twin, {"sgd": optim.SGD(), "adam": optim.Adam(), "adamw": optim.AdamW()}[name])
    optim.import_state(step, saved)
    exported = optim.export_state(step)
    for number, values in saved["state"].items():
        assert set(values) == set(exported["state"][number])
        assert all(same_bits(value, exported["state"][number][key]) for key, value in values.items())
    (theirs,), (ours,) = saved["param_groups"], exported["param_groups"]
    assert {key: ours[key] for key in theirs} == theirs

    train(model, reference, batches(6)[3:])
    run(step, batches(6)[3:])
    for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adamw-bf16", "adamw8bit", "adam8bit", "adamw8bit-dynamic"])
def test_torchs_optimizer_goes_on_with_what_is_exported(name):
    step = step_of(odd_model(), OPTIMIZERS[name])
    run(step, batches(3))
    kind = TORCH[name.removesuffix("-bf16").split("8bit")[0]]
    model = copy.deepcopy(step.model)
    names = [n for group in optim.export_state(step)["param_groups"] for n in group["param_names"]]
    parameters = dict(model.named_parameters())
    sizes = [len(group["params"]) for group in step.optimizer.param_groups]
    parts, first = [], 0
    for size in sizes:
        parts.append({"params": [parameters[n] for n in names[first : first + size]]})
        first += size
    reference = kind(parts, lr=1.0)
    reference.load_state_dict(optim.export_state(step))
    for parameter in model.parameters():
        assert all(value.dtype == torch.float32 for value in reference.state[parameter].values())
    train(model, reference, batches(4)[3:])
    run(step, batches(4)[3:])
    for (key, mine), its in zip(step.model.named_parameters(), model.parameters(), strict=True):
        # From the same state one update is the same up to rounding: moments are rounded behind it.
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6, msg=key)


def test_what_is_exported_is_decoded_and_a_copy(eight_bit):
    before = state_of(eight_bit)
    exported = optim.export_state(eight_bit)
    names = [name for group in exported["param_groups"] for name in group["param_names"]]
    codes = before["matrix"]
    moment = Moment(codes["exp_avg_sq"], codes["exp_avg_sq_scale"])
    found = exported["state"][names.index("matrix")]
    assert same_bits(found["exp_avg_sq"], dequantize_reference(moment, block=64, map="companded"))
    assert set(found) == {"step", "exp_avg", "exp_avg_sq"} and float(found["step"]) == 3
    for values in exported["state"].values():
        for value in values.values():
            value.fill_(7.0)
    assert same_state(state_of(eight_bit), before)


@pytest.mark.parametrize("name", ["adamw8bit", "adamw8bit-linear", "adamw8bit-dynamic", "adamw-bf16"])
def test_a_state_of_torch_is_rounded_into_our_formats(name):
    _, reference = trained_in_torch(torch.optim.AdamW)
    step = step_of(odd_model(), OPTIMIZERS[name])
    saved = reference.state_dict()
    saved["param_groups"][0]["param_names"] = NAMES
    optim.import_state(step, saved, options=False)
    kept = state_of(step)
    for number, name_of in enumerate(NAMES):
        for key in ("exp_avg", "exp_avg_sq"):
            exact, mine = saved["state"][number][key], kept[name_of][key]
            if mine.dtype in (torch.float32, torch.bfloat16):
                assert same_bits(mine, exact.to(mine.dtype))
            else:
                map_name = step.state.choice(name_of).format.map
                made = quantize_reference(exact, block=64, map=map_name, is_signed=key == "exp_avg")
                assert same_bits(mine, made.codes) and same_bits(kept[name_of][f"{key}_scale"], made.scales)
    assert kept["matrix"]["exp_avg"].dtype == (torch.bfloat16 if name == "adamw-bf16" else torch.int8)
    run(step, batches(1))


def test_import_before_the_first_batch_knows_embedding_tables():
    _, reference = trained_in_torch(torch.optim.AdamW)
    step = step_of(odd_model(), optim.AdamW8bit(min_8bit_size=64, block=64))
    optim.import_state(step, reference.state_dict())
    assert state_of(step)["table.weight"]["exp_avg"].dtype == torch.float32
    run(step, batches(1))
    assert step.state.choice("table.weight").reason.startswith("an embedding table")


def test_state_moves_between_our_formats():
    source = step_of(odd_model(), OPTIMIZERS["adamw8bit-dynamic"])
    run(source, batches(3))
    step = step_of(odd_model(), OPTIMIZERS["adamw"])
    optim.import_state(step, through_a_file(source.optimizer.state_dict()), options=False)
    exported, again = optim.export_state(source), optim.export_state(step)
    first = {name: i for i, name in enumerate(n for g in exported["param_groups"] for n in g["param_names"])}
    second = {name: i for i, name in enumerate(n for g in again["param_groups"] for n in g["param_names"])}
    for name, number in first.items():
        theirs, ours = exported["state"][number], again["state"][second[name]]
        assert all(same_bits(value, ours[key]) for key, value in theirs.items()), name


def test_the_same_codes_are_taken_as_they_are(eight_bit):
    step = step_of(odd_model(), OPTIMIZERS["adamw8bit"])
    optim.import_state(step, through_a_file(eight_bit.optimizer.state_dict()))
    assert same_state(state_of(step), state_of(eight_bit))


@pytest.mark.parametrize("weights", [Weights.MASTER, Weights.REMAINDER, Weights.OWN])
def test_weights_are_exported_as_the_update_knows_them(weights):
    step = step_of(odd_model(torch.bfloat16), OPTIMIZERS["adamw"], weights)
    run(step, batches(3))
    exported = optim.export_weights(step)
    for name, parameter in step.model.named_parameters():
        assert exported[name].dtype == (torch.bfloat16 if weights is Weights.OWN else torch.float32)
        if weights is Weights.MASTER:
            assert torch.equal(exported[name].bfloat16(), parameter)
    again = step_of(copy.deepcopy(step.model), OPTIMIZERS["adamw"], weights)
    optim.import_state(again, optim.export_state(step))
    started = optim.export_weights(again)
    assert all(torch.equal(started[name].bfloat16(), p) for name, p in again.model.named_parameters())


# ---- what is refused ---------------------------------------------------------------------------------------------


def saved_by_torch():
    _, reference = trained_in_torch(torch.optim.AdamW)
    return reference.state_dict()


def entry(key, make):
    def change(saved):
        values = saved["state"][MATRIX]
        values[key] = make(values[key])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["state"][MATRIX].pop("exp_avg_sq"), "'matrix' has no exp_avg_sq.*another optimizer"),
        (lambda saved: saved["state"][MATRIX].pop("step"), "no step count"),
        (entry("exp_avg", lambda value: value.t()), r"shape \[13, 7\], the parameter \[7, 13\]"),
        (entry("exp_avg", lambda value: value.to(torch.int8)), "without a record of what its codes mean"),
        (entry("exp_avg_sq", lambda value: -value - 1), "below 0"),
        (entry("step", lambda value: value.expand(2)), r"step of 'matrix' has shape \[2\]"),
        (lambda saved: saved["state"][MATRIX].update(max_exp_avg_sq=torch.ones(7, 13)), "amsgrad"),
        (lambda saved: saved["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda saved: saved["param_groups"][0].update(decoupled_weight_decay=False), "decays weights as Adam does"),
        (lambda saved: saved["param_groups"][0].update(betas=(0.9, 1.5)), "do not fit AdamW8bit"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), r"have \[3\] parameters, those of the step \[4\]"),
        (lambda saved: saved["state"].update({9: {}}), "none of its groups"),
        (lambda saved: saved.pop("param_groups"), "expected a state dict of an optimizer"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(refusing, change, message):
    saved = copy.deepcopy(SAVED)
    change(saved)
    before, options = state_of(refusing), copy.deepcopy(refusing.optimizer.param_groups[0]["betas"])
    with pytest.raises(StateError, match=message):
        optim.import_state(refusing, saved)
    assert same_state(state_of(refusing), before)
    assert refusing.optimizer.param_groups[0]["betas"] == options


SAVED = saved_by_torch()


@pytest.fixture(scope="module")
def refusing():
    step = step_of(odd_model(), optim.AdamW8bit(min_8bit_size=64, block=64))
    run(step, batches(1))
    return step


def test_groups_that_are_divided_otherwise_need_the_steps_own_options():
    saved = copy.deepcopy(SAVED)
    saved["param_groups"][0]["param_names"] = NAMES
    step = step_of(odd_model(), optim.AdamW(lr=0.5, groups=[{"params": ["bias"], "lr": 0.25}]))
    with pytest.raises(StateError, match="divided in another way"):
        optim.import_state(step, saved)
    optim.import_state(step, saved, options=False)
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.25, 0.5]
    assert same_bits(state_of(step)["bias"]["exp_avg"], saved["state"][NAMES.index("bias")]["exp_avg"])


def test_an_optimizer_that_was_given_the_trained_parameters_alone_matches_by_position():
    model = odd_model()
    model.matrix.requires_grad_(False)
    reference = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train(model, reference, batches(2))
    step = step_of(copy.deepcopy(model), optim.AdamW())
    optim.import_state(step, reference.state_dict())
    state = state_of(step)
    assert state["matrix"] == {}
    assert same_bits(state["vector"]["exp_avg"], reference.state[model.vector]["exp_avg"])


def test_only_a_compiled_step_is_taken():
    with pytest.raises(StateError, match="expected a compiled step"):
        optim.export_state(torch.nn.Linear(2, 2))


# ---- bitsandbytes ------------------------------------------------------------------------------------------------


def coded(values: torch.Tensor, table: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes u8 that index ``table`` and scales, as bitsandbytes keeps ``values``."""
    flat = values.reshape(-1)
    scales = torch.stack([part.abs().max() for part in flat.split(block)])
    ratio = flat / scales.repeat_interleave(block)[: flat.numel()]
    codes = (ratio[:, None] - table).abs().argmin(1).to(torch.uint8)
    return codes.view(values.shape), scales


def synthetic(*, block: int, nested: bool, shift: float = 0.0) -> dict[str, Any]:
    """What bitsandbytes saves for ``Odd``: codes for the matrix, float32 for the rest. ``shift``: of its tables."""
    torch.manual_seed(3)
    state = {}
    for number, (name, parameter) in enumerate(odd_model().named_parameters()):
        first, second = torch.randn_like(parameter), torch.rand_like(parameter)
        values: dict[str, Any] = {"state1": first, "state2": second}
        if name == "matrix":
            signed, unsigned = tree(is_signed=True) * (1 - shift), tree(is_signed=False) * (1 - shift)
            codes1, absmax1 = coded(first, signed, block)
            codes2, absmax2 = coded(second, unsigned, block)
            values = {"state1": codes1, "qmap1": signed, "absmax1": absmax1}
            values |= {"state2": codes2, "qmap2": unsigned, "absmax2": absmax2}
        state[number] = {"step": 5, **({"__bnb_optimizer_quant_state__": values} if nested else values)}
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3, "alpha": 0.0, "t_alpha": None}
    return {"state": state, "param_groups": [{**options, "params": [0, 1, 2, 3]}]}


def meaning(saved: dict[str, Any], number: int, position: int, block: int) -> torch.Tensor:
    values = {**saved["state"][number], **saved["state"][number].get("__bnb_optimizer_quant_state__", {})}
    codes = values[f"state{position}"]
    scales = values[f"absmax{position}"].repeat_interleave(block)[: codes.numel()].view(codes.shape)
    return values[f"qmap{position}"][codes.long()] * scales


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("block", [256, 2048])
def test_codes_of_bitsandbytes_become_ours_without_loss(nested, block):
    saved = through_a_file(synthetic(block=block, nested=nested))
    step = step_of(odd_model(), optim.AdamW8bit(min_8bit_size=64, block=256, map="dynamic"))
    optim.import_state(step, saved)
    state = state_of(step)
    matrix = state["matrix"]
    raw = {**saved["state"][MATRIX], **saved["state"][MATRIX].get("__bnb_optimizer_quant_state__", {})}
    assert torch.equal(matrix["exp_avg"].to(torch.int16) + 128, raw["state1"].to(torch.int16))
    assert torch.equal(matrix["exp_avg_sq"], raw["state2"])
    for position, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        moment = Moment(matrix[key], matrix[f"{key}_scale"])
        expected = meaning(saved, MATRIX, position, block)
        assert torch.equal(dequantize_reference(moment, block=256, map="dynamic"), expected)
    values = {**saved["state"][VECTOR], **saved["state"][VECTOR].get("__bnb_optimizer_quant_state__", {})}
    assert same_bits(state["vector"]["exp_avg"], values["state1"])
    assert float(matrix["step"]) == 5.0 and step.optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    run(step, batches(1))


@pytest.mark.parametrize("shift", [0.0, 0.125])
def test_codes_of_bitsandbytes_are_rounded_into_other_formats(shift):
    saved = synthetic(block=256, nested=True, shift=shift)
    eight, wide = step_of(odd_model(), OPTIMIZERS["adamw8bit"]), step_of(odd_model(), OPTIMIZERS["adamw"])
    named = copy.deepcopy(saved)
    named["param_groups"][0]["param_names"] = NAMES
    optim.import_state(eight, named, options=False)
    optim.import_state(wide, named, options=False)
    for position, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        exact = meaning(saved, MATRIX, position, 256)
        assert torch.equal(state_of(wide)["matrix"][key], exact)
        made = quantize_reference(exact, block=64, map="companded", is_signed=position == 1)
        assert same_bits(state_of(eight)["matrix"][key], made.codes)


def nest(saved):
    return saved["state"][MATRIX]["__bnb_optimizer_quant_state__"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: nest(saved).pop("qmap2"), "expected float32, or uint8 codes with qmap2"),
        (lambda saved: nest(saved).pop("absmax1"), "older than bitsandbytes 0.44"),
        (lambda saved: nest(saved).update(absmax1=torch.ones(9)), r"blocks of 256.*or.*blocks of 2048.*f32\[9\]"),
        (lambda saved: nest(saved).update(qmap1=torch.ones(16)), r"expected a table f32\[256\]"),
        (lambda saved: nest(saved).pop("state2"), "has 1 moments, this step keeps 2"),
        (lambda saved: nest(saved).update(state1=torch.zeros(2, 7, 13)), r"has shape \[2, 7, 13\]"),
    ],
)
def test_a_state_of_bitsandbytes_that_does_not_fit_is_refused(refusing, change, message):
    saved = synthetic(block=256, nested=True)
    change(saved)
    before = state_of(refusing)
    with pytest.raises(StateError, match=message):
        optim.import_state(refusing, saved)
    assert same_state(state_of(refusing), before)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW32bit", "Lion8bit", "SGD8bit"])
def test_what_bitsandbytes_itself_saves_is_read(kind):
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 3))
    options = {"momentum": 0.9} if kind == "SGD8bit" else {}
    reference = getattr(bnb.optim, kind)(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        reference.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        reference.step()
    saved = through_a_file(reference.state_dict())
    ours = {"AdamW8bit": optim.AdamW8bit(map="dynamic"), "AdamW32bit": optim.AdamW(), "Lion8bit": optim.Lion8bit()}
    step = step_of(model, ours.get(kind, optim.SGD(momentum=0.5)))
    optim.import_state(step, saved)
    raw = saved["state"][0]["__bnb_optimizer_quant_state__"]
    state = state_of(step)["0.weight"]
    if kind == "AdamW8bit":
        assert torch.equal(state["exp_avg"].to(torch.int16) + 128, raw["state1"].to(torch.int16))
        assert torch.equal(state["exp_avg_sq"], raw["state2"])
        assert torch.equal(state["exp_avg_scale"], raw["absmax1"])
    elif kind == "AdamW32bit":
        assert same_bits(state["exp_avg"], raw["state1"]) and same_bits(state["exp_avg_sq"], raw["state2"])
    elif kind == "Lion8bit":
        made = quantize_reference(meaning(saved, 0, 1, 256), block=256, map="companded", is_signed=True)
        assert same_bits(state["exp_avg"], made.codes)
    else:
        assert torch.equal(state["momentum_buffer"], meaning(saved, 0, 1, 256))
        assert step.optimizer.param_groups[0]["momentum"] == 0.9
