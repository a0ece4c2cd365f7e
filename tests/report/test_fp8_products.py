"""By what FP8 products are computed, as a report says it."""

from __future__ import annotations

import torch

from graphopt.ir.fp8_table import Fp8Row, Fp8Table
from graphopt.kernels.fp8_matmul_choice import Choice
from graphopt.kernels.fp8_support import support_of
from graphopt.report import fp8
from graphopt.report.fp8 import fp8_html, fp8_text, product_lines

ROW = Fp8Row("mm", "forward", 32, 32, 32, True, "")
TABLE = Fp8Table("tensorwise", "cpu", (ROW,))
CHOICE = Choice("square 32", "torch._scaled_mm", {"triton 64": None, "torch._scaled_mm": 0.0123}, ("b is copied",))


def test_a_cpu_emulates():
    (line,) = product_lines(TABLE, torch.device("cpu"))
    assert line.startswith("FP8 products: emulated on the CPU")


def test_nothing_is_said_where_no_product_runs_in_fp8():
    assert product_lines(Fp8Table("tensorwise", "cpu", ()), torch.device("cpu")) == ()


def test_a_gpu_tells_what_was_chosen_with_times_and_copies(monkeypatch):
    monkeypatch.setattr(fp8, "support_on", lambda device: support_of((9, 0)))
    monkeypatch.setattr(fp8, "choices_on", lambda device: (CHOICE,))
    path, choice = product_lines(TABLE, torch.device("cuda", 0))
    assert path.startswith("FP8 products on cuda:0: Triton or torch._scaled_mm on sm_90")
    assert choice == (
        "FP8 products square 32: torch._scaled_mm (triton 64 failed, torch._scaled_mm 0.0123 ms); b is copied"
    )


def test_text_shows_the_first_lines_and_the_page_all():
    lines = tuple(f"line {i}" for i in range(20))
    assert fp8_text(TABLE, lines)[1:14] == [*lines[:12], "and 8 more classes of shapes"]
    assert all(f"{line}<" in fp8_html(TABLE, lines) for line in lines)
