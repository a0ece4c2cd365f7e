"""The text of a Program: one line a node, valid Python syntax, with specs and source lines as annotations."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt.ir.fake import is_fake
from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec

_SCALAR_SYMBOLS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.pow: "**",
}
_ANNOTATION_COLUMN = 88


def program_text(program: Program) -> str:
    """The whole program: signature, one line a node with spec, module and source line, and the named outputs."""
    lines = [f"def {program.stage}("]
    for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True):
        lines.append(f"    {node.name}: {str(entry.spec)!r},  # {entry.kind} {one_line(entry.name)}")
    lines.append("):")
    lines.extend("    " + node_text(program, node) for node in program.graph.nodes if _has_line(node))
    lines.append("    return (")
    for value, output in zip(program.output_values(), program.signature.outputs, strict=True):
        lines.append(f"        {format_argument(value)},  # {output.kind} {one_line(output.name)}")
    lines.append("    )")
    return "\n".join(lines) + "\n"


def node_text(program: Program, node: fx.Node) -> str:
    """One line: ``name: 'spec' = call(arguments)  # module | file:line | source``."""
    line = f"{node.name}: {value_text(node.meta.get('val'))!r} = {call_text(program, node)}"
    origin = one_line(str(program.origin(node)))
    return f"{line:<{_ANNOTATION_COLUMN}}  # {origin}" if origin else line


def call_text(program: Program, node: fx.Node) -> str:
    """The right-hand side of a node's line."""
    if node.op == "get_attr":
        return f"constant.{node.target}{_small_constant(program.constant(node))}"
    arguments = [format_argument(argument) for argument in node.args]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if node.target is operator.neg:
        return f"-{arguments[0]}"
    if node.target in _SCALAR_SYMBOLS:
        return f"{arguments[0]} {_SCALAR_SYMBOLS[node.target]} {arguments[1]}"  # type: ignore[index]
    arguments += [_keyword_argument(name, value) for name, value in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def target_text(target: Callable[..., Any] | str) -> str:
    """The dotted name of an operator, such as ``aten.mm.default``."""
    if isinstance(target, torch._ops.OpOverload):
        operator_name = f"{target.namespace}.{target._schema.name.split('::')[1]}"
        if keyword.iskeyword(target._overloadname):  # such as aten.random.from
            return f"getattr({operator_name}, {target._overloadname!r})"
        return f"{operator_name}.{target._overloadname}"
    return getattr(target, "__name__", str(target))


def value_text(value: Any) -> str:
    """The spec of a value as printed: ``bf16[8,1024]``, a tuple of specs, or a type name."""
    if isinstance(value, torch.Tensor):
        spec = TensorSpec.of(value)
        return f"{spec} {_stride_text(spec)}".strip()
    if isinstance(value, (tuple, list)):
        return f"({', '.join(value_text(item) for item in value)})"
    return "none" if value is None else type(value).__name__


def format_argument(value: Any) -> str:
    """An argument as Python source."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(format_argument(item) for item in value)}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    return repr(value)


def one_line(text: str) -> str:
    """``text`` with every control character escaped, so that it stays inside a comment."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _keyword_argument(name: str, value: Any) -> str:
    text = format_argument(value)
    return f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}"


def _has_line(node: fx.Node) -> bool:
    return node.op in ("call_function", "get_attr")


def _stride_text(spec: TensorSpec) -> str:
    contiguous, expected = True, 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=False):
        contiguous = contiguous and (size == 1 or stride == expected)
        expected *= max(size, 1)
    return "" if contiguous else f"strides{list(spec.stride)}"


def _small_constant(tensor: torch.Tensor) -> str:
    """The content of a tiny constant; dumps never grow with weights."""
    if tensor.numel() > 8 or is_fake(tensor):
        return ""
    return f"({tensor.tolist()})"
