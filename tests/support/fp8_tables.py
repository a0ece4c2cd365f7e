"""Small models for tests of FP8 tables, and how to ask for their tables."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from torch import nn

import graphopt
from graphopt.api import optimize
from graphopt.build import training_program
from graphopt.fp8 import Tensorwise
from graphopt.ir.fp8_table import Fp8Row, Fp8Table
from graphopt.planner.fp8_decide import decide_products
from graphopt.precision import Precision

ROLES = ("forward", "input gradient", "weight gradient")


class Layers(nn.Module):
    """Layers of ``sizes`` with an activation between them, and a loss that makes none of them a head."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean()}


class Block(nn.Module):
    """Projections of one input, attention, a norm, a router over experts, and a head with a cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.wo, self.word = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.gate, self.out = nn.LayerNorm(32), nn.Linear(32, 4), nn.Linear(32, 48)

    def forward(self, x, y):
        q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
        x = self.norm(x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]))
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        x = self.word(x) * weights.sum(-1, keepdim=True) + chosen.sum()
        return {"loss": nn.functional.cross_entropy(self.out(x).flatten(0, 1), y.flatten())}


def block_batch():
    return {"x": torch.randn(2, 16, 32), "y": torch.randint(0, 48, (2, 16))}


def joint(model, batch, precision=None):
    return training_program(model, batch, outputs=["loss"], precision=precision or Precision(compute="fp8"))


def table(model, batch, recipe="tensorwise", **options) -> Fp8Table:
    return graphopt.fp8_table(model, batch, recipe, outputs=["loss"], **options)


@cache
def block_program():
    """The joint program of a Block, captured once for all tests that only look at it."""
    return optimize(joint(Block(), block_batch()), "drop-dead,fold-identities,dedupe,drop-dead")


def block_table(recipe=None, target=None) -> Fp8Table:
    return decide_products(block_program(), replace(recipe or Tensorwise(), target=target))


def of_layer(found: Fp8Table, module: str) -> dict[str, Fp8Row]:
    return {row.role: row for row in found.rows if row.module == module}


def eligible(found: Fp8Table) -> set[tuple[str, str]]:
    return {(row.module, row.role) for row in found.eligible}
