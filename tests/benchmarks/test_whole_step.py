"""The benchmark of whole steps: everything that rests is counted, and bounds are checked beside each peer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.eight_bit_peers import BITSANDBYTES, TORCHAO
from benchmarks.live_bytes import bytes_since, live_storages
from benchmarks.machine import Machine
from benchmarks.measure import plain_tensors
from benchmarks.memory_settings import checkpoint_settings
from benchmarks.models import MODELS
from benchmarks.peers import EAGER, GRAPHOPT
from benchmarks.rows import Row, Subject
from benchmarks.whole_step import WholeStepBench, chosen_peers
from benchmarks.whole_step_table import WholeStepFigures, whole_step_checks, whole_step_table
from graphopt.errors import DataError

MACHINE = Machine("a CPU", 2, 2, "2.13", "5.24", "3.12", "Linux 6", "0.1", "0123456789abcdef", False, "2025-12-01")


@pytest.fixture(scope="module")
def figures() -> dict[str, WholeStepFigures]:
    """Eager and graphopt on the smallest model."""
    bench = WholeStepBench(MODELS["tiny-mlp"], layers=2, rounds=1)
    entries = bench.entries((EAGER,), checkpoint_settings("every-1"))
    bench.measure(entries[-1:])  # tables of codes are made once a process: they would rest with the first to need them
    return {figures.label: figures for figures in bench.measure(entries)}


def test_every_contender_is_measured(figures: dict[str, WholeStepFigures]) -> None:
    own = [f"{GRAPHOPT}, EveryN(n=1), embeddings {state}" for state in ("fp32", "int8")]
    assert list(figures) == [EAGER, *own]
    assert all(found.note == "" and len(found.seconds) == 1 for found in figures.values())


def test_rest_is_parameters_state_and_batch(figures: dict[str, WholeStepFigures]) -> None:
    model, batch = MODELS["tiny-mlp"].make_model(2), MODELS["tiny-mlp"].make_batch()
    parameters = list(model.parameters())
    size, step_counts = sum(parameter.nbytes for parameter in parameters), 4 * len(parameters)
    eager = figures[EAGER]
    assert eager.state_bytes == 2 * size + step_counts
    assert eager.resting_bytes == 3 * size + step_counts + sum(tensor.nbytes for tensor in batch.values())


def test_embeddings_in_8_bits_rest_with_less(figures: dict[str, WholeStepFigures]) -> None:
    wide, narrow = (found for found in figures.values() if found.name == GRAPHOPT)
    elements = 64 * 64  # of the embedding table
    assert wide.state_bytes - narrow.state_bytes == 8 * elements - 2 * elements - 2 * 4 * elements // 256
    assert wide.resting_bytes - narrow.resting_bytes == wide.state_bytes - narrow.state_bytes


def test_bytes_that_no_state_shows_are_counted() -> None:
    before = live_storages()
    held = [torch.zeros(1000), nn.Parameter(torch.zeros(10))]
    view = held[0][10:]
    assert bytes_since(before) == 4040
    del held, view
    assert bytes_since(before) == 0


def test_tensors_made_of_others_are_taken_apart() -> None:
    inner = torch.zeros(3)
    assert list(plain_tensors(inner)) == [inner] and list(plain_tensors(3)) == []
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert sum(part.numel() for part in plain_tensors(nested)) == 5 + 3  # values and offsets


def some_rows() -> list[WholeStepFigures]:
    eager = WholeStepFigures(EAGER, resting_bytes=600, state_bytes=400, peak_bytes=400, seconds=(2.0, 2.0))
    peer = replace(eager, name=TORCHAO, resting_bytes=300, peak_bytes=200, seconds=(4.0, 4.0))
    own = replace(eager, name=GRAPHOPT, setting="EveryN(n=1)", embeddings="fp32", resting_bytes=300, peak_bytes=100)
    small = replace(own, embeddings="int8", peak_bytes=60)
    return [eager, peer, replace(WholeStepFigures(BITSANDBYTES), note="not installed"), own, small]


def test_checks_follow_the_state_of_embeddings_and_leave_out_peers_that_failed() -> None:
    found = {(check.against, check.what): check for check in whole_step_checks(some_rows())}
    assert {against for against, _ in found} == {EAGER, TORCHAO}
    wide = found[EAGER, "EveryN(n=1), embeddings fp32: whole peak"]
    narrow = found[EAGER, "EveryN(n=1), embeddings int8: whole peak"]
    assert (wide.figure, wide.bound, wide.is_met) == (0.4, 0.42, True)
    assert (narrow.figure, narrow.bound, narrow.is_met) == (0.36, 0.35, False)
    assert found[TORCHAO, "EveryN(n=1), embeddings fp32: whole peak"].figure == 0.8
    assert found[TORCHAO, "EveryN(n=1), embeddings fp32: step time"].figure == 0.5


def test_table_has_a_line_for_each_contender() -> None:
    subject = Subject("tiny-mlp", 1000, "x f32[2]", ("loss",))
    assert whole_step_table([Row(subject, MACHINE, found) for found in some_rows()]).row_count == 5


def test_a_peer_that_does_not_exist_is_named() -> None:
    assert chosen_peers("torchao, eager") == (TORCHAO, EAGER)
    with pytest.raises(DataError, match="apex"):
        chosen_peers("eager,apex")
