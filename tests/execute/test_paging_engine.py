"""The engine of paged state: the order of its copies, slow copies, maps and what the system keeps of them."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from graphopt import optim
from graphopt.errors import StateError
from graphopt.execute.cpu_copier import CopyPace
from graphopt.execute.cuda_copier import CudaCopier
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.paging.engine import NUM_STAGING
from graphopt.execute.paging.flat_ranges import FlatRanges
from graphopt.execute.paging.page_memory import known_memory, new_page_memory
from graphopt.execute.paging.ranges import new_copier
from graphopt.execute.parcel import Meter
from graphopt.kernels.flat_tensors import flat, is_dense
from tests.execute.test_cuda_copier import calls  # noqa: F401  a fixture
from tests.support.paging import Tensors, assert_same_parameters, assert_same_state, in_small_ranges, pair

CPU = torch.device("cpu")
X = [torch.tensor(0.5 + 0.1 * number) for number in range(8)]


def test_slow_and_irregular_copies_change_nothing(monkeypatch):
    in_small_ranges(monkeypatch)
    model = Tensors((2000,), (300,))
    (plain, plain_step), (paged, step) = pair(model, optim.AdamW, paging={}, step={}, lr=1e-2)
    plain_step(X[0]), step(X[0])
    step.state.pager.store.set_pace(CopyPace(random_seconds=0.002, seed=3))
    for x in X[1:3]:
        plain_step(x), step(x)
        assert_same_parameters(paged, plain)
    assert_same_state(step, plain_step)
    assert step.paging.wait_seconds > 0


def test_a_device_waits_for_each_copy_before_it_reads_or_fetches_into_the_same_buffer(monkeypatch, calls):  # noqa: F811
    """With stand-ins for streams, which copy at once."""
    in_small_ranges(monkeypatch)
    num_ranges = NUM_STAGING + 2
    model = Tensors((256 * num_ranges,))
    (plain, plain_step), (paged, step) = pair(model, optim.Lion, paging={}, step={}, lr=1e-2)
    plain_step(X[0]), step(X[0])
    memory = known_memory(step.state.pager.store.pages_of("tensors.0"))
    memory.copier = CudaCopier(FarMemory(pin=False, keep=False), CPU)
    plain_step(X[1]), step(X[1])
    assert_same_parameters(paged, plain)
    assert_same_state(step, plain_step)
    copies = [call for call in calls if call.endswith("copies")]
    assert copies.count("back copies") == copies.count("out copies") == num_ranges
    for number in range(1, num_ranges + 1):
        fetched, sent = calls.index(f"compute waits for back {number}"), calls.index(f"compute waits for out {number}")
        assert fetched < sent
    nth_fetch = [index for index, call in enumerate(calls) if call == "back copies"]
    for number in range(NUM_STAGING, num_ranges):
        # Its buffer is the one of NUM_STAGING ranges before, which must have been stored.
        stored = calls.index(f"compute waits for out {number - NUM_STAGING + 1}")
        assert stored < nth_fetch[number]
        assert "back waits for compute" in calls[stored : nth_fetch[number]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is resident is read from Linux")
def test_memory_of_a_map_is_given_back_and_its_content_is_not(tmp_path):
    memory = new_page_memory(1 << 16, CPU, folder=str(tmp_path), copier=new_copier(CPU), meter=Meter())
    assert int(memory.pages.sum()) == 0
    memory.pages.copy_(torch.arange(1 << 16).to(torch.uint8))
    assert memory.resident_bytes() == 1 << 16
    memory.evict(100, 3 * 4096)
    assert memory.resident_bytes() == (1 << 16) - 2 * 4096
    memory.evict()
    assert memory.resident_bytes() == 0
    assert torch.equal(memory.pages, torch.arange(1 << 16).to(torch.uint8))


def test_only_far_memory_is_known_and_only_while_it_lives():
    memory = new_page_memory(4096, CPU, folder=None, copier=new_copier(CPU), meter=Meter())
    assert known_memory(memory.pages) is memory
    assert known_memory(memory.pages.clone()) is None
    assert known_memory(memory.pages[:64]) is None
    pages = memory.pages
    del memory
    assert known_memory(pages) is None


def test_a_folder_that_is_not_there_is_an_error_that_says_so(tmp_path):
    with pytest.raises(StateError, match="No such file or directory"):
        new_page_memory(64, CPU, folder=str(tmp_path / "nowhere"), copier=new_copier(CPU), meter=Meter())


def test_files_are_private_and_gone_at_once(tmp_path, monkeypatch):
    seen = []

    def noted(path, flags, mode):
        seen.append((flags & (os.O_CREAT | os.O_EXCL), mode, oct(os.stat(os.path.dirname(path)).st_mode & 0o777)))  # noqa: PTH116, PTH120
        return opened(path, flags, mode)

    opened = os.open
    monkeypatch.setattr(os, "open", noted)
    new_page_memory(64, CPU, folder=str(tmp_path), copier=new_copier(CPU), meter=Meter())
    assert seen == [(os.O_CREAT | os.O_EXCL, 0o600, "0o700")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1)], ids=["contiguous", "permuted"])
def test_pieces_follow_the_memory_of_the_parameter(dims):
    parameter = torch.randn(6, 5, 4).permute(dims)
    other = torch.randn(parameter.shape[::-1]).permute(2, 1, 0)
    expected = flat(torch.empty_like(parameter).copy_(other))
    ranges = FlatRanges(other, parameter)
    pieces = [ranges.piece(start, min(start + 7, 120)) for start in range(0, 120, 7)]
    assert torch.equal(torch.cat(pieces), expected)
    assert FlatRanges(parameter, parameter).piece(3, 9).data_ptr() == flat(parameter)[3:].data_ptr()


def test_dense_means_one_run_of_memory():
    assert is_dense(torch.empty(3, 4)) and is_dense(torch.empty(3, 4).t()) and is_dense(torch.empty(()))
    assert not is_dense(torch.empty(3, 4)[:, :2]) and not is_dense(torch.empty(1, 4).expand(3, 4))
