"""What moving one operator would gain: which storages it makes, which it is the last to touch, what it must not pass.

Seen as the program that ``reuse-last-use`` will leave: an operator that will write into its operand makes nothing, and
whoever reads the old content must come before it. Views, elements of tuples, constants and numbers hold no memory of
their own; they are "light", and go wherever an operator that reads them goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import forward_end
from graphopt.ir.ordering import body
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.reuse import PlannedReuse
from graphopt.ir.spec import UPDATE_KINDS, OutputKind
from graphopt.ir.storage import StorageMap

_WRITTEN_LATE = (OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE)


@dataclass(frozen=True)
class Lifetimes:
    """Facts about the nodes of a program that no reordering changes.

    ``order``: constants and calls as they run now; ``light``: those that hold no memory of their own. Of every other
    node: ``made``, the storages it allocates; ``touched``, those it makes or reads, the caller's left out;
    ``before``/``after``, the nodes that must run before and after it. ``users``: of each storage, who touches it.
    ``kept``: storages that are never freed. ``fixed``: nodes that keep their order among each other. ``part``: 0 in the
    forward part, 1 behind it; no node leaves its part.
    """

    order: tuple[fx.Node, ...]
    light: frozenset[fx.Node]
    made: dict[fx.Node, tuple[int, ...]]
    touched: dict[fx.Node, tuple[int, ...]]
    before: dict[fx.Node, tuple[fx.Node, ...]]
    after: dict[fx.Node, tuple[fx.Node, ...]]
    users: dict[int, tuple[fx.Node, ...]]
    nbytes: tuple[int, ...]
    kept: frozenset[int]
    fixed: frozenset[fx.Node]
    part: dict[fx.Node, int]

    def bytes_of(self, numbers: tuple[int, ...] | list[int]) -> int:
        """Bytes of the storages ``numbers``."""
        return sum(self.nbytes[number] for number in numbers)


def lifetimes_of(program: Program, reuse: PlannedReuse) -> Lifetimes:
    """The Lifetimes of ``program``, given what will be written in place."""
    order, storages = body(program), reuse.storages
    light = frozenset(node for node in order if _is_light(node, reuse))
    made: dict[fx.Node, tuple[int, ...]] = {}
    touched: dict[fx.Node, tuple[int, ...]] = {}
    users: dict[int, list[fx.Node]] = {}
    known = set(storages.resident)
    for node in order:
        if node in light:
            continue
        own = dict.fromkeys(storages.held[node])
        made[node] = tuple(number for number in own if number not in known)
        known.update(own)
        read = dict.fromkeys(number for argument in node.all_input_nodes for number in storages.held[argument])
        touched[node] = tuple(number for number in {**own, **read} if number not in storages.resident)
        for number in touched[node]:
            users.setdefault(number, []).append(node)
    before = _must_run_before(order, light, reuse)
    after: dict[fx.Node, list[fx.Node]] = {node: [] for node in made}
    for node, earlier in before.items():
        for other in earlier:
            after[other].append(node)
    calls = program.ops()
    split = forward_end(program)
    early = set(calls[:split])
    return Lifetimes(
        order=order,
        light=light,
        made=made,
        touched=touched,
        before=before,
        after={node: tuple(later) for node, later in after.items()},
        users={number: tuple(nodes) for number, nodes in users.items()},
        nbytes=storages.nbytes,
        kept=frozenset(number for node in _kept_nodes(program) for number in storages.held[node]),
        fixed=_fixed(program, reuse, calls[split : split + 1]),
        part={node: int(node not in early) for node in order},
    )


def _is_light(node: fx.Node, reuse: PlannedReuse) -> bool:
    if node.op == "get_attr" or ops.is_scalar_op(node) or ops.is_getitem(node):
        return True
    if node in reuse.operand or ops.has_effect(node) or ops.is_random(node):
        return False
    held = set(reuse.storages.held[node])
    read = {number for argument in node.all_input_nodes for number in reuse.storages.held[argument]}
    return bool(held) and held <= read


def _must_run_before(
    order: tuple[fx.Node, ...], light: frozenset[fx.Node], reuse: PlannedReuse
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node that is not light, those it depends on through light ones, and who reads what it will overwrite."""
    behind: dict[fx.Node, tuple[fx.Node, ...]] = {}  # of a light node, what it stands on
    readers: dict[int, list[fx.Node]] = {}
    before: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in order:
        found: dict[fx.Node, None] = {}
        for argument in node.all_input_nodes:
            if argument in light:
                found.update(dict.fromkeys(behind[argument]))
            elif argument.op != "placeholder":
                found[argument] = None
        if node in light:
            behind[node] = tuple(found)
            continue
        if node in reuse.operand:
            for number in reuse.storages.held[node]:
                found.update(dict.fromkeys(readers.pop(number, ())))
        for number in {number for argument in node.all_input_nodes for number in reuse.storages.held[argument]}:
            readers.setdefault(number, []).append(node)
        before[node] = tuple(found)
    return before


def _kept_nodes(program: Program) -> tuple[fx.Node, ...]:
    """What leaves the program, or is written when all has succeeded."""
    return nodes_in(
        value
        for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
        if output.kind not in UPDATE_KINDS or output.kind in _WRITTEN_LATE
    )


def _fixed(program: Program, reuse: PlannedReuse, first_late: tuple[fx.Node, ...]) -> frozenset[fx.Node]:
    """Effects, draws, outputs, and whatever writes or reads what is written, by an effect or into the caller's memory.

    So a norm that decides whether to update still comes before every update, and the backward part still begins where
    it began.
    """
    storages: StorageMap = reuse.storages
    returned = set(nodes_in(program.output_values()))
    mutated = {
        number for node in program.ops() for target in ops.mutated_arguments(node) for number in storages.held[target]
    }
    return frozenset(
        node
        for node in program.ops()
        if node in returned
        or node in first_late
        or not ops.is_pure(node)
        or (node in reuse.operand and not storages.resident.isdisjoint(storages.held[node]))
        or not mutated.isdisjoint(number for argument in node.all_input_nodes for number in storages.held[argument])
    )
