"""Adding inputs, operators and outputs at the end of a Program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from graphopt.capture.trace import fake_like
from graphopt.ir.origin import Origin
from graphopt.ir.program import Program, scalar_input
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, TensorSpec


class Appender:
    """Appends inputs, operators and outputs at the end of a Program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.origin = Origin()
        self.anchor: fx.Node | None = None  # where operators go; None: at the end

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.program.insert_before(self.anchor or self.program.output_node(), target, *args, **kwargs)
        self.program.origins[node.name] = self.origin
        return node

    def add_tensor(self, name: str, kind: InputKind, spec: TensorSpec, *, is_far: bool = False) -> fx.Node:
        identifier = f"{ {InputKind.PARAM: 'p', InputKind.STATE: 's'}[kind] }_{name.replace('.', '_')}"
        fake = fake_like(self.program.fake_mode, spec)
        return self.program.add_input(Input(name, kind, spec, is_far), fake, name=identifier)

    def add_number(self, name: str) -> fx.Node:
        identifier = name.replace(".", "_")
        # 0.5 keeps every rule finite while values are inferred: no division by zero, no negative root.
        return self.program.add_input(scalar_input(name, InputKind.SCALAR), 0.5, name=identifier)

    def add_output(self, value: fx.Node, kind: OutputKind, name: str) -> None:
        program = self.program
        output = Output(name, kind, program.spec(value))
        program.set_outputs([*program.output_values(), value], [*program.signature.outputs, output])

    def replace_output(self, value: fx.Node, replacement: fx.Node) -> None:
        program = self.program
        values = [replacement if item is value else item for item in program.output_values()]
        program.set_outputs(values, program.signature.outputs)
