"""A planned Program as readable Python: one line an operator, ``del`` at the last use, source lines as comments."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence

import torch
from torch import fx

from graphopt.execute.segments import Segment, split_segments
from graphopt.ir import ops
from graphopt.ir.liveness import MemoryPlan, is_unpacked_at_once
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.spec import UPDATE_KINDS
from graphopt.ir.text import call_text, format_argument, one_line, target_text, value_text

_RESERVED = frozenset({"torch", "aten", "graphopt", "constants", "inputs", "carried", "boxed"})
_REGION_NAME = re.compile(r"region_\d+")
_COMMENT_COLUMN = 84

HEADER = '''"""The step that runs, emitted by graphopt: {title}.

Each function takes all inputs (by position, see the comments) and the values carried over from the function before;
it returns (outputs, values to carry on). It runs without gradients on plain tensors.
"""

import torch

aten = torch.ops.aten
graphopt = torch.ops.graphopt
'''


def emit_source(program: Program, plan: MemoryPlan, *, title: str) -> str:
    """Python source with one function a segment; ``constants`` must be in its globals."""
    emitter = _Emitter(program, plan)
    segments = split_segments(program, plan)
    functions = [emitter.function(segment, last=segment is segments[-1]) for segment in segments]
    order = ", ".join(segment.name for segment in segments)
    return HEADER.format(title=title) + "\n\n" + "\n\n\n".join(functions) + f"\n\n\nSEGMENTS = ({order},)\n"


def produced_outputs(
    program: Program, plan: MemoryPlan, segment: Segment, segments: Sequence[Segment]
) -> tuple[int, ...]:
    """Positions of the outputs that ``segment`` returns: those whose value it makes (inputs: the first segment)."""
    made_at = {node: i for i, node in enumerate(plan.order)}
    held = {write.value for write in plan.write_at_end}
    positions = []
    for position, (value, output) in enumerate(zip(program.output_values(), program.signature.outputs, strict=True)):
        if output.kind in UPDATE_KINDS and value not in held:
            continue
        index = made_at.get(value, segments[0].start)
        if segment.start <= index < segment.end or (value not in made_at and segment is segments[0]):
            positions.append(position)
    return tuple(positions)


class _Emitter:
    def __init__(self, program: Program, plan: MemoryPlan) -> None:
        self.program = program
        self.plan = plan
        self.segments = split_segments(program, plan)
        self.position = {node: i for i, node in enumerate(plan.order)}
        self.written_at = {w.value: i for i, writes in enumerate(plan.write_after) for w in writes}
        self.unpacked = {node for node in plan.order if ops.is_getitem(node) and is_unpacked_at_once(node.args[0])}  # type: ignore[arg-type]

    def function(self, segment: Segment, *, last: bool) -> str:
        body = [*self._unpack_inputs(segment), *self._unpack_carried(segment)]
        for index in range(segment.start, segment.end):
            body += self._statement(index)
        body.append(self._return(segment, last=last))
        return "\n".join([f"def {segment.name}(inputs, carried):", *("    " + line for line in body)])

    def _unpack_inputs(self, segment: Segment) -> list[str]:
        used = self._read_in(segment)
        lines = []
        for i, (node, entry) in enumerate(zip(self.program.placeholders(), self.program.signature.inputs, strict=True)):
            if node in used:
                lines.append(_with_comment(f"{_name(node)} = inputs[{i}]", f"{entry.kind} {entry.name}: {entry.spec}"))
        for node in self.program.constants():
            if node in used:
                lines.append(_with_comment(f"{_name(node)} = constants[{node.target!r}]", value_text(node.meta["val"])))
        return lines

    def _read_in(self, segment: Segment) -> set[fx.Node]:
        """Placeholders and constants that the segment reads, writes or returns (for membership tests)."""
        used: set[fx.Node] = set()
        for index in range(segment.start, segment.end):
            used.update(self.plan.order[index].all_input_nodes)
            used.update(write.target for write in self.plan.write_after[index])
        if segment == self.segments[0]:
            used.update(nodes_in(self.program.output_values()))
        return used

    def _unpack_carried(self, segment: Segment) -> list[str]:
        names = [_name(node) for node in self._carried_into(segment.start)]
        if not names:
            return []
        return [f"({', '.join(names)},) = carried", "carried.clear()"]

    def _carried_into(self, start: int) -> list[fx.Node]:
        """Values made before ``start`` and used from there on, in order of definition."""
        if not start:
            return []
        carried = []
        for node in self.plan.order:
            made_by = node.args[0] if node in self.unpacked else node
            if self.position[made_by] >= start or is_unpacked_at_once(node):  # type: ignore[index]
                continue
            used_later = any(self.position.get(user, -1) >= start for user in node.users)
            if used_later or self.written_at.get(node, -1) >= start:
                carried.append(node)
        return carried

    def _statement(self, index: int) -> list[str]:
        node = self.plan.order[index]
        lines = []
        freed = [_name(gone) for gone in self.plan.free_after[index] if gone is not node or not self._is_tuple(node)]
        if node not in self.unpacked:
            target, spare = self._assignment(node)
            comment = " | ".join(
                part for part in (value_text(node.meta.get("val")), str(self.program.origin(node))) if part
            )
            call, freed = self._call_and_frees(node, freed)
            lines += [*call[:-1], _with_comment(f"{target} = {call[-1]}", comment)]
            freed = [*spare, *freed]
        for write in self.plan.write_after[index]:
            lines.append(f"{_name(write.target)}.copy_({_name(write.value)})")
        if freed:
            lines.append(f"del {', '.join(dict.fromkeys(freed))}")
        return lines

    def _is_tuple(self, node: fx.Node) -> bool:
        return is_unpacked_at_once(node)

    def _assignment(self, node: fx.Node) -> tuple[str, list[str]]:
        """The left-hand side, and the names on it that nothing uses."""
        if not self._is_tuple(node):
            return _name(node), []
        getitems: dict[int, list[fx.Node]] = {}
        for user in node.users:
            getitems.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
        names, spare = [], []
        for i in range(len(node.meta["val"])):
            name = _name(getitems[i][0]) if i in getitems else "_"
            names.append(name)
            spare += [] if i in getitems else ["_"]
        return f"({', '.join(names)},)" if names else "_", spare

    def _call_and_frees(self, node: fx.Node, freed: list[str]) -> tuple[list[str], list[str]]:
        """Lines of which the last is the call, and the names to delete behind it.

        What takes its inputs in a list empties it: names whose last use it is are deleted before, so that their memory
        is freed inside.
        """
        if not hasattr(node.target, "boxed"):
            return [self._call(node)], freed
        arguments = [format_argument(argument) for argument in node.args]
        dying = [name for name in freed if name in arguments]
        if not dying:
            return [f"{target_text(node.target)}([{', '.join(arguments)}])"], freed
        before = [f"boxed = [{', '.join(arguments)}]", f"del {', '.join(dict.fromkeys(dying))}"]
        return [*before, f"{target_text(node.target)}(boxed)"], [name for name in freed if name not in dying]

    def _call(self, node: fx.Node) -> str:
        text = call_text(self.program, node)
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "graphopt"):
            return f"torch.ops.{text}"
        return text

    def _return(self, segment: Segment, *, last: bool) -> str:
        positions = produced_outputs(self.program, self.plan, segment, self.segments)
        values = self.program.output_values()
        outputs = "".join(f"{format_argument(values[i])}, " for i in positions)
        carried = "" if last else ", ".join(_name(node) for node in self._carried_into(segment.end))
        return f"return ({outputs.strip()}), [{carried}]"


def _name(node: fx.Node) -> str:
    return node.name


def rename_reserved(program: Program) -> None:
    """Rename nodes whose names would hide what the emitted code itself uses."""
    for node in program.graph.nodes:
        is_taken = node.name in _RESERVED or _REGION_NAME.fullmatch(node.name) is not None
        if is_taken or keyword.iskeyword(node.name) or node.name == "_":
            node._rename(f"{node.name}_value")


def _with_comment(statement: str, comment: str) -> str:
    return f"{statement:<{_COMMENT_COLUMN}}  # {one_line(comment)}" if comment else statement
