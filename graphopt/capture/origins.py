"""Where nodes came from: module path and source line, read from what torch leaves in node metadata."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx

from graphopt.ir.origin import Origin
from graphopt.ir.program import Program

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n\s*(?P<code>[^\n]*)')
_GENERATED = ("<eval_with_key>", "<string>")
_COMPILER = ("/graphopt/", "/torch/fx/", "/torch/export/", "/torch/_")
_LIBRARY = ("/torch/",)
_NOT_OWN = ("/torch/", "/graphopt/", "/contextlib.py", "/functools.py")
_CODE_WIDTH = 60
UNKNOWN_LINE = "unknown line"


def read_origins(graph: fx.Graph) -> dict[str, Origin]:
    """Origins by node name. A gradient node takes the origin of the forward node with its autograd sequence number."""
    origins: dict[str, Origin] = {}
    by_sequence: dict[int, Origin] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        origin = _origin_of(node.meta.get("nn_module_stack"), node.meta.get("stack_trace") or "")
        sequence = node.meta.get("seq_nr", -1)
        forward = by_sequence.get(sequence)
        if origin == Origin() and forward is not None:
            origin = Origin(forward.module, forward.source, forward.code, is_gradient=True)
        elif origin != Origin():
            by_sequence[sequence] = origin
        origins[node.name] = origin
    return origins


def write_origins(program: Program) -> None:
    """Put origins back where ``preserve_node_meta`` looks for them, so that a retrace keeps them."""
    for node in program.ops():
        origin = program.origin(node)
        node.meta["nn_module_stack"] = {origin.module: (f"model.{origin.module}", "")} if origin.module else {}
        node.meta["stack_trace"] = _as_stack(origin)


def user_frame(stack_trace: str) -> tuple[str, str]:
    """``(file:line, code)`` of the innermost frame that is the user's own, else of torch's modules; empty if none."""
    frames = [
        match
        for match in _FRAME.finditer(stack_trace)
        if not match["file"].startswith(_GENERATED) and not any(part in match["file"] for part in _COMPILER)
    ]
    own = [match for match in frames if not any(part in match["file"] for part in _LIBRARY)]
    chosen = (own or frames)[-1:] or None
    if chosen is None:
        return "", ""
    frame = chosen[0]
    return f"{Path(frame['file']).name}:{frame['line']}", frame["code"].strip()[:_CODE_WIDTH]


def innermost_own_line() -> str:
    """``file:line: code`` of the user's frame that is running now, for messages."""
    return own_line(traceback.extract_stack()) or UNKNOWN_LINE


def own_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """``file:line: code`` of the innermost frame that is neither torch's nor ours; empty if there is none."""
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_OWN)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _origin_of(stack: Mapping[str, tuple[str, object]] | None, stack_trace: str) -> Origin:
    source, code = user_frame(stack_trace)
    return Origin(_module_path(stack or {}), source, code)


def _module_path(stack: Mapping[str, tuple[str, object]]) -> str:
    paths = [path for path, _ in stack.values()]
    return paths[-1].removeprefix("model.") if paths and paths[-1] != "model" else ""


def _as_stack(origin: Origin) -> str:
    if not origin.source:
        return ""
    file, _, line = origin.source.rpartition(":")
    return f'File "{file}", line {line}, in forward\n    {origin.code}'
