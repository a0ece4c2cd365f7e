"""graphopt diff: which stage of two dumps differs first, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphopt.errors import DataError
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.pipeline.compare import compare_dumps
from graphopt.pipeline.dump import Dump
from graphopt.pipeline.pass_base import Pass
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import program_of


def dumped(directory: Path, function: Callable[..., torch.Tensor], *passes: Pass) -> Path:
    program, dump = program_of(function, torch.randn(3)), Dump(directory)
    folder = dump.start(program)
    Pipeline(passes).run(program, observer=dump.observe)
    return folder


def twice(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + x.exp()


def thrice(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + x.exp() + x.exp()


def test_equal_dumps_have_no_difference(tmp_path: Path):
    a, b = dumped(tmp_path / "a", twice, Dedupe()), dumped(tmp_path / "b", twice, Dedupe())
    (comparison,) = compare_dumps(a, b)
    assert comparison.first is None
    assert str(comparison).startswith("no difference")


def test_names_the_first_file_that_differs_and_shows_the_lines(tmp_path: Path):
    a, b = dumped(tmp_path / "a", twice, Dedupe()), dumped(tmp_path / "b", thrice, Dedupe())
    (comparison,) = compare_dumps(a, b)
    assert comparison.first is not None and comparison.first.file_a == "00-captured.txt"
    assert "differ in 2 files, first in 00-captured.txt" in str(comparison)
    assert "+    exp_2: 'f32[3]'" in comparison.first.diff


def test_a_pass_that_one_dump_lacks_shifts_nothing(tmp_path: Path):
    a, b = dumped(tmp_path / "a", twice, DropDead(), Dedupe()), dumped(tmp_path / "b", twice, Dedupe())
    (comparison,) = compare_dumps(a, b)
    (difference,) = comparison.differences
    assert str(difference) == "drop-dead: only in the first dump (01-drop-dead.txt)"


def test_pairs_the_graphs_of_two_folders_by_name(tmp_path: Path):
    for name, function in (("a", twice), ("b", thrice)):
        dumped(tmp_path / name, twice, Dedupe())
        dumped(tmp_path / name, function, Dedupe())
    first, second = compare_dumps(tmp_path / "a", tmp_path / "b")
    assert first.first is None
    assert second.first is not None


def test_long_differences_are_cut(tmp_path: Path):
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x.cos()
        return x

    (comparison,) = compare_dumps(dumped(tmp_path / "a", long), dumped(tmp_path / "b", twice))
    assert comparison.first is not None
    assert comparison.first.diff.splitlines()[-1].endswith("more lines")
    assert len(comparison.first.diff.splitlines()) == 41


def test_says_what_is_no_dump(tmp_path: Path):
    with pytest.raises(DataError, match="which is no folder"):
        compare_dumps(tmp_path / "nothing", tmp_path)
    with pytest.raises(DataError, match="where nothing holds a file"):
        compare_dumps(tmp_path, tmp_path)
