"""Hooks that a compiled step could not honour are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphopt.errors import UnsupportedError

# torch's own weight and spectral normalisation compute tensors in pre-forward hooks; the graph holds that computation.
_TRACEABLE_HOOKS = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")


def refuse_module_hooks(model: torch.nn.Module) -> None:
    """Raise UnsupportedError naming the first module hook that would silently stop firing."""
    for path, kind, hook in _module_hooks(model):
        raise UnsupportedError(
            f"module {path or 'itself'!r} has a {kind} hook ({_hook_name(hook)}): a compiled step runs one graph and "
            "would never call it. Remove the hook, or request the value it looks at with outputs=[...]"
        )


def refuse_parameter_hooks(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise UnsupportedError naming the first gradient hook; only the form without an optimizer can call these."""
    for name, parameter in parameters.items():
        hooks = [*(parameter._backward_hooks or {}).values()]
        hooks += [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]
        for hook in hooks:
            raise UnsupportedError(
                f"parameter {name!r} has a gradient hook ({_hook_name(hook)}): with optimizer= the gradient never "
                "leaves the graph. Remove the hook, or compile without optimizer= so that backward() calls it"
            )


def _module_hooks(model: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in model.named_modules():
        for kind, hooks in (
            ("forward", module._forward_hooks),
            ("forward-pre", module._forward_pre_hooks),
            ("backward", module._backward_hooks),
            ("backward-pre", module._backward_pre_hooks),
        ):
            for hook in hooks.values():
                if type(hook).__module__ not in _TRACEABLE_HOOKS:
                    yield path, kind, hook


def _hook_name(hook: Any) -> str:
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
