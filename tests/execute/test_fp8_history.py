"""Histories of delayed scaling: rows belong to names, whichever table they lie in."""

from __future__ import annotations

import torch

from graphopt.execute.fp8_history import Fp8History


def test_a_tensor_that_changes_tables_keeps_its_row():
    history = Fp8History(2)
    history.table("values", ("input", "noisy.weight"), torch.device("cpu")).copy_(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    )
    assert history.table("weights", ("noisy.weight",), torch.device("cpu")).tolist() == [[3.0, 4.0]]
    history.table("weights", ("noisy.weight",), torch.device("cpu")).fill_(5.0)
    assert {name: row.tolist() for name, row in history.rows().items()} == {
        "input": [1.0, 2.0],
        "noisy.weight": [5.0, 5.0],
    }
    assert history.table("values", ("input",), torch.device("cpu")).tolist() == [[1.0, 2.0]]
