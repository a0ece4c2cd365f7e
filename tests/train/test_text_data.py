"""The demo's text: what is refused and why, what is held out, and batches that repeat."""

from __future__ import annotations

import gzip
import re

import pytest
import torch

from graphopt.errors import DataError
from graphopt.train.text_data import WindowShape, load_text, split_text

SHAPE = WindowShape(batch_size=2, length=16)


def numbered(num_bytes: int) -> bytes:
    """A text whose every position can be told from the bytes around it."""
    return "".join(f"{number:07d} " for number in range(num_bytes // 8 + 1)).encode()[:num_bytes]


def test_the_default_text_is_english_documentation():
    text = load_text(None)
    assert len(text) > 200_000
    assert b"statement" in text and text == load_text(None)


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "t").write_bytes("naïve text\r\n".encode())
    assert load_text(tmp_path / "t") == "naïve text\r\n".encode()


def test_latin_1_is_text_too(tmp_path):
    (tmp_path / "t").write_bytes("Die Straße über den Fluß führt zur Brücke.".encode("latin-1"))
    assert load_text(tmp_path / "t")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x00\x00", "NUL bytes"),
        ("text".encode("utf-16"), "save it as UTF-8"),
        (gzip.compress(numbered(9000)).replace(b"\0", b""), "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_text(tmp_path / "t")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_text(tmp_path)


@pytest.mark.parametrize("shape", [SHAPE, WindowShape(1, 1), WindowShape(1, 128), WindowShape(64, 3)])
def test_the_error_for_a_short_text_says_what_is_enough(shape):
    with pytest.raises(DataError, match="at least") as caught:
        split_text(b"abc", shape)
    needed = int(re.search(r"at least ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
    data = split_text(b"a" * needed, shape)
    assert data.train_batch(torch.Generator()).shape == (shape.batch_size, shape.length)
    assert all(batch.shape == (shape.batch_size, shape.length) for batch in data.held_out_batches(3))
    with pytest.raises(DataError):
        split_text(b"a" * (needed - 1), shape)


def test_a_tenth_is_held_out_in_blocks_and_never_trained_on():
    text = numbered(16_000)
    data = split_text(text, SHAPE)
    held_out, train = bytes(data.held_out.tolist()), bytes(data.train.tolist())
    assert len(held_out) == len(text) // 10 and len(train) + len(held_out) == len(text)
    held_numbers, train_numbers = (set(re.findall(rb"\d{7}", part)) for part in (held_out, train))
    assert held_numbers and not held_numbers & train_numbers


def test_batches_depend_on_the_generator_alone():
    data = split_text(numbered(16_000), SHAPE)
    torch.manual_seed(1)
    first = [data.train_batch(generator) for generator in [torch.Generator().manual_seed(5)] for _ in range(3)]
    torch.manual_seed(2)
    again = [data.train_batch(generator) for generator in [torch.Generator().manual_seed(5)] for _ in range(3)]
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], first[1])
    assert first[0].dtype == torch.int64
    assert all(bytes(window.tolist()) in bytes(data.train.tolist()) for window in first[0])


def test_held_out_batches_cover_the_whole_part():
    data = split_text(numbered(16_000), SHAPE)
    batches = data.held_out_batches(4)
    assert len(batches) == 4 and torch.equal(batches[0][0], data.held_out[:16].long())
    assert torch.equal(batches[-1][-1], data.held_out[-16:].long())
