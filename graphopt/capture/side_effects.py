"""What the user's forward does to its modules in Python while it is traced: nothing of that happens in later calls.

A buffer bound to a new value (``self.g = self.g * 0.5 + 1``) becomes a write into the buffer, which a graph can hold.
Any other change of an attribute is refused. The modules are left as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import CaptureError

_TABLES = ("_parameters", "_buffers", "_modules")
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class _Before:
    """A module before its forward ran: attributes, the sizes of its containers, parameters and buffers."""

    path: str
    module: torch.nn.Module
    attributes: Mapping[str, Any]
    contents: Mapping[str, Any]
    parameters: Mapping[str, Any]
    buffers: Mapping[str, Any]


class ModuleStates:
    """The state of every module of ``model``, taken before its forward runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = [_before(path, module) for path, module in model.named_modules()]

    def write_rebound_buffers(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Copy into each buffer what forward bound its name to; CaptureError where shape or dtype differ.

        Returns ``outputs``, with copies of those that may be a buffer's old value, which eager leaves as it was.
        """
        rebound: list[tuple[torch.nn.Module, str, Any, Any]] = []
        for before in self._before:
            for name, old in before.buffers.items():
                new = before.module._buffers.get(name)
                if new is not old:
                    _check_same_kind(before, name, old, new)
                    rebound.append((before.module, name, old, new))
        if rebound:
            outputs = tuple(output if output.requires_grad else output.clone() for output in outputs)
        with torch.no_grad():
            values = [new.clone() for _, _, _, new in rebound]  # all before the first write: they may read each other
            for (module, name, old, _), value in zip(rebound, values, strict=True):
                old.copy_(value)
                module._buffers[name] = old
        return outputs

    def refuse_changes(self) -> None:
        """Raise CaptureError naming the first attribute that forward changed, and how to write it instead."""
        for before in self._before:
            name = _changed_attribute(before)
            if name is not None:
                raise CaptureError(
                    f"forward() of module {before.path or type(before.module).__name__!r} changes its attribute "
                    f"{name!r}: only the traced call would do so, every later call would not. What to do: keep it in "
                    "a buffer (register_buffer) and update it in place, return it, or change it outside of forward()"
                )

    def restore(self) -> None:
        """Put every attribute back; containers that forward filled are emptied to what they held."""
        for before in self._before:
            here = vars(before.module)
            for name in [name for name in here if name not in before.attributes]:
                del here[name]
            here.update(before.attributes)
            _refill(before.module._parameters, before.parameters)
            _refill(before.module._buffers, before.buffers)
            for name, content in before.contents.items():
                _refill(before.attributes[name], content)


def _before(path: str, module: torch.nn.Module) -> _Before:
    attributes = dict(vars(module))
    contents = {
        name: value.copy()
        for name, value in attributes.items()
        if type(value) in (list, dict, set) and name not in _TABLES
    }
    return _Before(path, module, attributes, contents, dict(module._parameters), dict(module._buffers))


def _check_same_kind(before: _Before, name: str, old: Any, new: Any) -> None:
    both = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    if both and old.shape == new.shape and old.dtype == new.dtype:
        return
    raise CaptureError(
        f"forward() of module {before.path or type(before.module).__name__!r} binds its buffer {name!r}, "
        f"{_kind(old)}, to {_kind(new)}; a step updates a buffer in place and keeps its shape and dtype. "
        f"What to do: write self.{name}.copy_(...)"
    )


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _changed_attribute(before: _Before) -> str | None:
    is_torch_module = type(before.module).__module__.startswith("torch.nn.")
    computed = _attributes_of_torch_hooks(before.module)
    for name, value in vars(before.module).items():
        if name in _TABLES or name in computed or (is_torch_module and name.startswith("_")):
            continue  # torch's own caches, such as the flat weights of an LSTM, follow the parameters
        if name in before.contents and value is before.attributes[name]:
            if _grew(before.contents[name], value):
                return name
        elif _matters(before.attributes.get(name), value):
            return name
    parameters = before.module._parameters
    changed = (name for name in parameters if parameters[name] is not before.parameters.get(name))
    added = (name for name in before.module._buffers if name not in before.buffers)
    return next(iter((*changed, *added)), None)


def _attributes_of_torch_hooks(module: torch.nn.Module) -> set[str]:
    """What weight_norm and spectral_norm set before every forward: computed anew each time, and in the graph."""
    hooks = module._forward_pre_hooks.values()
    return {str(getattr(hook, "name", "")) for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")}


def _matters(old: Any, new: Any) -> bool:
    """Numbers that became others and new tensors; strings, configs and caches that libraries set are left alone."""
    if new is old:
        return False
    if isinstance(new, torch.Tensor):
        return True
    if type(new) in (list, dict, set, tuple):
        return _holds_tensor(new) or (type(old) is type(new) and _grew(old, new))
    return isinstance(new, _NUMBERS) and isinstance(old, _NUMBERS) and new != old


def _grew(old: Any, new: Any) -> bool:
    if len(old) != len(new):
        return True
    pairs = ((old.get(key), new[key]) for key in new) if isinstance(new, dict) else zip(old, new, strict=True)
    return not isinstance(new, set) and any(_matters(*pair) for pair in pairs)


def _holds_tensor(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(value, torch.Tensor) for value in values)


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and all(map(_is_same, _items(container), _items(content))):
        return
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _items(container: Any) -> list[Any]:
    return [part for pair in container.items() for part in pair] if isinstance(container, dict) else list(container)


def _is_same(one: Any, other: Any) -> bool:
    return one is other
