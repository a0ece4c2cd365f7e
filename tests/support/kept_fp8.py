"""Programs with FP8 codes before and after keep-quantized, for its tests: small layers, and what is kept of them."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.ir.kept_values import forward_values
from graphopt.ir.liveness import saved_for_backward
from graphopt.ir.numeric import random_inputs
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.passes.keep_quantized import KeepQuantized
from graphopt.pipeline.pipeline import Pipeline
from tests.support.fp8 import joint_program, tagged
from tests.support.graphs import run_pass

TOKENS, WIDTH, WIDE = 32, 64, 128
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Inside(nn.Module):
    """A layer, what is tested, and a head, so that the test is about neither an input nor the loss."""

    def __init__(self, inner: nn.Module, width: int = WIDTH):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, width), inner, nn.Linear(WIDTH, 16)

    def forward(self, x):
        return {"loss": self.head(self.inner(self.first(x))).float().square().mean()}


class Gated(nn.Module):
    def __init__(self, function=F.silu):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).view(2, 16, 4, 16).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(TOKENS, WIDTH))


class Rectified(nn.Module):
    def __init__(self, function=F.relu):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


class Sum(nn.Module):
    """The input of a layer that a SiLU reads too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x)
        return self.down(y) + F.silu(y)


class Plain(nn.Module):
    """Layers with nothing between them: all that the backward part reads are operands of products."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layers(x)


def recipe(saved="all", name="tensorwise", **options):
    return {"tensorwise": graphopt.fp8.Tensorwise, "rowwise": graphopt.fp8.Rowwise}[name](saved=saved, **options)


@functools.cache
def captured(kind, *options):
    torch.manual_seed(0)
    inner = kind(*options)
    return joint_program(Inside(inner, getattr(inner, "width", WIDTH)), {"x": torch.randn(TOKENS, WIDTH)})


def joint(kind, *options, chosen=None, layouts="one", **tags):
    """The program before the pass: products in FP8, tagged with ``tags``, between them what ``kind`` makes."""
    before = tagged(captured(kind, *options), **tags)
    return Pipeline((InsertQuantize(chosen or recipe(), layouts), DropDead())).run(before)


def kept(before, chosen=None):
    after, record = run_pass(KeepQuantized(chosen or recipe()), before, inputs=inputs_of(before))
    return Pipeline((DropDead(),)).run(after), record


def row(program, end):
    """The row about the value made in the module whose path ends so."""
    found = [each for each in program.decisions.rows if each.source.split(" | ")[0].endswith(end)]
    assert len(found) == 1, [each.source for each in program.decisions.rows]
    return found[0]


def kept_in_two_bytes(program):
    """Modules of the large values that wait in two bytes or more."""
    names = []
    for node in saved_for_backward(program):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype not in FP8 and value.nbytes >= 4096:
            names.append(program.origin(node).module)
    return names


def inputs_of(program):
    """Random numbers; weights as large as layers are initialised."""
    inputs = zip(random_inputs(program), program.signature.inputs, strict=True)
    return tuple(value / math.sqrt(WIDTH) if entry.kind == "param" else value for value, entry in inputs)


def activations(program):
    """What the forward part leaves that depends on the batch, scales left out."""
    varying = {
        node
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind == "batch"
    }
    for node in program.ops():
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return [v for v in forward_values(program) if v.uses and v.base in varying and v.nbytes >= TOKENS * WIDTH]


def gradients(program, inputs=None):
    return program.run(inputs or inputs_of(program))
