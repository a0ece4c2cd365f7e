"""The file format: one safetensors file whose header holds, as JSON, what tensors alone cannot say.

Tensors of the model have their plain names, so that any reader of safetensors finds them; those of the training state
start with ``step/``. ``metadata["graphopt"]`` is
``{"version", "aliases": {name: stored name}, "model": tree, "step": tree, "extra": {}}``, trees as in state_tree.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from graphopt.errors import DataError, UnsupportedError
from graphopt.train.replace_file import replace_file, save_error
from graphopt.train.shared_storage import pack
from graphopt.train.state_tree import decode_tree, encode_tree

STEP_PREFIX = "step/"
_METADATA_KEY = "graphopt"
_VERSION = 1

# What every release of safetensors since 0.4.5 can hold.
_STORED_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Content:
    """What a file holds. ``model`` has tensors by name and, for modules with extra state, anything state_tree takes.

    ``step`` is None when no training state was saved.
    """

    model: Mapping[str, Any]
    step: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A file held open, so that all of it comes from one save even if another save replaces it meanwhile.

    Tensors are read from the disk when they are used.
    """

    path: Path
    reader: Any
    header: Mapping[str, Any]

    def model_values(self) -> dict[str, Any]:
        """Everything of the model by name; names that were tied when saved are there, each with the same tensor."""
        names = [name for name in self.reader.keys() if not name.startswith(STEP_PREFIX)]  # noqa: SIM118
        values: dict[str, Any] = {name: self.reader.get_tensor(name) for name in names}
        for name, stored in self.header["aliases"].items():
            if not name.startswith(STEP_PREFIX):
                values[name] = values.get(stored)
        return {**values, **self._decode(self.header["model"])}

    def step_state(self) -> Any:
        """The training state with tensors of its own; DataError when the file holds none."""
        if self.header["step"] is None:
            raise DataError(f"{str(self.path)!r} holds a model but no training state: load it without step=")
        return self._decode(self.header["step"])

    def _decode(self, tree: Any) -> Any:
        try:
            return decode_tree(tree, self._own_tensor)
        except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
            raise _damaged(self.path, error) from error

    def _own_tensor(self, name: str) -> torch.Tensor:
        stored = self.header["aliases"].get(STEP_PREFIX + name, STEP_PREFIX + name)
        # What the reader returns is a view of the file, which must not live on in a training state.
        return self.reader.get_tensor(stored).clone()


def write_checkpoint(path: Path, content: Content) -> None:
    """Write ``content`` to ``path`` as a whole or not at all; raises SaveError or UnsupportedError."""
    extra = _as_json(content.extra)
    step_tensors: dict[str, torch.Tensor] = {}
    model_tensors = {name: value for name, value in content.model.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in content.model.items() if name not in model_tensors}
    trees = {"model": encode_tree(others, step_tensors, path="model"), "step": None}
    if content.step is not None:
        trees["step"] = encode_tree(content.step, step_tensors)
    _check_names(model_tensors)
    tensors = {**model_tensors, **{STEP_PREFIX + name: tensor for name, tensor in step_tensors.items()}}
    _check_storable(tensors)
    packed = pack(tensors)
    header = json.dumps({"version": _VERSION, "aliases": packed.aliases, **trees, "extra": extra})
    # "format" is what transformers asks for before it loads a file.
    metadata = {"format": "pt", _METADATA_KEY: header}

    def write(temporary: Path) -> None:
        try:
            safetensors.torch.save_file(packed.tensors, temporary, metadata=metadata)
        except safetensors.SafetensorError as error:
            raise save_error(path, error) from error

    replace_file(path, write)


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Iterator[OpenCheckpoint]:
    """The file at ``path``; DataError when it is missing, cut short, or no safetensors file."""
    try:
        reader = safetensors.safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise DataError(f"expected a safetensors file at {str(path)!r}; there is none") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(
            f"expected a complete safetensors file; {str(path)!r} is not one ({error}): it was cut short, damaged, or "
            "written by another program. Use an earlier checkpoint"
        ) from error
    with reader:
        yield OpenCheckpoint(path, reader, _header(path, reader.metadata() or {}))


def _header(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """The header of our own files, and an empty one for those of other programs."""
    empty: dict[str, Any] = {"aliases": {}, "model": {"dict": []}, "step": None, "extra": {}}
    if _METADATA_KEY not in metadata:
        return empty
    try:
        header = json.loads(metadata[_METADATA_KEY])
        version, aliases = header["version"], dict(header["aliases"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    if version != _VERSION:
        raise DataError(f"{str(path)!r} has format {version}, this graphopt reads format {_VERSION}: update graphopt")
    return {**empty, **header, "aliases": aliases}


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"the header of {str(path)!r} is damaged ({error!r}): use an earlier checkpoint")


def _as_json(extra: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"expected extra= to hold only what JSON can say; {error}") from error


def _check_names(tensors: Mapping[str, torch.Tensor]) -> None:
    taken = [name for name in tensors if name.startswith(STEP_PREFIX)]
    if taken:
        raise UnsupportedError(
            f"names that start with {STEP_PREFIX!r} are kept for the training state; came {taken[0]!r}"
        )


def _check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if type(tensor.detach()) is not torch.Tensor or tensor.layout != torch.strided:
            kind = f"a {type(tensor).__name__} with layout {tensor.layout}"
            raise UnsupportedError(f"expected a plain dense tensor; {name!r} is {kind}: convert it before saving")
        if tensor.is_meta:
            raise UnsupportedError(f"{name!r} has no values (device meta): load or initialise the model before saving")
        if tensor.dtype not in _STORED_DTYPES:
            raise UnsupportedError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors cannot hold: convert it first"
            )
