"""What export would silently drop while it runs the user's forward, refused where it happens.

``torch.autograd.Function``: export traces through its forward and forgets its backward. Tensor hooks registered inside
forward: the graph has no place for them.

Patches, during an export alone, ``torch.autograd.Function.apply`` and two hook methods of ``torch.Tensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphopt.capture.origins import innermost_own_line
from graphopt.errors import CaptureError

_HOOK_METHODS = ("register_hook", "register_post_accumulate_grad_hook")


@contextmanager
def refuse_what_export_drops() -> Iterator[None]:
    """Inside, custom autograd functions and tensor hooks raise CaptureError with the user's line."""
    function_apply = torch.autograd.Function.__dict__["apply"]
    hook_methods = {name: torch.Tensor.__dict__[name] for name in _HOOK_METHODS}
    torch.autograd.Function.apply = _refusing_apply(function_apply)  # type: ignore[method-assign]
    for name, method in hook_methods.items():
        setattr(torch.Tensor, name, _refusing_hook(name, method))
    try:
        yield
    finally:
        torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]
        for name, method in hook_methods.items():
            setattr(torch.Tensor, name, method)


def _refusing_apply(original: Any) -> Any:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch.utils.checkpoint":
            raise CaptureError(
                f"reentrant checkpointing at\n  {innermost_own_line()}\ncannot be captured: it runs a backward of its "
                "own; what to do: pass use_reentrant=False, or drop the checkpoint (graphopt decides what to recompute)"
            )
        if cls.__module__.split(".")[0] != "torch":
            raise CaptureError(
                f"the custom autograd function {cls.__name__!r} called at\n  {innermost_own_line()}\ncannot be "
                "captured: its backward would be lost (wrong gradients); what to do: write it with ordinary "
                "operators (x + (f(x) - x).detach() for a straight-through gradient), or keep that part outside"
            )
        return original.__get__(None, cls)(*args, **kwargs)

    return classmethod(apply)


def _refusing_hook(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def register(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] in ("torch", "graphopt"):
            return original(tensor, *args, **kwargs)
        raise CaptureError(
            f"forward() calls Tensor.{name} at\n  {innermost_own_line()}\nwhich a graph cannot hold: the hook would "
            "never fire; what to do: compute what the hook does to the gradient with operators, or remove it"
        )

    return register
