"""A model as a step sees it at one call: live parameters and buffers by name, and what a compiled graph depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class ModelView:
    """Parameters and buffers by canonical name (a tied tensor once, under its first name).

    ``key`` changes whenever a graph captured before would be wrong: modes of modules, frozen set, shapes, dtypes,
    devices, tying, replaced modules, numbers and tensors kept as plain attributes. ``has_hooks``: whether any module
    has one.
    """

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    key: Hashable
    has_hooks: bool
    modules: tuple[torch.nn.Module, ...]


def view_model(model: torch.nn.Module, loss: str | Callable[..., Any] | None = None) -> ModelView:
    """The ModelView of ``model`` now; ``loss``: a function whose closure the graph depends on as well."""
    parameters: dict[str, torch.nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    facts: list[Hashable] = []
    modules = []
    has_hooks = False
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        modules.append(module)
        facts.append((id(module), module.training, *attribute_facts(vars(module))))
        has_hooks = has_hooks or bool(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        )
        for name, parameter in module._parameters.items():
            if parameter is not None:
                canonical = names.setdefault(id(parameter), prefix + name)
                parameters.setdefault(canonical, parameter)
                facts.append((canonical, parameter.requires_grad, *_facts(parameter)))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                canonical = names.setdefault(id(buffer), prefix + name)
                buffers.setdefault(canonical, buffer)
                facts.append((canonical, *_facts(buffer)))
    facts.extend(closure_facts(loss))
    return ModelView(parameters, buffers, tuple(facts), has_hooks, tuple(modules))


def embedding_parameters(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[str, ...]:
    """Names among ``parameters`` of the weights of embedding modules: what can be known before a graph is captured."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = [module.weight for module in model.modules() if isinstance(module, kinds)]
    return tuple(names[id(table)] for table in tables if id(table) in names)


def parameter_aliases(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, str]:
    """From the other names of tied parameters to the names that ``parameters`` has them under."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every if names.get(id(parameter), name) != name}


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every module of ``model`` is in eval mode; behind it, each is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def attribute_facts(attributes: Mapping[str, Any]) -> Iterator[Hashable]:
    """What a trace bakes in from plain attributes: numbers, strings, flags, and which tensor with which content.

    A function's closure counts too: a loss that reads a coefficient from around it.
    """
    for name, value in attributes.items():
        if name.startswith("_"):
            continue
        if isinstance(value, _PLAIN):
            yield (name, type(value), value)
        elif isinstance(value, torch.Tensor):
            yield (name, id(value), value._version)
        elif isinstance(value, FunctionType):
            yield from closure_facts(value)


def closure_facts(function: Any) -> Iterator[Hashable]:
    """``attribute_facts`` of the variables that ``function`` closes over."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
        if isinstance(value, (*_PLAIN, torch.Tensor)):
            yield from attribute_facts({name: value})


def _facts(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
