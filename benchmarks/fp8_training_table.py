"""Rows of training with FP8 recipes, as a table, and what they must show, as checks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check
from benchmarks.rows import Row

BFLOAT16 = "bf16"
# The final held-out loss over that of bf16, means over the same seeds.
MOST_OF_BFLOAT16 = 1.01
_HEADINGS = ("products in FP8", "steps", "seeds", "final loss", "of bf16", "worst seed", "seed spread", "skipped")


@dataclass(frozen=True)
class Fp8TrainingFigures:
    """One run. ``losses``: on held-out text after each tenth of the steps, the last at the end, in nats per byte.

    ``num_fp8_products`` of ``num_products`` matrix products of the step ran in FP8. ``skipped_updates``: because
    something was not finite.
    """

    recipe: str
    seed: int
    steps: int
    losses: tuple[float, ...]
    num_fp8_products: int
    num_products: int
    skipped_updates: int
    seconds: float

    @property
    def final_loss(self) -> float:
        """After the last step."""
        return self.losses[-1]


TrainingRow = Row[Fp8TrainingFigures]


@dataclass(frozen=True)
class Comparison:
    """The runs of a recipe beside those of bf16 with the same seeds; runs without the other are left out."""

    own: tuple[Fp8TrainingFigures, ...]
    base: tuple[Fp8TrainingFigures, ...]

    @classmethod
    def of(cls, figures: Sequence[Fp8TrainingFigures], recipe: str) -> Comparison:
        """The runs of ``recipe`` and of bf16 among ``figures``, by seed."""
        by_seed = {name: {run.seed: run for run in figures if run.recipe == name} for name in (recipe, BFLOAT16)}
        shared = sorted(by_seed[recipe].keys() & by_seed[BFLOAT16].keys())
        return cls(*(tuple(by_seed[name][seed] for seed in shared) for name in (recipe, BFLOAT16)))

    @property
    def ratio(self) -> float | None:
        """The mean final loss over that of bf16; None without a shared seed."""
        return None if not self.own else _mean_loss(self.own) / _mean_loss(self.base)

    @property
    def worst_ratio(self) -> float | None:
        """The largest ratio of two runs with the same seed."""
        pairs = zip(self.own, self.base, strict=True)
        return max((own.final_loss / base.final_loss for own, base in pairs), default=None)


def training_table(rows: Sequence[TrainingRow], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each recipe, over all seeds."""
    figures = [row.figures for row in rows]
    table = Table("recipe", box=layout)
    headings = (
        "products in FP8",
        "steps",
        "seeds",
        "final loss",
        "of bf16",
        "worst seed",
        "spread of seeds",
        "skipped",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for recipe in dict.fromkeys(run.recipe for run in figures):
        own = [run for run in figures if run.recipe == recipe]
        comparison = Comparison.of(figures, recipe)
        finals = [run.final_loss for run in own]
        table.add_row(
            recipe,
            f"{own[0].num_fp8_products} of {own[0].num_products}" if own[0].num_products else "none",
            str(own[0].steps),
            str(len(own)),
            f"{_mean_loss(own):.4f}",
            _ratio_cell(comparison.ratio),
            _ratio_cell(comparison.worst_ratio),
            f"{max(finals) - min(finals):.4f}",
            str(sum(run.skipped_updates for run in own)),
        )
    return table


def training_checks(figures: Sequence[Fp8TrainingFigures]) -> tuple[Check, ...]:
    """Every recipe must end within 1 % of bf16, and must have run products in FP8 at all."""
    found = []
    for recipe in dict.fromkeys(run.recipe for run in figures if run.recipe != BFLOAT16):
        comparison = Comparison.of(figures, recipe)
        ratio, note = comparison.ratio, ""
        if ratio is None:
            note = "no run of bf16 with the same seed"
        elif any(run.num_fp8_products == 0 for run in comparison.own):
            ratio, note = None, "no product ran in FP8"
        what = f"{recipe}: final held-out loss, mean of {len(comparison.own)} seeds"
        found.append(Check(BFLOAT16, what, ratio, MOST_OF_BFLOAT16, note))
    return tuple(found)


def _mean_loss(runs: Sequence[Fp8TrainingFigures]) -> float:
    return statistics.fmean(run.final_loss for run in runs)


def _ratio_cell(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.4f}"
