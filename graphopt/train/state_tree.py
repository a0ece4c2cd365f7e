"""Nested training state as JSON plus a flat table of tensors, and back; nothing is ever unpickled.

{"lr": 0.1, "exp_avg": tensor, "betas": (0.9, 0.99)}
-> {"dict": [["lr", 0.1], ["exp_avg", {"tensor": "exp_avg"}], ["betas", {"tuple": [0.9, 0.99]}]]}
   and {"exp_avg": tensor}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt.errors import UnsupportedError

_SCALARS = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple}


def encode_tree(value: Any, tensors: dict[str, torch.Tensor], *, path: str = "") -> Any:
    """``value`` in JSON; its tensors are added to ``tensors`` under the names that the JSON refers to.

    Dicts (keys: strings or ints), lists, tuples, tensors, numbers, bools, None and strings; UnsupportedError for more.
    """
    if isinstance(value, torch.Tensor):
        name = _unused_name(path, tensors)
        tensors[name] = value
        return {"tensor": name}
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        _check_keys(value, path)
        return {"dict": [[key, encode_tree(child, tensors, path=_join(path, key))] for key, child in value.items()]}
    if type(value) in (list, tuple):
        items = [encode_tree(child, tensors, path=_join(path, index)) for index, child in enumerate(value)]
        return {type(value).__name__: items}
    raise UnsupportedError(
        f"expected tensors, numbers, strings, None, lists and dicts in the state to save; came {type(value).__name__} "
        f"at {path or 'the top'!r}: turn it into one of these in state_dict()"
    )


def decode_tree(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that ``encode_tree`` was given; ``tensor`` returns the tensor of a name.

    Raises ValueError, KeyError or TypeError for JSON that ``encode_tree`` did not make.
    """
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag == "tensor":
        return tensor(content)
    if tag == "dict":
        return {key: decode_tree(child, tensor) for key, child in content}
    return _SEQUENCES[tag](decode_tree(child, tensor) for child in content)


def _check_keys(value: Mapping[Any, Any], path: str) -> None:
    wrong = [key for key in value if type(key) not in (str, int)]
    if wrong:
        raise UnsupportedError(
            f"expected strings or ints as keys of the state to save; came {wrong[0]!r} at {path or 'the top'!r}"
        )


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def _unused_name(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """``path`` in ASCII (file headers must be valid Unicode, keys need not be), numbered if it is taken."""
    name = path.encode("ascii", "backslashreplace").decode()
    number, unused = 1, name
    while unused in tensors:
        number += 1
        unused = f"{name}#{number}"
    return unused
