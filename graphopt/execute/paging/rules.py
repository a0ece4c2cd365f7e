"""The executables that update ranges, by the name of their rule: built once in a process, by whoever builds a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.capture.range_update import RangeRule, rule_named
from graphopt.capture.update import range_update_program
from graphopt.errors import StateError
from graphopt.ir import ops
from graphopt.ir.program import Program

if TYPE_CHECKING:
    # An executable measures what operators allocate, the updates of paged state among them.
    from graphopt.execute.executable import Executable


@dataclass(frozen=True)
class RangeUpdate:
    """A rule with the executable that runs it on one range."""

    rule: RangeRule
    executable: Executable

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs of the executable, in order."""
        return tuple(entry.name for entry in self.executable.program.signature.inputs)


_INSTALLED: dict[str, RangeUpdate] = {}


def install_rules(program: Program, build: Callable[[Program], Executable]) -> None:
    """Build what ``program`` needs to update paged state and what is not there yet; ``build`` runs passes and emits."""
    for name in _rules_of(program):
        if name not in _INSTALLED:
            rule = rule_named(name)
            _INSTALLED[name] = RangeUpdate(rule, build(range_update_program(rule)))


def installed(name: str) -> RangeUpdate:
    """The RangeUpdate of the rule ``name``; StateError where no step has been built with it."""
    if name not in _INSTALLED:
        raise StateError(
            f"the rule {name!r} has not been built in this process: run a program with paged state through the step "
            "that it was compiled for"
        )
    return _INSTALLED[name]


def _rules_of(program: Program) -> Iterator[str]:
    for node in program.ops():
        if ops.is_paged_update(node):
            yield str(ops.argument(node, 5, "rule"))
