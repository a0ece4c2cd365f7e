"""The offload engine by itself: what is sent comes back, whatever the copies' pace, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from graphopt.errors import OffloadError
from graphopt.execute.cpu_copier import CopyPace
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.offload import OffloadEngine
from graphopt.ir.transfer_ops import ARRIVED, OFFLOAD, OFFLOADED, PREFETCH

SLOW = CopyPace(random_seconds=0.0, bytes_per_second=1e4)  # 4 KB take 0.4 s
FLOATS = torch.arange(24, dtype=torch.float32).reshape(4, 6)
MEBI = 1 << 20

VALUES = {
    "float": FLOATS,
    "bfloat16": FLOATS.bfloat16(),
    "integers": torch.arange(-5, 5),
    "booleans": FLOATS > 7,
    "0-dim": torch.tensor(3.5),
    "0-dim boolean": torch.tensor(True),
    "complex": torch.complex(FLOATS, -FLOATS),
    "NaN and infinities": torch.tensor([float("nan"), float("inf"), -0.0]),
    "transposed": FLOATS.t(),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "slice with an offset": FLOATS[1:3, 2:5],
    "every second": FLOATS[:, ::2],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3),
}


def bring_back(sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return PREFETCH(sent, list(like.shape), list(like.stride()), dtype=like.dtype, device=like.device)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def round_trip(value: torch.Tensor) -> torch.Tensor:
    sent = OFFLOADED(OFFLOAD(value), value)
    return ARRIVED(bring_back(sent, value), sent)


@pytest.fixture
def engine():
    engine = OffloadEngine()
    with torch.no_grad(), engine.active():
        yield engine


@pytest.mark.parametrize("name", VALUES)
def test_content_dtype_shape_and_strides_come_back(engine, name):
    value = VALUES[name]
    back = round_trip(value)
    assert torch.equal(bits(back), bits(value))
    assert (back.dtype, back.shape, back.stride()) == (value.dtype, value.shape, value.stride())
    assert value.numel() == 0 or back.data_ptr() != value.data_ptr()


def test_two_views_of_one_memory_have_two_tickets(engine):
    square = torch.randn(4, 4)
    values = [square, square.t(), square[1:], square[:1], square.view(16)]
    sent = [OFFLOADED(OFFLOAD(value), value) for value in values]
    for ticket, value in reversed(list(zip(sent, values, strict=True))):
        assert torch.equal(ARRIVED(bring_back(ticket, value), ticket), value)


def test_an_address_that_is_used_again_is_another_value(engine):
    memory = torch.zeros(8)
    first = OFFLOADED(OFFLOAD(memory), memory)
    memory.fill_(1)
    second = OFFLOADED(OFFLOAD(memory), memory)
    assert int(first) != int(second)
    assert ARRIVED(bring_back(first, memory), first).sum() == 0
    assert ARRIVED(bring_back(second, memory), second).sum() == 8


def test_without_its_wait_a_copy_out_reads_what_was_written_later(engine):
    """The copies are really asynchronous, so that a forgotten wait shows."""
    engine.set_pace(SLOW)
    value = torch.ones(1000)
    ticket = OFFLOAD(value)
    value.fill_(2)  # a step must not do this: OFFLOADED comes first
    assert ARRIVED(bring_back(OFFLOADED(ticket, value), value), ticket).sum() == 2000


def test_without_its_wait_a_copy_in_has_not_come(engine):
    value = torch.ones(1000)
    sent = OFFLOADED(OFFLOAD(value), value)
    engine.set_pace(SLOW)
    buffer = bring_back(sent, value).zero_()
    assert buffer.sum() == 0
    assert ARRIVED(buffer, sent).sum() == 1000


def test_the_memory_of_a_value_in_flight_is_kept_though_its_step_is_gone(engine):
    engine.set_pace(SLOW)
    value = torch.ones(1000)
    is_alive = weakref.ref(value)
    ticket = OFFLOAD(value)
    del value  # as when an exception ends the step between OFFLOAD and OFFLOADED
    assert is_alive() is not None
    sent = OFFLOADED(ticket, ticket)
    assert is_alive() is None
    buffer = bring_back(sent, torch.empty(1000))
    is_alive = weakref.ref(buffer)
    del buffer
    assert is_alive() is not None
    assert engine.statistics.values_in == 1
    assert is_alive() is None


def test_far_memory_lives_as_long_as_the_ticket(engine):
    value = torch.ones(MEBI // 4)
    sent = OFFLOADED(OFFLOAD(value), value)
    assert engine.statistics.far_bytes == MEBI
    held = [sent]
    del sent
    assert engine.statistics.far_bytes == MEBI
    held.clear()
    assert engine.statistics.far_bytes == 0


def test_copies_of_a_dropped_ticket_are_left_out(engine):
    engine.set_pace(SLOW)
    started = time.perf_counter()
    tickets = [OFFLOAD(torch.ones(1000)) for _ in range(50)]  # 20 s of copies
    tickets.clear()
    assert engine.statistics.far_bytes == 0
    assert time.perf_counter() - started < 5


def test_slots_are_used_again(engine):
    for _ in range(5):
        round_trip(FLOATS)
    assert engine.statistics.far_peak_bytes == FLOATS.nbytes
    assert engine.statistics.values_out == 5


def test_the_budget_is_an_error_at_the_wait_and_not_the_end():
    engine = OffloadEngine(FarMemory(budget=1000))
    with torch.no_grad(), engine.active():
        first = torch.ones(200)
        kept = OFFLOADED(OFFLOAD(first), first)
        second = torch.ones(100)
        ticket = OFFLOAD(second)
        with pytest.raises(OffloadError, match=r"limited to 1000 B and holds 800 B; a value of 400 B does not fit"):
            OFFLOADED(ticket, second)
        del kept
        assert torch.equal(round_trip(second), second)
        assert torch.equal(round_trip(first), first)
    assert engine.statistics.far_peak_bytes == 800


def test_free_slots_of_other_sizes_make_room():
    engine = OffloadEngine(FarMemory(budget=1000))
    with torch.no_grad(), engine.active():
        for count in (100, 200, 50, 250, 100):
            assert round_trip(torch.ones(count)).sum() == count


def test_without_keep_nothing_is_held_for_later():
    engines = {keep: OffloadEngine(FarMemory(keep=keep)) for keep in (True, False)}
    for engine in engines.values():
        with torch.no_grad(), engine.active():
            round_trip(FLOATS)
        assert engine.statistics.far_bytes == 0
    free = {keep: engine._copiers[FLOATS.device]._shared.pool.free_bytes for keep, engine in engines.items()}
    assert free == {True: FLOATS.nbytes, False: 0}


def test_a_negative_budget_is_refused():
    with pytest.raises(OffloadError, match="at least 0 bytes, came -1"):
        FarMemory(budget=-1)


def test_an_error_of_the_copying_thread_is_raised_at_the_next_wait(engine, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no far memory")

    value = torch.ones(4)
    sent = OFFLOADED(OFFLOAD(value), value)
    monkeypatch.setattr("graphopt.execute.cpu_copier.ctypes.memmove", fail)
    ticket = OFFLOAD(value)
    with pytest.raises(OffloadError, match="copying out failed: MemoryError"):
        OFFLOADED(ticket, value)
    buffer = bring_back(sent, value)
    with pytest.raises(OffloadError, match="copying in failed: MemoryError"):
        ARRIVED(buffer, sent)
    monkeypatch.undo()
    assert torch.equal(round_trip(value), value)


def test_a_ticket_of_nothing_says_so(engine):
    sent = OFFLOADED(OFFLOAD(FLOATS), FLOATS)
    stale = sent.clone()
    del sent
    with pytest.raises(OffloadError, match="stands for nothing in far memory"):
        bring_back(stale, FLOATS)


def test_a_ticket_of_another_shape_says_so(engine):
    sent = OFFLOADED(OFFLOAD(FLOATS), FLOATS)
    with pytest.raises(OffloadError, match=r"torch.float32 of shape \(6, 4\) is expected"):
        bring_back(sent, FLOATS.t())


def test_engines_count_for_themselves(engine):
    other = OffloadEngine()
    with other.active():
        round_trip(FLOATS)
    round_trip(FLOATS[:2])
    assert (other.statistics.bytes_out, engine.statistics.bytes_out) == (FLOATS.nbytes, FLOATS.nbytes // 2)


def copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "graphopt-offload"]


def test_the_thread_ends_with_its_engine_and_no_file_stays_open():
    gc.collect()  # engines of tests before this one
    before = len(copying_threads())
    num_open = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    engine = OffloadEngine()
    with torch.no_grad(), engine.active():
        round_trip(FLOATS)
    assert len(copying_threads()) == before + 1
    if num_open:
        assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    del engine
    gc.collect()
    assert len(copying_threads()) == before


LEAVE = """
import torch, graphopt
from graphopt.execute.cpu_copier import CopyPace
from graphopt.execute.offload import OffloadEngine
engine = OffloadEngine()
engine.set_pace(CopyPace(random_seconds=0.2))
with torch.no_grad(), engine.active():
    tickets = [torch.ops.graphopt.offload.default(torch.ones(100)) for _ in range(1000)]
"""


def test_the_interpreter_ends_though_copies_wait():
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_told_what_to_do(engine):
    value = torch.ones(4)
    sent = OFFLOADED(OFFLOAD(value), value)
    child = os.fork()
    if not child:
        try:
            bring_back(sent, value)
        except OffloadError as error:
            os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(ARRIVED(bring_back(sent, value), sent), value)
