"""The checker of the IR: structure, and re-inference of every value."""

from __future__ import annotations

from torch import fx

from graphopt.errors import ProgramError
from graphopt.ir import ops
from graphopt.ir.inference import facts
from graphopt.ir.program import Program
from graphopt.ir.spec import ScalarSpec, TensorSpec
from graphopt.ir.text import node_text, value_text

_CONTEXT_LINES = 4


def check_structure(program: Program) -> None:
    """Raise ProgramError unless the graph is well formed and agrees with its signature."""
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise ProgramError(f"the graph is malformed: {error}") from error
    _check_inputs(program)
    _check_outputs(program)
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise node_error(program, node, f"operation kind {node.op!r} is not part of the IR")
        if node.op == "call_function" and not _is_known_target(node):
            raise node_error(program, node, f"{node.target} is neither an operator overload nor scalar arithmetic")
        if node.op != "output" and "val" not in node.meta:
            raise node_error(program, node, "the node has no value; create nodes with Program.insert_before")


def check_functional(program: Program) -> None:
    """Raise ProgramError if an operator writes into its argument."""
    for node in program.ops():
        if _writes(node):
            raise node_error(program, node, "an in-place operator before the last pass; programs are functional")


def is_functional(program: Program) -> bool:
    """Whether no operator writes into its argument."""
    return not any(map(_writes, program.ops()))


def _writes(node: fx.Node) -> bool:
    return ops.is_mutating(node) or ops.writes_running_statistics(node)


def check_inference(program: Program) -> None:
    """Raise ProgramError where an operator, run on fake values, gives another shape, dtype, stride or device.

    A value that its operator gave for the very operands it has now needs no second run.
    """
    for node in program.ops():
        if program.is_inferred(node):
            continue
        recorded = node.meta["val"]
        try:
            inferred = program.infer(node)
        except Exception as error:
            raise node_error(program, node, f"the operator rejects its arguments: {error}") from error
        if facts(recorded) != facts(inferred):
            message = f"recorded as {value_text(recorded)}, but the operator gives {value_text(inferred)}"
            raise node_error(program, node, message)


def node_error(program: Program, node: fx.Node, message: str) -> ProgramError:
    """An error whose text shows the program around ``node`` with the message under its line."""
    lines: list[str] = []
    neighbours = [item for item in program.graph.nodes if item.op in ("call_function", "get_attr")]
    position = neighbours.index(node) if node in neighbours else len(neighbours)
    for item in neighbours[max(0, position - _CONTEXT_LINES) : position + _CONTEXT_LINES + 1]:
        lines.append(f"  {'>' if item is node else ' '} {node_text(program, item)}")
        if item is node:
            lines.append(f"    ^ {message}")
    return ProgramError(f"at {node.name}: {message}\n" + "\n".join(lines))


def _check_inputs(program: Program) -> None:
    placeholders = program.placeholders()
    inputs = program.signature.inputs
    if len(placeholders) != len(inputs):
        raise ProgramError(f"the signature has {len(inputs)} inputs, the graph {len(placeholders)} placeholders")
    for node, entry in zip(placeholders, inputs, strict=True):
        if isinstance(entry.spec, TensorSpec) and program.spec(node) != entry.spec:
            raise ProgramError(f"input {entry.name!r} should be {entry.spec}, but {node.name} is {program.spec(node)}")


def _check_outputs(program: Program) -> None:
    returned = program.output_node().args[0]
    outputs = program.signature.outputs
    if not isinstance(returned, (tuple, list)) or len(returned) != len(outputs):
        raise ProgramError(f"the signature has {len(outputs)} outputs, the graph returns {returned}")
    for value, output in zip(returned, outputs, strict=True):
        if not isinstance(value, fx.Node):
            raise ProgramError(f"output {output.name!r} is {value!r}, not a node")
        if isinstance(output.spec, ScalarSpec):
            continue
        spec = program.spec(value)
        if (spec.shape, spec.dtype, spec.device) != (output.spec.shape, output.spec.dtype, output.spec.device):
            raise ProgramError(f"output {output.name!r} should be {output.spec}, but {value.name} is {spec}")


def _is_known_target(node: fx.Node) -> bool:
    return ops.is_getitem(node) or ops.is_scalar_op(node) or ops.overload(node) is not None
