"""The peak of a Schedule: what ``plan_memory`` says of the rewritten program after ``reuse-last-use``, in integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphopt.planner.schedule import Choice, Schedule, schedule
from graphopt.planner.step_graph import StepGraph

_FOREVER = 1 << 60


@dataclass(frozen=True)
class Outcome:
    """What a Choice leads to. ``live[k]``: bytes above the resident ones while entry k of the schedule runs;
    ``seconds``: cost of all that runs again; for each storage that entries allocate, ``content``: the graph's storage
    that it is an instance of, ``storage_bytes``, and ``birth`` and ``death``, the entries it lives from and to (a birth
    of -1: it lies in the memory of another)."""

    choice: Choice
    order: Schedule
    live: Sequence[int]
    peak_bytes: int
    peak_at: int
    seconds: float
    content: Sequence[int]
    storage_bytes: Sequence[int]
    birth: Sequence[int]
    death: Sequence[int]


def simulate(graph: StepGraph, choice: Choice) -> Outcome:
    """The Outcome of ``choice``, exact to the byte."""
    order = schedule(graph, choice)
    seconds = sum(
        graph.seconds[i]
        for i, twin in zip(order.node, order.is_twin, strict=True)
        if twin and not choice.brings_back(graph.made[i])
    )
    return _Simulation(graph, choice, order).outcome(seconds)


def undominated(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that no other beats in both peak and seconds, from the smallest peak to the cheapest."""
    best: list[Outcome] = []
    for found in sorted(outcomes, key=lambda found: (found.peak_bytes, found.seconds)):
        if not best or found.seconds < best[-1].seconds:
            best.append(found)
    return best


