"""Saving and loading: one file per checkpoint, replaced as a whole; loading writes into the model's own tensors.

Nothing is changed before everything in the file has been checked against the model, and nothing is ever unpickled
by ``load_checkpoint``.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from graphopt.errors import DataError
from graphopt.train.checkpoint_file import Content, open_checkpoint, write_checkpoint
from graphopt.train.match_model import check_values

_NAMES_SHOWN = 20
_PICKLE_START = b"\x80"


class HasState(Protocol):
    """What a step needs so that it can be saved and resumed."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def save_checkpoint(
    path: str | Path,
    *,
    model: torch.nn.Module,
    step: HasState | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the model, the training state of ``step`` and ``extra`` (anything JSON can say) into one file.

    The file at ``path`` is replaced at the end and as a whole: an interrupted or failed save leaves it as it was, and
    the training state in memory is only read. Shared tensors are stored once, non-persistent buffers not at all.
    Raises SaveError for what the file system refuses, UnsupportedError for state that cannot be stored.
    """
    state = None if step is None else step.state_dict()
    write_checkpoint(Path(path), Content(model.state_dict(), state, extra or {}))


def load_checkpoint(
    path: str | Path, *, model: torch.nn.Module | None = None, step: HasState | None = None, strict: bool = True
) -> dict[str, Any]:
    """The ``extra`` that was saved, after loading into ``model`` and ``step``.

    Values are copied into the model's existing tensors: optimizers, compiled steps and ties keep what they refer to.
    Raises DataError when the file is damaged, misses a name, differs in a shape or dtype, gives tied names different
    values, or (``strict``) has names the model does not know; the model is then unchanged.
    """
    with open_checkpoint(Path(path)) as checkpoint:
        values = {} if model is None else checkpoint.model_values()
        state = None if step is None else checkpoint.step_state()
        if model is not None:
            check_values(model, values, strict=strict, path=path)
        # The step checks its state itself, so it goes first: if it refuses, the model is still as it was.
        if step is not None:
            step.load_state_dict(state)
        if model is not None:
            _write_values(model, values)
        return dict(checkpoint.header["extra"])


def save_model(path: str | Path, model: torch.nn.Module) -> None:
    """Write the model's ``state_dict`` under its plain names, readable by anything that reads safetensors."""
    save_checkpoint(path, model=model)


def load_model(path: str | Path, model: torch.nn.Module, *, strict: bool = True) -> None:
    """Load a safetensors file, or a ``torch.save``d state dict (read without running code from it), into ``model``.

    Checks and errors are those of ``load_checkpoint``.
    """
    if not _is_torch_file(Path(path)):
        load_checkpoint(path, model=model, strict=strict)
        return
    values = _read_torch_file(Path(path))
    check_values(model, values, strict=strict, path=path)
    _write_values(model, values)


def _write_values(model: torch.nn.Module, values: Mapping[str, Any]) -> None:
    # Checked before; strict=False because one name of a tie is enough.
    model.load_state_dict(values, strict=False)


def _is_torch_file(path: Path) -> bool:
    """Whether the file is what ``torch.save`` writes: a zip archive, or a bare pickle from before torch 1.6."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(2)
    # A safetensors file starts with the size of its header, which can begin with the same byte as a pickle.
    return zipfile.is_zipfile(path) or (start[:1] == _PICKLE_START and path.suffix != ".safetensors")


def _read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise DataError(
            f"expected a state dict of plain tensors saved by torch.save; {str(path)!r} is damaged or holds other "
            f"objects, which are not loaded because that can run code: save model.state_dict() ({error})"
        ) from error
    if not isinstance(values, Mapping) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        keys = f" with {list(values)[:_NAMES_SHOWN]}" if isinstance(values, Mapping) else ""
        raise DataError(f"expected a dict of tensors by name in {str(path)!r}; came {type(values).__name__}{keys}")
    return dict(values)
