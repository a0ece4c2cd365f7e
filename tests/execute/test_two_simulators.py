"""The plan's peak against a second simulator that knows only the emitted text: names assigned, names deleted."""

from __future__ import annotations

import ast

import pytest
import torch

import graphopt
from graphopt.execute.executable import Executable
from graphopt.execute.workspace import MeasuredWorkspace
from tests.support.models import tiny_model
from tests.support.offload import offload_all


def held_storages(value) -> dict[int, int]:
    """Identity and bytes of the storages in a node's fake value."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    storages = [item.untyped_storage() for item in values if isinstance(item, torch.Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def peak_of_text(executable: Executable) -> int:
    """Walk the emitted functions statement by statement, holding what names hold."""
    nodes = {node.name: node for node in executable.program.graph.nodes}
    workspace = MeasuredWorkspace()
    resident = set()
    for node in nodes.values():
        if node.op in ("placeholder", "get_attr"):
            resident |= set(held_storages(node.meta["val"]))
    names: dict[str, dict[int, int]] = {}
    returned: dict[str, dict[int, int]] = {}
    peak = 0

    def level() -> int:
        live: dict[int, int] = {}
        for held in (*names.values(), *returned.values()):
            live.update(held)
        return sum(nbytes for storage, nbytes in live.items() if storage not in resident)

    for function in [item for item in ast.parse(executable.source).body if isinstance(item, ast.FunctionDef)]:
        for statement in function.body:
            if isinstance(statement, ast.Delete):
                for target in statement.targets:
                    names.pop(target.id)
            elif isinstance(statement, ast.Return):
                outputs, carried = statement.value.elts
                returned.update({item.id: names.get(item.id, {}) for item in outputs.elts})
                kept = {item.id for item in carried.elts}
                names = {name: held for name, held in names.items() if name in kept}
            elif isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Call, ast.BinOp, ast.UnaryOp)):
                target = statement.targets[0]
                if isinstance(target, ast.Tuple):
                    # A tuple holds all its elements, the unnamed ones too, until "_" is deleted.
                    producer = next(nodes[item.id].args[0] for item in target.elts if item.id != "_")
                    names["_"] = held_storages(producer.meta["val"])
                    peak = max(peak, level() + workspace(producer))
                    names.update(
                        {item.id: held_storages(nodes[item.id].meta["val"]) for item in target.elts if item.id != "_"}
                    )
                    if all(item.id != "_" for item in target.elts):
                        names.pop("_")
                else:
                    names[target.id] = held_storages(nodes[target.id].meta["val"])
                    peak = max(peak, level() + workspace(nodes[target.id]))
    return peak


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet", "lstm", "transformer-dropout"])
def test_both_simulators_agree_to_the_byte(name, accumulate):
    tiny = tiny_model(name)
    step = graphopt.compile(
        tiny.model, outputs=list(tiny.outputs), optimizer=graphopt.optim.AdamW(), accumulate=accumulate
    )
    step(**tiny.batch)
    assert peak_of_text(step.last_executable) == step.last_executable.plan.peak_bytes


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", ["llama", "lstm", "transformer-dropout"])
def test_they_agree_where_values_are_offloaded(name, prefetch):
    tiny = tiny_model(name)
    step = graphopt.compile(
        tiny.model, outputs=["loss"], optimizer=graphopt.optim.AdamW(), passes=offload_all(prefetch=prefetch)
    )
    step(**tiny.batch)
    assert step.last_executable.offload.statistics.values_in > 3
    assert peak_of_text(step.last_executable) == step.last_executable.plan.peak_bytes