class _Simulation:
    """Storages are numbered as entries allocate them; resident ones are negative: ``-1 - s``."""

    def __init__(self, graph: StepGraph, choice: Choice, order: Schedule) -> None:
        self.graph = graph
        self.choice = choice
        self.order = order
        self.storage: list[tuple[tuple[int, int], ...]] = []  # per entry: (storage of the program, number)
        self.nbytes: list[int] = []
        self.content: list[int] = []  # the program's storage that a number is an instance of
        self.birth: list[int] = []
        self.original = {i: k for k, i in enumerate(order.node) if not order.is_twin[k]}
        self._number()
        self.last_read = self._last_reads()
        self.joined = list(range(len(self.nbytes)))  # a number whose memory another took over points to it

    def _number(self) -> None:
        graph, order = self.graph, self.order
        for k, (i, arguments) in enumerate(zip(order.node, order.arguments, strict=True)):
            made = graph.made[i]
            held = []
            for s in graph.held[i]:
                if graph.resident[s]:
                    held.append((s, -1 - s))
                elif s in made:
                    held.append((s, len(self.nbytes)))
                    self.nbytes.append(graph.nbytes[s])
                    self.content.append(s)
                    self.birth.append(k)
                else:
                    held.append((s, next(n for a in arguments for t, n in self.storage[a] if t == s)))
            self.storage.append(tuple(held))

    def _last_reads(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for k, arguments in enumerate(self.order.arguments):
            for a in arguments:
                held = self.storage[a]
                # A tuple is unpacked as soon as it is made: who picks one element does not hold the others.
                for n in (
                    {n for _, n in held} & {n for _, n in self.storage[k]} if len(held) > 1 else (n for _, n in held)
                ):
                    last[n] = k
        return last

    def outcome(self, seconds: float) -> Outcome:
        graph, order = self.graph, self.order
        kept = self._kept()
        self._reuse(kept)
        death = self._deaths()
        changes = [0] * (len(order.node) + 1)
        born = [-1] * len(self.nbytes)
        for n, start in enumerate(self.birth):
            root = self.joined[n]
            if root == n:
                born[n] = start
                changes[start] += self.nbytes[n]
                if death[n] < len(order.node):
                    changes[death[n] + 1] -= self.nbytes[n]
        for s, last in self._copies().items():
            changes[0] += graph.nbytes[s]
            changes[last + 1] -= graph.nbytes[s]
        live, level, peak, peak_at = [0] * len(order.node), 0, 0, 0
        for k, i in enumerate(order.node):
            level += changes[k]
            live[k] = level + graph.workspace[i]
            if live[k] > peak:
                peak, peak_at = live[k], k
        return Outcome(self.choice, order, live, peak, peak_at, seconds, self.content, self.nbytes, born, death)

    def _copies(self) -> dict[int, int]:
        """Guarded storages that something reads again, of which a copy is made first, and the entry it is held until.

        Never too few bytes: a pointwise call may write into the copy when that dies, which is not counted.
        """
        if not self.graph.guarded:
            return {}
        again = {
            n
            for arguments, twin in zip(self.order.arguments, self.order.is_twin, strict=True)
            if twin
            for a in arguments
            for _, n in self.storage[a]
        }
        return {s: self.last_read[-1 - s] for s in sorted(self.graph.guarded) if -1 - s in again}

    def _kept(self) -> set[int]:
        """Numbers that nothing may write into: they leave the program or belong to the caller."""
        kept = {
            n
            for k, i in enumerate(self.order.node)
            if i in self.graph.returned and not self.order.is_twin[k]
            for _, n in self.storage[k]
        }
        for value, _ in self.graph.writes:
            kept.update(n for _, n in self.storage[self.original[value]])
        kept.update(
            -1 - s for s, resident in enumerate(self.graph.resident) if resident and s not in self.graph.overwritten
        )
        return kept

    def _reuse(self, kept: set[int]) -> None:
        """As ``reuse-last-use``: a pointwise call writes into its first argument that dies with it."""
        reusable, last = self.graph.reusable, self.last_read
        members: dict[int, list[int]] = {}
        for k, i in enumerate(self.order.node):
            if self.graph.updated[i]:
                self._write_results(k, self.graph.updated[i], kept, members)
            if not reusable[i] or not self.order.arguments[k]:  # what comes back from host memory reads nothing
                continue
            own = self.storage[k][0][1]
            for operand in reusable[i]:
                entry = next(a for a in self.order.arguments[k] if self.order.node[a] == operand)
                number = self._root(self.storage[entry][0][1])
                if number in kept or last.get(number) != k or number == own:
                    continue
                self._join(own, number, k, kept, members)
                break

    def _write_results(
        self, k: int, updated: tuple[tuple[int, int], ...], kept: set[int], members: dict[int, list[int]]
    ) -> None:
        """Entry ``k`` writes all its results into the arguments that they update, or none."""
        own, last = dict(self.storage[k]), self.last_read
        targets: dict[int, int] = {}  # number of the result to the number whose memory takes it
        for s, operand in updated:
            entry = next((a for a in self.order.arguments[k] if self.order.node[a] == operand), None)
            if entry is None:
                return
            number = self._root(self.storage[entry][0][1])
            if number in kept or last.get(number) != k:
                return
            targets[own[s]] = number
        if len(set(targets.values())) < len(updated):
            return
        for result, number in targets.items():
            self._join(result, number, k, kept, members)

    def _join(self, result: int, number: int, k: int, kept: set[int], members: dict[int, list[int]]) -> None:
        """What entry ``k`` makes, ``result`` and all that joined it before, lives in the memory of ``number``."""
        moved = [result, *members.pop(result, [])]
        members.setdefault(number, []).extend(moved)
        for n in moved:
            self.joined[n] = number
        self.last_read[number] = max(self.last_read.get(result, -1), k)
        if result in kept:
            kept.add(number)

    def _root(self, number: int) -> int:
        return self.joined[number] if number >= 0 else number

    def _deaths(self) -> list[int]:
        """The last entry during which each number's memory is held."""
        order, graph = self.order, self.graph
        death = [-1] * len(self.nbytes)

        def hold(n: int, until: int) -> None:
            root = self._root(n)
            if root >= 0 and death[root] < until:
                death[root] = until

        for k, held in enumerate(self.storage):
            is_returned = order.node[k] in graph.returned and not order.is_twin[k]
            for _, n in held:
                hold(n, _FOREVER if is_returned else k)
        for n, k in self.last_read.items():
            hold(n, k)
        for value, target in graph.writes:
            entry = self.original[value]
            written = max(entry, *(self.last_read.get(-1 - s, -1) for s in graph.held[target]))
            for _, n in self.storage[entry]:
                hold(n, written)
        return death
