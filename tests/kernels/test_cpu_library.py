"""Building the CPU kernels: once, into a cache, by several at a time, and what happens where it cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graphopt.kernels import block_adam, cpu_library
from tests.support.blocks import adam_scalars, assert_same_bits, copy_of, item_of, options

needs_compiler = pytest.mark.skipif(cpu_library.library() is None, reason="nothing is compiled here")


@needs_compiler
def test_builders_at_one_time_leave_one_library(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(lambda _: cpu_library.build(), range(2)))
    assert all(outcome.library is not None and outcome.reason.startswith("compiled (") for outcome in outcomes)
    (built,) = tmp_path.iterdir()
    age = built.stat().st_mtime_ns
    assert cpu_library.build().library is not None
    assert built.stat().st_mtime_ns == age


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    built = []
    monkeypatch.setattr(cpu_library.Path, "mkdir", refuse)
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(cpu_library, "_build", lambda _, folder, name: built.append(folder) or folder / name)
    cpu_library.build()
    assert built[0].name.startswith("graphopt-")
    built[0].rmdir()


def test_without_a_compiler_plain_torch_is_used_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = cpu_library.build()
    assert outcome.library is None
    assert outcome.reason.startswith("plain torch: no C++ compiler found (looked for no-such-compiler")


def test_a_compiler_that_fails_is_named_with_its_error(tmp_path, monkeypatch):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit\necho "x.cpp: error: no" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    outcome = cpu_library.build()
    assert outcome.library is None
    assert outcome.reason.endswith("did not build the kernels: x.cpp: error: no")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_environment_turns_it_off_and_changes_no_bit(monkeypatch):
    torch.manual_seed(0)
    item = item_of(torch.randn(1000), torch.randn(1000))
    expected = copy_of(item)
    block_adam.update_([expected], adam_scalars(1), options(), factor=None, step=1)
    monkeypatch.setenv("GRAPHOPT_NO_CXX", "1")
    assert cpu_library.library() is None
    assert cpu_library.cpu_path() == "plain torch: GRAPHOPT_NO_CXX is set"
    block_adam.update_([item], adam_scalars(1), options(), factor=None, step=1)
    assert_same_bits([item], [expected])


def test_importing_builds_nothing(tmp_path):
    code = "import graphopt.operators.block_update"
    environment = {**os.environ, "GRAPHOPT_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert not (tmp_path / "cache").exists()
