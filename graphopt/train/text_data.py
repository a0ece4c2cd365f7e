"""Text to learn from, as bytes: where it comes from, what is held out, and batches that repeat exactly."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch

from graphopt.errors import DataError

_NUM_BLOCKS = 40
_HELD_OUT_EVERY = 10
_MIN_BATCHES = 4
# Western text in Latin-1: at most about 0.1 (the bytes with accents); random or compressed bytes: 0.4 and more.
_MAX_UNDECODABLE_SHARE = 0.2
_REPLACEMENT = "\ufffd"
_TOPICS_MODULE = "pydoc_data.topics"


@dataclass(frozen=True)
class WindowShape:
    """A batch: ``batch_size`` windows of ``length`` bytes."""

    batch_size: int
    length: int

    @property
    def min_text_bytes(self) -> int:
        """The shortest text worth training on: a few batches, and a held-out part that holds a window."""
        return max(_MIN_BATCHES * self.batch_size * self.length, _HELD_OUT_EVERY * (self.length + _NUM_BLOCKS))


@dataclass(frozen=True)
class TextData:
    """A text cut in two: u8[N] to train on, and a tenth of it that is never trained on. Batches are i64[B,T]."""

    train: torch.Tensor
    held_out: torch.Tensor
    shape: WindowShape

    def train_batch(self, generator: torch.Generator) -> torch.Tensor:
        """Random windows of the training part; ``generator`` alone decides which."""
        last = len(self.train) - self.shape.length
        starts = torch.randint(0, last + 1, (self.shape.batch_size,), generator=generator)
        return _windows(self.train, starts, self.shape.length)

    def held_out_batches(self, num_batches: int) -> tuple[torch.Tensor, ...]:
        """Windows spread evenly over the held-out part, the same at every call."""
        last = len(self.held_out) - self.shape.length
        starts = torch.linspace(0, last, num_batches * self.shape.batch_size).long()
        return tuple(_windows(self.held_out, part, self.shape.length) for part in starts.chunk(num_batches))


def load_text(path: Path | None) -> bytes:
    """The file's bytes, or, without a path, the English documentation text that comes with Python itself.

    Raises DataError for a file that is missing, empty, or not text.
    """
    return _documentation_text() if path is None else _file_text(path)


def split_text(text: bytes, shape: WindowShape) -> TextData:
    """Every tenth of 40 blocks held out, so that all parts of the text are tested; the rest to train on.

    Raises DataError when the text is too short for ``shape``.
    """
    if len(text) < shape.min_text_bytes:
        raise DataError(
            f"expected a text of at least {shape.min_text_bytes:,} bytes (a few batches of {shape.batch_size} x "
            f"{shape.length} bytes, and a tenth held out); came {len(text):,}: give a longer text"
        )
    blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).tensor_split(_NUM_BLOCKS)
    held_out = blocks[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = [block for position, block in enumerate(blocks, start=1) if position % _HELD_OUT_EVERY]
    return TextData(train=torch.cat(train), held_out=torch.cat(held_out), shape=shape)


def _windows(ids: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return ids[starts[:, None] + torch.arange(length)].long()


def _documentation_text() -> bytes:
    """What ``help()`` shows about the language, about 460 kB, topics in alphabetical order."""
    try:
        topics: dict[str, str] = importlib.import_module(_TOPICS_MODULE).topics
    except ImportError as error:
        raise DataError(f"this Python comes without its documentation ({_TOPICS_MODULE}): give a text file") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _file_text(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"expected a text file at {str(path)!r}; it cannot be read ({error.strerror})") from error
    if not text:
        raise DataError(f"expected text; {str(path)!r} is empty")
    if b"\0" in text:
        raise DataError(f"expected text; {str(path)!r} has NUL bytes, so it is binary or UTF-16: save it as UTF-8")
    undecodable = text.decode(errors="replace").count(_REPLACEMENT) / len(text)
    if undecodable > _MAX_UNDECODABLE_SHARE:
        raise DataError(f"expected text in UTF-8; {undecodable:.0%} of {str(path)!r} is not: convert it first")
    return text
