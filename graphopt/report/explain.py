"""Everything known about one name of a compiled step: a module, a parameter or another input, an output, a value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from graphopt.errors import DataError
from graphopt.execute.executable import Executable
from graphopt.execute.segments import split_segments
from graphopt.execute.state_rows import StateRow
from graphopt.ir.liveness import saved_for_backward
from graphopt.ir.spec import Input, InputKind
from graphopt.ir.storage import storage_map
from graphopt.ir.text import call_text, value_text
from graphopt.ir.twins import is_twin, original_name
from graphopt.ir.units import format_bytes
from graphopt.pipeline.pass_base import Refusal
from graphopt.report.build import segment_name
from graphopt.report.classify import Classifier
from graphopt.report.decisions import decision_lines
from graphopt.report.fp8 import module_lines, parameter_lines, value_lines
from graphopt.report.gradients import parameter_gradients
from graphopt.report.precision import precision_lines
from graphopt.report.state import state_lines

_NUM_VALUES = 8
_NUM_MATCHES = 5


def explain(executable: Executable, name: str, state: Sequence[StateRow] = ()) -> str:
    """What ``name`` is, where it comes from, when it is alive, what it costs, and what passes declined about it.

    ``name``: a module path, an input (parameter, buffer, batch entry, state), an output, or a value of the dump.
    ``state``: how the state of each parameter is kept.
    Raises DataError with the closest names when there is none.
    """
    explainer = _Explainer(executable, state)
    sections = [section for section in explainer.sections(name) if section]
    if not sections:
        raise DataError(_unknown(name, explainer.names()))
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


class _Explainer:
    def __init__(self, executable: Executable, state: Sequence[StateRow]) -> None:
        self.state = state
        self.program = executable.program
        self.plan = executable.plan
        self.storages = storage_map(self.program)
        self.classifier = Classifier(self.program, self.plan, self.storages)
        self.lifetimes = self.classifier.lifetimes
        self.position = {node: position for position, node in enumerate(self.plan.order)}
        self.segments = split_segments(self.program)
        self.nodes = {node.name: node for node in self.program.graph.nodes if node.op != "output"}
        saved = saved_for_backward(self.program)
        self.saved = {number for node in saved for number in self.storages.held[node]} - self.storages.resident

    def names(self) -> list[str]:
        """Every name that can be asked for."""
        signature = self.program.signature
        names = [*(entry.name for entry in signature.inputs), *(output.name for output in signature.outputs)]
        leaves = sorted({self.program.origin(node).module for node in self.program.ops()} - {"", *names})
        modules = [path for leaf in leaves for path in _path_and_parents(leaf)]
        return [*dict.fromkeys([*modules, *names, *self.nodes])]

    def sections(self, name: str) -> Iterator[list[str]]:
        """The lines about each thing that is called ``name``."""
        for node, entry in zip(self.program.placeholders(), self.program.signature.inputs, strict=True):
            if entry.name == name:
                yield self._input(node, entry)
        outputs = zip(self.program.output_values(), self.program.signature.outputs, strict=True)
        for value, output in outputs:
            if output.name == name and self.program.signature.input_index(name, *InputKind) is None:
                yield [f"output {name} ({output.kind}): {output.spec}", *self._returned(value)]
        if name in self.nodes and self.nodes[name].op != "placeholder":
            yield [f"value {name}: {value_text(self.nodes[name].meta['val'])}", *self._value(self.nodes[name])]
        if self.program.signature.input_index(name, *InputKind) is None:
            yield self._module(name)

    def _input(self, node: fx.Node, entry: Input) -> list[str]:
        lines = [
            f"{entry.kind} {entry.name}: {entry.spec}",
            f"  bytes: {self._bytes(node)}, held by the caller for the whole step",
            f"  read by: {_listed([user.name for user in node.users if user.op != 'output'])}",
        ]
        if entry.kind is InputKind.PARAM:
            lines += [*self._training(entry.name), *state_lines(self.state, entry.name)]
        lines += precision_lines(self.program.precision.reading(entry.name))
        lines += parameter_lines(self.program.fp8, entry.name)
        return [*lines, *self._refusals({node.name})]

    def _training(self, parameter: str) -> list[str]:
        """The gradient and the state of a parameter."""
        gradients = parameter_gradients(self.program).get(parameter, ())
        lines = [] if gradients else ["  gradient: none in this program (frozen, unused, or inference)"]
        for gradient in gradients:
            lines.append(f"  gradient: {gradient.name}: {value_text(gradient.meta['val'])}, {self._alive(gradient)}")
        for _, entry in self.program.signature.inputs_of(InputKind.STATE):
            if entry.name.endswith(f".{parameter}"):
                lines.append(f"  state: {entry.name}: {entry.spec}, {_size(entry.spec.nbytes)}")
        return lines

    def _returned(self, value: object) -> list[str]:
        if not isinstance(value, fx.Node):
            return []
        if value.op == "placeholder":
            return [f"  is the input {value.name} itself"]
        return [f"  is the value {value.name}: {value_text(value.meta['val'])}", *self._value(value)]

    def _value(self, node: fx.Node) -> list[str]:
        origin = str(self.program.origin(node))
        lines = [f"  from: {origin}" if origin else "  from: no source line (added by graphopt)"]
        lines += [f"  made by: {call_text(self.program, node)}", f"  alive: {self._alive(node)}"]
        made = self.position.get(node, 0)
        kinds = dict.fromkeys(self.classifier.memory_class(number, made).label for number in self.storages.held[node])
        lines.append(f"  bytes: {self._bytes(node)}{self._sharing(node)}")
        lines.append(f"  class: {_listed(list(kinds))}")
        is_forward = segment_name(self.segments, made) == "forward"
        saved = is_forward and not self.saved.isdisjoint(self.storages.held[node])
        lines.append(f"  saved for backward: {'yes' if saved else 'no'}")
        lines += precision_lines(self.program.precision.at(node.name, self.program.origin(node)))
        lines += value_lines(self.program.fp8, node.name)
        return [*lines, *self._decisions(node), *self._refusals({node.name})]

    def _module(self, path: str) -> list[str]:
        inputs = list(zip(self.program.placeholders(), self.program.signature.inputs, strict=True))
        entries = [
            (node, entry)
            for node, entry in inputs
            if entry.kind in (InputKind.PARAM, InputKind.BUFFER) and entry.name.startswith(f"{path}.")
        ]
        within = [node for node in self.program.ops() if _is_within(self.program.origin(node).module, path)]
        # The origin of an update is its parameter.
        parameters = {entry.name for _, entry in inputs}
        values = [node for node in within if self.program.origin(node).module not in parameters]
        if not path or not (values or entries):
            return []
        num_gradient = sum(self.program.origin(node).is_gradient for node in values)
        saved = {number for node in values for number in self.storages.held[node]} & self.saved
        lines = [
            f"module {path}: {len(values) - num_gradient} operators, {num_gradient} of its gradient, "
            f"{len(within) - len(values)} of its update"
        ]
        lines += [f"  {entry.kind} {entry.name}: {entry.spec}, {self._bytes(node)}" for node, entry in entries]
        lines.append(f"  saved for backward: {_size(sum(self.storages.nbytes[number] for number in saved))}")
        allocating = self._one_a_storage(values)
        lines += [f"  value {node.name}: {self._summary(node)}" for node in allocating[:_NUM_VALUES]]
        if len(allocating) > _NUM_VALUES:
            lines.append(f"  and {len(allocating) - _NUM_VALUES} smaller values")
        lines += precision_lines(self.program.precision.within(path))
        lines += module_lines(self.program.fp8, path)
        decided = decision_lines(self.program.decisions, {node.name for node in values if not is_twin(node)})
        return [*lines, *decided[:_NUM_VALUES], *self._refusals({node.name for node in values})]

    def _one_a_storage(self, values: list[fx.Node]) -> list[fx.Node]:
        """What ``values`` leave in each storage, largest first; where a gradient wrote over it, what was before."""
        last: dict[int, int] = {}
        for node in sorted(values, key=lambda node: not self.program.origin(node).is_gradient):
            for number in self.storages.held[node]:
                if number in self.lifetimes:
                    last[number] = self.position[node]
        contents = dict.fromkeys(self.classifier.content(number, position) for number, position in last.items())
        return sorted(contents, key=lambda node: -self._storage_bytes(node))

    def _summary(self, node: fx.Node) -> str:
        origin = self.program.origin(node)
        where = f", {origin.source}" if origin.source else ""
        return f"{value_text(node.meta['val'])}, {self._bytes(node)}, {self._alive(node)}{where}"

    def _storage_bytes(self, node: fx.Node) -> int:
        return sum(self.storages.nbytes[number] for number in self.storages.held[node])

    def _bytes(self, node: fx.Node) -> str:
        return _size(self._storage_bytes(node))

    def _sharing(self, node: fx.Node) -> str:
        held = set(self.storages.held[node])
        others = [
            name for name, other in self.nodes.items() if other is not node and held & set(self.storages.held[other])
        ]
        return f", memory shared with {_listed(others)}" if others else ""

    def _alive(self, node: fx.Node) -> str:
        numbers = [number for number in self.storages.held[node] if number in self.lifetimes]
        if not numbers:
            return "as long as the input whose memory it is" if self._holds_tensor(node) else "no memory: a number"
        first = min(self.lifetimes[number].first for number in numbers)
        last = max(self.lifetimes[number].last for number in numbers)
        return f"from {self._op(first)} to {self._op(last)}"

    def _holds_tensor(self, node: fx.Node) -> bool:
        return isinstance(node.meta["val"], (torch.Tensor, tuple, list))

    def _op(self, position: int) -> str:
        return f"op {position} ({self.plan.order[position].name}, {segment_name(self.segments, position)})"

    def _decisions(self, node: fx.Node) -> list[str]:
        """What was decided about the value, its memory, or the value it computes again."""
        held = set(self.storages.held[node])
        sharing = {name for name, other in self.nodes.items() if held & set(self.storages.held[other])}
        return decision_lines(self.program.decisions, {node.name, original_name(node), *sharing})

    def _is_told(self, refusal: Refusal) -> bool:
        """Whether a row of a table says the same."""
        decided = any((row.value, row.reason) == (refusal.node, refusal.reason) for row in self.program.decisions.rows)
        return decided or self.program.fp8.tells(refusal.node, refusal.reason)

    def _refusals(self, names: set[str]) -> list[str]:
        return [
            f"  {record.name} declined at {refusal.node}: {refusal.reason}"
            for record in self.program.history
            for refusal in record.refusals
            if refusal.node in names and not self._is_told(refusal)
        ]


def _path_and_parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _is_within(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _size(nbytes: int) -> str:
    exact = f" ({nbytes:,} B)" if nbytes >= 1024 else ""
    return format_bytes(nbytes) + exact


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(names[:_NUM_VALUES])
    return shown if len(names) <= _NUM_VALUES else f"{shown} and {len(names) - _NUM_VALUES} more"


def _unknown(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=_NUM_MATCHES, cutoff=0.5)
    close += [other for other in names if name and name in other and other not in close][: _NUM_MATCHES - len(close)]
    offered = (
        f"the closest are {', '.join(close)}" if close else f"there are, for example, {', '.join(names[:_NUM_MATCHES])}"
    )
    return f"expected a module path, an input, an output or a value of this step, came {name!r}; {offered}"
