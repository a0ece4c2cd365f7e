"""Two sweeps over a program's order, each moving operators to where less memory is held meanwhile.

Forward, an operator that frees more than it makes runs as soon as all it needs is there. Backward, an operator that
makes more than it frees runs right before its first user. Between its old and its new place, that much less is held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from torch import fx

from graphopt.ir import ops
from graphopt.ir.lifetimes import Lifetimes


@dataclass
class _Sweep:
    """An order in the making. ``missing``: how many nodes must still be placed first; ``level``: bytes held there."""

    facts: Lifetimes
    most_bytes: int
    levels: dict[fx.Node, int]  # what was held while each node ran
    missing: dict[fx.Node, int] = field(default_factory=dict)
    placed: set[fx.Node] = field(default_factory=set)
    order: list[fx.Node] = field(default_factory=list)
    level: int = 0

    def may_move(self, node: fx.Node, part: int, held_bytes: int) -> bool:
        """Whether ``node`` could run here, where ``held_bytes`` would be held while it does.

        What operators allocate inside themselves is not known here, so one that may allocate only moves to where less
        is held than where it ran.
        """
        if node in self.placed or node in self.facts.fixed or self.missing[node] or self.facts.part[node] != part:
            return False
        is_known = ops.is_pointwise(node) or ops.is_matmul(node)
        return held_bytes <= (self.most_bytes if is_known else min(self.most_bytes, self.levels[node]))


class _Hoisting(_Sweep):
    """``remaining``: of each storage, how many nodes that touch it are still to come."""

    def run(self) -> list[fx.Node]:
        facts = self.facts
        self.missing = {node: len(before) for node, before in facts.before.items()}
        self.remaining = {number: len(users) for number, users in facts.users.items()}
        for node in facts.order:
            if node not in self.placed:
                self._place_with_followers(node)
        return self.order

    def _place_with_followers(self, node: fx.Node) -> None:
        pending = deque(self._place(node))
        while pending:
            candidate = pending.popleft()
            if self._gains(candidate, self.facts.part[node]):
                pending.extend(self._place(candidate))

    def _gains(self, node: fx.Node, part: int) -> bool:
        made = self.facts.bytes_of(self.facts.made[node])
        freed = self.facts.bytes_of([n for n in self.facts.touched[node] if self.remaining[n] == 1 and self._dies(n)])
        return freed > made and self.may_move(node, part, self.level + made)

    def _dies(self, number: int) -> bool:
        return number not in self.facts.kept

    def _place(self, node: fx.Node) -> list[fx.Node]:
        """Run ``node`` next, light nodes it needs before it; returns whose turn may have come."""
        for argument in node.all_input_nodes:
            if argument in self.facts.light and argument not in self.placed:
                self._place(argument)
        self.placed.add(node)
        self.order.append(node)
        if node in self.facts.light:
            return []
        self.level += self.facts.bytes_of(self.facts.made[node])
        self.levels[node] = self.level
        woken = list(self.facts.after[node])
        for later in woken:
            self.missing[later] -= 1
        for number in self.facts.touched[node]:
            self.remaining[number] -= 1
            if self.remaining[number] == 1:
                woken += [user for user in self.facts.users[number] if user not in self.placed]
            if not self.remaining[number] and self._dies(number):
                self.level -= self.facts.nbytes[number]
        return woken


class _Sinking(_Sweep):
    """From the end: ``order`` is reversed, ``level`` what is held behind it; ``seen``: storages touched later."""

    def run(self) -> list[fx.Node]:
        facts = self.facts
        self.missing = {node: len(after) for node, after in facts.after.items()}
        self.seen: set[int] = set()
        made = {number for numbers in facts.made.values() for number in numbers}
        self.level = sum(facts.nbytes[number] for number in facts.kept & made)
        for node in reversed(facts.order):
            if node not in self.placed:
                self._place_with_leaders(node)
        self.order.reverse()
        return self.order

    def _place_with_leaders(self, node: fx.Node) -> None:
        pending = deque(self._place(node))
        while pending:
            candidate = pending.popleft()
            if self._gains(candidate, self.facts.part[node]):
                pending.extend(self._place(candidate))

    def _freed(self, node: fx.Node) -> int:
        fresh = [n for n in self.facts.touched[node] if n not in self.seen and n not in self.facts.kept]
        return self.facts.bytes_of(fresh)

    def _gains(self, node: fx.Node, part: int) -> bool:
        made = self.facts.bytes_of(self.facts.made[node])
        freed = self._freed(node)
        return made > freed and self.may_move(node, part, self.level + freed)

    def _place(self, node: fx.Node) -> list[fx.Node]:
        """Run ``node`` before all that is placed, light nodes that read it behind it; returns whose turn came."""
        for user in reversed(tuple(node.users)):
            if user in self.facts.light and user not in self.placed:
                self._place(user)
        self.placed.add(node)
        self.order.append(node)
        if node in self.facts.light:
            return []
        self.level += self._freed(node)
        self.levels[node] = self.level
        self.level -= self.facts.bytes_of(self.facts.made[node])
        woken = list(self.facts.before[node])
        for earlier in woken:
            self.missing[earlier] -= 1
        for number in self.facts.touched[node]:
            if number not in self.seen:
                self.seen.add(number)
                woken += [user for user in self.facts.users[number] if user not in self.placed]
        return woken


def improved_order(facts: Lifetimes, *, levels: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The order after both sweeps; ``levels``: bytes held while each node runs now, whose maximum is never passed."""
    most_bytes = max(levels.values(), default=0)
    for sweep in (_Hoisting, _Sinking):
        made = sweep(facts, most_bytes, dict(levels))
        facts = replace(facts, order=tuple(made.run()))
        levels = made.levels
    return facts.order
