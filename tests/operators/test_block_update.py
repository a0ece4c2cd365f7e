"""The operators of block-INT8 updates: against torch's optimizers, in three forms that agree, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from graphopt.execute.measure import measure_memory
from graphopt.kernels import cpu_library
from graphopt.kernels.block_maps import decode_signed, decode_unsigned
from graphopt.operators.block_update import (
    block_adam,
    block_adam_,
    block_adam_list_,
    block_lion,
    block_lion_,
    block_lion_list_,
)
from graphopt.operators.round_weights import join_remainder, round_stochastically, split_remainder
from tests.support.blocks import empty_moments

ADAM = {
    "factor": None,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "step": 1.0,
    "block": 256,
    "map": "companded",
    "decoupled": True,
    "stochastic_state": True,
    "stochastic_weight": False,
}
LION = {name: value for name, value in ADAM.items() if name not in ("eps", "stochastic_state")} | {"beta2": 0.99}
STREAM = {"seed": 3, "offset": 0}
SIZES = (0, 1, 255, 257, 4095, 4097)


def state_of(parameter, num_moments=2, block=256):
    moments = empty_moments(parameter, block, num_moments)
    return [tensor for moment in moments for tensor in (moment.codes, moment.scales)]


def adam_step(parameter, gradient, state, **changed):
    block_adam_(parameter, gradient, *state, **(ADAM | STREAM | changed))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_first_step_is_that_of_torch(decay, decoupled):
    torch.manual_seed(0)
    start, gradient = torch.randn(300, 7), torch.randn(300, 7)
    expected = torch.nn.Parameter(start.clone())
    expected.grad = gradient.clone()
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer([expected], lr=1e-2, weight_decay=decay, foreach=False).step()

    found = start.clone()
    adam_step(found, gradient, state_of(found), weight_decay=decay, decoupled=decoupled)

    # The same operations in the same order; torch's root is off by one unit in the last place at times.
    torch.testing.assert_close(found, expected.detach(), rtol=2**-23, atol=1e-2 * 2**-22)


@pytest.mark.parametrize("decoupled", [True, False])
def test_lion_moves_by_the_sign_and_keeps_the_mean(decoupled):
    torch.manual_seed(0)
    start, gradient = torch.randn(500), torch.randn(500)
    new, codes, scales = block_lion(start, gradient, *state_of(start, 1), **(LION | STREAM | {"decoupled": decoupled}))
    pulled = gradient if decoupled else gradient + 0.1 * start
    kept = start * (1 - 1e-2 * 0.1) if decoupled else start
    torch.testing.assert_close(new, kept - 1e-2 * pulled.sign(), rtol=2**-22, atol=0)
    mean = torch.cat([decode_signed(codes[None, :256], scales[:1], "companded")[0]])
    # Half a code of 127 in the root of the largest.
    torch.testing.assert_close(mean, 0.01 * pulled[:256], rtol=0, atol=0.01 * pulled.abs().max() / 127)


@pytest.mark.parametrize("map", ["companded", "linear", "dynamic"])
def test_the_three_forms_agree_and_the_functional_one_leaves_its_inputs(map):
    torch.manual_seed(0)
    starts = [torch.randn(size) for size in SIZES] + [torch.randn(()), torch.randn(6, 5, 9).permute(2, 0, 1)]
    gradients = [torch.randn_like(start) for start in starts]
    numbers = ADAM | {"map": map}
    functional, in_place, listed = [], [], []
    for start, gradient in zip(starts, gradients, strict=True):
        before = [start.clone(), *state_of(start)]
        after = [tensor.clone() for tensor in before]
        functional.append(block_adam(after[0], gradient, *after[1:], **numbers, **STREAM))
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        in_place.append([tensor.clone() for tensor in before])
        block_adam_(in_place[-1][0], gradient, *in_place[-1][1:], **numbers, **STREAM)
        listed.append(before)
    columns = [list(column) for column in zip(*listed, strict=True)]
    seeds, offsets = [3] * len(starts), [0] * len(starts)
    block_adam_list_(columns[0], gradients, *columns[1:], **numbers, seeds=seeds, offsets=offsets)
    for one, two, three in zip(functional, in_place, listed, strict=True):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, three, strict=True))
        assert one[0].stride() == two[0].stride()


def test_the_three_forms_of_lion_agree():
    start, gradient = torch.randn(700), torch.randn(700)
    one = block_lion(start, gradient, *state_of(start, 1), **LION, **STREAM)
    two, three = ([start.clone(), *state_of(start, 1)] for _ in range(2))
    block_lion_(two[0], gradient, *two[1:], **LION, **STREAM)
    block_lion_list_([three[0]], [gradient], *([tensor] for tensor in three[1:]), **LION, seeds=[3], offsets=[0])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, three, strict=True))


@pytest.mark.parametrize("factor", [float("inf"), float("-inf"), float("nan")])
def test_a_factor_that_is_not_finite_writes_nothing(factor):
    start = torch.randn(300)
    state = state_of(start)
    adam_step(start, torch.randn(300), state)
    before = [tensor.clone() for tensor in (start, *state)]
    adam_step(start, torch.randn(300), state, factor=torch.tensor(factor))
    assert all(torch.equal(one, other) for one, other in zip(before, (start, *state), strict=True))


def test_the_factor_scales_the_gradient():
    start, gradient = torch.randn(300), torch.randn(300)
    scaled, plain = ([start.clone(), *state_of(start)] for _ in range(2))
    adam_step(scaled[0], gradient * 1024, scaled[1:], factor=torch.tensor(2.0**-10))
    adam_step(plain[0], gradient, plain[1:])
    assert all(torch.equal(one, other) for one, other in zip(scaled, plain, strict=True))


def test_pieces_of_a_parameter_are_the_whole():
    torch.manual_seed(0)
    start, gradient = torch.randn(1000).bfloat16(), torch.randn(1000)
    whole = [start.clone(), *state_of(start)]
    adam_step(whole[0], gradient, whole[1:], stochastic_weight=True)
    pieces = [start.clone(), *state_of(start)]
    for first, last in ((0, 512), (512, 1000)):
        part, blocks = slice(first, last), slice(first // 256, -(-last // 256))
        codes = [pieces[1][part], pieces[2][blocks], pieces[3][part], pieces[4][blocks]]
        adam_step(pieces[0][part], gradient[part], codes, stochastic_weight=True, offset=first)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


def test_seed_and_step_choose_the_draws_and_nothing_else_does():
    torch.manual_seed(0)
    start, gradient = torch.randn(4096), torch.randn(4096)

    def squares(**changed):
        state = state_of(start)
        adam_step(start.clone(), gradient, state, **changed)
        return state[2]

    assert torch.equal(squares(), squares())
    assert torch.equal(squares(), squares(lr=1.0))
    assert not torch.equal(squares(), squares(seed=4))
    assert not torch.equal(squares(), squares(offset=1))
    # The first step's squares do not depend on the step but through their draws.
    assert not torch.equal(squares(), squares(step=2.0))


def test_a_gradient_that_is_not_finite_shows_in_its_block_alone():
    start, gradient = torch.zeros(512), torch.ones(512)
    gradient[3] = float("nan")
    state = state_of(start)
    adam_step(start, gradient, state)
    decoded = decode_unsigned(state[2].view(2, 256), state[3], "companded")
    assert decoded[0].isnan().all() and decoded[1].isfinite().all()
    assert start.isnan().sum() == 1


@pytest.mark.skipif(cpu_library.library() is None, reason="nothing is compiled here")
def test_an_update_in_place_allocates_nothing():
    start, gradient = torch.randn(1 << 20), torch.randn(1 << 20)
    state = state_of(start)
    adam_step(start, gradient, state)
    assert measure_memory(lambda: adam_step(start, gradient, state)).peak_bytes <= 256


def test_the_plain_form_works_in_pieces(monkeypatch):
    monkeypatch.setenv(cpu_library.DISABLE, "1")
    peaks = []
    for size in (1 << 20, 1 << 21):
        start, gradient = torch.randn(size), torch.randn(size)
        state = state_of(start)
        peaks.append(measure_memory(lambda s=start, g=gradient, t=state: adam_step(s, g, t)).peak_bytes)
    assert peaks[0] == peaks[1] <= 16 * 4 * (1 << 18)


def test_the_operators_are_what_torch_demands():
    start, gradient = torch.randn(300), torch.randn(300)
    numbers, lion = tuple(ADAM.values()), tuple(LION.values())
    adam_state, lion_state = state_of(start), state_of(start, 1)
    for operator, arguments in (
        (block_adam, (start, gradient, *adam_state, *numbers, 3, 0)),
        (block_adam_, (start, gradient, *adam_state, *numbers, 3, 0)),
        (block_adam_list_, ([start], [gradient], *([tensor] for tensor in adam_state), *numbers, [3], [0])),
        (block_lion, (start, gradient, *lion_state, *lion, 3, 0)),
        (block_lion_, (start, gradient, *lion_state, *lion, 3, 0)),
        (block_lion_list_, ([start], [gradient], *([tensor] for tensor in lion_state), *lion, [3], [0])),
        (round_stochastically, (start, 3, 1.0, 0)),
        (split_remainder, (start,)),
        (join_remainder, split_remainder(start)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def wrong_calls():
    start, gradient = torch.zeros(300), torch.zeros(300)
    state = state_of(start)
    yield ValueError, "counts from 1", (start, gradient, *state), {"step": 0.0}
    yield ValueError, "one of companded, linear, dynamic", (start, gradient, *state), {"map": "cubic"}
    yield ValueError, "1 to 16384 elements, not 0", (start, gradient, *state), {"block": 0}
    yield ValueError, "3 scales for 300 elements in blocks of 128", (start, gradient, *state), {"block": 128}
    yield TypeError, "parameter in float32, bfloat16 or float16", (start.double(), gradient, *state), {}
    yield TypeError, "gradient in float32, bfloat16 or float16", (start, gradient.double(), *state), {}
    yield ValueError, "gradient like its parameter", (start, gradient[1:], *state), {}
    yield TypeError, "codes in torch.int8", (start, gradient, state[0].float(), *state[1:]), {}
    yield ValueError, "codes of the shape and strides", (start, gradient, state[0][1:], *state[1:]), {}
    yield TypeError, "is float16", (start.half(), gradient, *state), {"stochastic_weight": True}
    yield ValueError, "expected a dense tensor", (torch.zeros(600)[::2], gradient, *state), {}


@pytest.mark.parametrize(("error", "message", "tensors", "changed"), wrong_calls())
def test_mistakes_are_named(error, message, tensors, changed):
    with pytest.raises(error, match=message):
        block_adam_(*tensors, **(ADAM | STREAM | changed))
