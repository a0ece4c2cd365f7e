"""Python files that a user names on the command line: ``MODEL.py:make`` and plugins with passes."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphopt.errors import DataError
from graphopt.pipeline.pass_base import Pass

_EXPECTED = "expected MODEL.py:make, a Python file and a function in it that returns (model, batch)"


@dataclass(frozen=True)
class UserModel:
    """A model and one batch for it: a dict of keywords, or a tuple of positions."""

    model: torch.nn.Module
    batch: dict[str, Any] | tuple[Any, ...]


def load_model(target: str) -> UserModel:
    """What the function that ``target`` (``MODEL.py:make``) names returns; DataError when it cannot be had."""
    path, separator, function_name = target.rpartition(":")
    if not separator or not path or not function_name:
        raise DataError(f"{_EXPECTED}, came {target!r}; write, for example, model.py:make")
    module = load_file(path)
    make = getattr(module, function_name, None)
    if not callable(make):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise DataError(
            f"{_EXPECTED}, came {target!r}, but {path} has no function {function_name!r}; "
            f"it has {', '.join(functions) or 'no functions'}"
        )
    try:
        made = make()
    except Exception as error:
        raise DataError(
            f"{function_name}() in {path} failed{_where(error)}; run it alone to see the whole error"
        ) from error
    return _checked(made, target)


def load_passes(path: str) -> dict[str, type[Pass]]:
    """The Pass subclasses defined in a file, by name; DataError when there are none."""
    module = load_file(path)
    found = {
        value.name: value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Pass)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    }
    if not found:
        raise DataError(f"expected a file that defines subclasses of graphopt.pipeline.pass_base.Pass, came {path!r}")
    return found


def load_file(path: str) -> ModuleType:
    """The module of a Python file, which may import what lies beside it; DataError when it does not load."""
    file = Path(path)
    if not file.is_file():
        raise DataError(
            f"expected a Python file, came {path!r}, which does not exist; check the path from {Path.cwd()}"
        )
    spec = importlib.util.spec_from_file_location(f"graphopt_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(f"expected a Python file, came {path!r}; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[spec.name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(f"{path} does not load{_where(error)}; run it with python to see the whole error") from error
    return module


def _checked(made: Any, target: str) -> UserModel:
    if not isinstance(made, tuple) or len(made) != 2:
        raise DataError(f"expected {target} to return (model, batch), came {_kind(made)}; return the two as a tuple")
    model, batch = made
    if not isinstance(model, torch.nn.Module):
        raise DataError(f"expected {target} to return (model, batch) with a torch.nn.Module first, came {_kind(model)}")
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, (dict, tuple)):
        raise DataError(f"expected {target} to return a batch that is a dict or a tuple, came {_kind(batch)}")
    return UserModel(model, batch)


def _kind(value: Any) -> str:
    length = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{length}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    line = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{line}: {type(error).__name__}: {error}"
