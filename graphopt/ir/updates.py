"""Which operators update which parameter, found from the graph and the signature alone.

An operator belongs to the update of one parameter if all it leads to is the new value of that parameter or of its
state (``exp_avg.<parameter>``), and if a number or a state of the update goes into it: an input of kind SCALAR or
STATE that the forward part does not read. What it reads of the backward part is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.ir import ops
from graphopt.ir.fp8_watch import FP8_EVIDENCE
from graphopt.ir.liveness import backward_nodes, forward_end
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.spec import InputKind, Output, OutputKind
from graphopt.ir.update_targets import update_targets

_WRITTEN_EARLY = (OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE)
_SEVERAL = ""  # leads to more than one update, or to something else; no parameter is called so


@dataclass(frozen=True)
class UpdateGroup:
    """The update of one parameter and its state.

    ``targets``: the inputs that are written; ``ops``: its operators, in order; ``gradients``: the values of the
    backward part that it reads; ``joint_values``: values computed from several gradients that it reads (the factor of
    clipping by the global norm).
    """

    parameter: str
    targets: tuple[fx.Node, ...]
    ops: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    joint_values: tuple[fx.Node, ...]


def update_groups(program: Program) -> tuple[UpdateGroup, ...]:
    """The updates that read a gradient, in the order of the signature; none for a program without an update."""
    targets = _targets_by_parameter(program)
    if not targets:
        return ()
    facts = _Facts(program)
    members: dict[str, list[fx.Node]] = {name: [] for name in targets}
    for node in program.ops():
        name = facts.leads_to.get(node, _SEVERAL)
        if name in members and facts.is_update(node):
            members[name].append(node)
    groups = []
    for name, written in targets.items():
        read = _read_outside(members[name])
        joint = tuple(node for node in read if node in facts.backward and node in facts.in_update)
        gradients = tuple(node for node in read if node in facts.backward and node not in facts.in_update)
        if gradients or joint:
            groups.append(UpdateGroup(name, tuple(written), tuple(members[name]), gradients, joint))
    return tuple(groups)


class _Facts:
    def __init__(self, program: Program) -> None:
        self.backward = backward_nodes(program)
        self.in_update = _reached_by_the_update(program)
        self.leads_to = leads_to(program)

    def is_update(self, node: fx.Node) -> bool:
        """Whether a number or a state goes into ``node``, or it only converts a gradient on its way there."""
        if node in self.in_update:
            return True
        is_converted = ops.is_conversion(node) and node in self.backward
        return is_converted and all(user in self.in_update for user in node.users)


def parameter_of(program: Program, output: Output) -> str:
    """The parameter whose update ``output`` belongs to; state is called ``<state>.<parameter>``."""
    if output.kind is OutputKind.PARAM_UPDATE:
        return output.name
    name = output.name.partition(".")[2]
    return name if program.signature.input_index(name, InputKind.PARAM) is not None else output.name


def _targets_by_parameter(program: Program) -> dict[str, list[fx.Node]]:
    targets: dict[str, list[fx.Node]] = {}
    for update in update_targets(program):
        if update.output.kind in _WRITTEN_EARLY:
            targets.setdefault(parameter_of(program, update.output), []).append(update.target)
    return targets


def _reached_by_the_update(program: Program) -> set[fx.Node]:
    """Nodes that a number, a state or evidence goes into, all of the update (for membership tests; never iterate)."""
    read_early = {argument for node in program.ops()[: forward_end(program)] for argument in node.all_input_nodes}
    reached = {
        node
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind in (InputKind.STATE, InputKind.SCALAR) and node not in read_early
    }
    # What is found out about all tensors decides about updates, though no number of theirs goes into it.
    values = zip(program.output_values(), program.signature.outputs, strict=True)
    reached |= {value for value, output in values if output.name == FP8_EVIDENCE and output.kind is OutputKind.USER}
    for node in program.ops():
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return reached


def leads_to(program: Program) -> dict[fx.Node, str]:
    """For each call, the one parameter whose update is all that it leads to; the empty string if there is more."""
    leads: dict[fx.Node, str] = {}

    def join(node: fx.Node, name: str) -> None:
        leads[node] = name if leads.get(node, name) == name else _SEVERAL

    for value, output in zip(program.output_values(), program.signature.outputs, strict=True):
        for node in nodes_in((value,)):
            join(node, parameter_of(program, output) if output.kind in _WRITTEN_EARLY else _SEVERAL)
    for node in reversed(program.ops()):
        name = leads.setdefault(node, _SEVERAL)
        for argument in node.all_input_nodes:
            join(argument, name)
    return leads


def _read_outside(members: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """What ``members`` read and do not make, each once, in order of first use."""
    inside = set(members)
    return tuple(dict.fromkeys(a for node in members for a in node.all_input_nodes if a not in inside))
