"""State that was saved on other devices than those that go on."""

from __future__ import annotations

import torch

from graphopt.execute.train_state import Window, _restore_random_state
from graphopt.ir.spec import TensorSpec


def test_totals_of_a_window_that_was_loaded_on_a_cpu_move_to_where_the_program_adds_to_them():
    elsewhere = TensorSpec((), torch.float32, (), torch.device("meta"))
    window = Window(weight=torch.tensor(3.0))
    weight, loss = window.total("weight", elsewhere), window.total("loss", elsewhere)
    assert weight.is_meta and loss.is_meta
    assert window.total("weight", elsewhere) is weight, "the program writes into it"


def test_random_state_of_more_devices_than_there_are_is_restored_as_far_as_they_go(monkeypatch):
    restored = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state}))
    first, second = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    _restore_random_state({"cpu": torch.get_rng_state(), "cuda": [first, second]})
    assert restored == {0: first}
