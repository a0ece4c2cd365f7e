"""The order of the CUDA copier's calls, with stand-ins for streams and events: no GPU is needed, and none is proven."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from graphopt.errors import OffloadError
from graphopt.execute.cuda_copier import CudaCopier
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.parcel import Layout, Meter, Parcel


class Event:
    """``position``: how much of its stream had been given when it was recorded."""

    def __init__(self, name):
        self.name = name


class Stream:
    """Writes down what it is told."""

    def __init__(self, name, calls):
        self.name, self.calls, self.num_events = name, calls, 0

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        self.num_events += 1
        self.calls.append(f"{self.name} copies")
        return Event(f"{self.name} {self.num_events}")


@pytest.fixture
def calls(monkeypatch):
    """What streams were told, in order: "compute" is the current one, "out" and "back" the copier's."""
    told: list[str] = []
    compute = Stream("compute", told)
    names = iter(("out", "back"))

    @contextmanager
    def current(stream):
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return told


def copier_and_parcel(value: torch.Tensor, budget: int | None = None) -> tuple[CudaCopier, Parcel]:
    copier = CudaCopier(FarMemory(budget=budget, pin=False), torch.device("cpu"))
    return copier, Parcel(1, Layout.of(value), copier, Meter())


def test_each_copy_waits_for_what_it_reads_and_computing_for_what_it_frees(calls):
    value = torch.randn(3, 4).t()
    copier, parcel = copier_and_parcel(value)
    copier.send(parcel, value)
    copier.wait_sent(parcel)
    buffer = parcel.layout.empty()
    copier.fetch(parcel, buffer)
    copier.wait_fetched(parcel, buffer)
    assert torch.equal(buffer, value)
    assert calls == [
        "out waits for compute",
        "out copies",
        "compute waits for out 1",
        "back waits for compute",
        "back waits for out 1",
        "back copies",
        "compute waits for back 1",
    ]


def test_tensors_are_held_until_computing_waits(calls):
    value = torch.randn(4)
    copier, parcel = copier_and_parcel(value)
    copier.send(parcel, value)
    assert parcel.outgoing.tensor is value
    copier.wait_sent(parcel)
    assert parcel.outgoing is None


def test_a_ticket_that_dies_in_flight_makes_computing_wait(calls):
    value = torch.randn(4)
    copier, parcel = copier_and_parcel(value)
    copier.send(parcel, value)
    copier.drop(parcel)
    assert calls[-1] == "compute waits for out 1"
    assert parcel.outgoing is None and copier.far_bytes() == (0, value.nbytes)


def test_a_slot_that_is_used_again_waits_for_its_last_copy(calls):
    value = torch.randn(4)
    copier, first = copier_and_parcel(value)
    second = Parcel(2, first.layout, copier, Meter())
    copier.send(first, value)
    copier.wait_sent(first)
    copier.fetch(first, torch.empty(4))
    copier.drop(first)
    calls.clear()
    copier.send(second, value)
    assert calls == ["out waits for compute", "out waits for back 1", "out copies"]


def test_the_budget_holds(calls):
    value = torch.randn(4)
    copier, parcel = copier_and_parcel(value, budget=31)
    copier.send(parcel, value)
    with pytest.raises(OffloadError, match="limited to 31 B and holds 16 B; a value of 16 B does not fit"):
        copier.send(Parcel(2, parcel.layout, copier, Meter()), value)
