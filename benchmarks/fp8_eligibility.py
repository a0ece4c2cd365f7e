"""What FP8 pays for by our costs, and what torchao's filters take: the tables of ``docs/fp8-eligibility.md``.

``python -m benchmarks.fp8_eligibility [--check]``: writes the generated part of the page; ``--check`` writes nothing
and exits 1 if it is out of date. Nothing is measured: both are arithmetic, of an H100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import typer

from benchmarks.command import run_command
from benchmarks.machine import REPOSITORY
from graphopt.fp8 import Recipe, Rowwise, Tensorwise
from graphopt.ir.units import format_microseconds
from graphopt.planner.fp8_choice import LEAST_GAIN, Prices, choose_products
from graphopt.planner.fp8_costs import AnalyticRates, Fp8Costs, layer_products
from graphopt.planner.fp8_devices import device_class

PAGE = REPOSITORY / "docs" / "fp8-eligibility.md"
BEGIN = "<!-- fp8-eligibility:begin -->"
END = "<!-- fp8-eligibility:end -->"

DEVICE = "H100"
TOKENS = (256, 2048, 8192, 65536)
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
EXPLAINED_TOKENS = 8192
"""Those that torchao's thresholds were found with; each layer on which we differ is explained for them."""

_ROLES = ("forward", "input gradient", "weight gradient")
_LETTERS = "FIW"
_OUT_OF_DATE = 1


def tensorwise_filter(columns: int, contraction: int) -> bool:
    """Whether torchao converts a layer under its tensorwise recipe (``_auto_filter_for_recipe``, at 36027d82)."""
    return not (contraction <= 4096 and columns <= 1024)


def rowwise_filter(columns: int, contraction: int) -> bool:
    """Whether torchao converts a layer under its rowwise recipe (there too)."""
    is_small = columns <= 2048 or contraction <= 1024 or (columns <= 4096 and contraction <= 2048)
    return not is_small


FILTERS: tuple[tuple[Recipe, Callable[[int, int], bool]], ...] = (
    (Tensorwise(), tensorwise_filter),
    (Rowwise(), rowwise_filter),
)


@dataclass(frozen=True)
class Comparison:
    """A layer ``[tokens, contraction]`` to ``[tokens, columns]``: which of its products we take, whether torchao takes
    it whole, and the seconds behind it: saved by all three products together, and paid to quantize for all of them.
    """

    tokens: int
    columns: int
    contraction: int
    ours: tuple[bool, bool, bool]
    theirs: bool
    bf16_seconds: float
    products_save: float
    quantize_seconds: float

    @property
    def agrees(self) -> bool:
        """Whether both take the whole layer or both none of it."""
        return all(self.ours) if self.theirs else not any(self.ours)

    @property
    def pays_whole(self) -> bool:
        """Whether the layer would be taken if its three products were taken or left together, as torchao does."""
        return self.products_save - self.quantize_seconds > LEAST_GAIN * self.bf16_seconds

    @property
    def cell(self) -> str:
        """The products that we take as letters, and a mark where torchao differs."""
        letters = "".join(letter if taken else "-" for letter, taken in zip(_LETTERS, self.ours, strict=True))
        return f"{letters}{'' if self.agrees else ' *'}"

    @property
    def reason(self) -> str:
        """Why we differ from the filter; empty where we do not."""
        if self.agrees:
            return ""
        times = (
            f"all three products save {format_microseconds(self.products_save)} of "
            f"{format_microseconds(self.bf16_seconds)}, quantizing for them takes "
            f"{format_microseconds(self.quantize_seconds)}"
        )
        if all(self.ours):
            return f"pays with {self.tokens} tokens, which the filter does not look at: {times}"
        if not any(self.ours):
            return f"does not pay: {times}"
        taken = " and ".join(role for role, is_taken in zip(_ROLES, self.ours, strict=True) if is_taken)
        return f"{taken} alone pays, the filter takes or leaves all three: {times}"


def comparisons(recipe: Recipe, takes: Callable[[int, int], bool], tokens: int) -> Iterator[Comparison]:
    """A Comparison for each pair of widths."""
    costs = Fp8Costs(AnalyticRates(device_class(DEVICE), recipe), recipe)
    for columns, contraction in product(WIDTHS, WIDTHS):
        products = layer_products(tokens, columns, contraction)
        bf16, fp8 = (tuple(map(seconds, products)) for seconds in (costs.bf16_seconds, costs.fp8_seconds))
        prices = Prices(bf16, fp8, costs.shared(products))
        forward, read, weight = choose_products(prices, {})
        yield Comparison(
            tokens,
            columns,
            contraction,
            (forward, read, weight),
            takes(columns, contraction),
            sum(bf16),
            sum(bf16) - sum(fp8),
            sum(prices.quantize_seconds([True] * len(products))),
        )


def agreement(found: tuple[Comparison, ...]) -> str:
    """In how many layers both say the same, product by product."""
    return f"{sum(item.agrees for item in found)} of {len(found)}"


def whole_agreement(found: tuple[Comparison, ...]) -> str:
    """In how many layers both say the same, if we had to take or leave whole layers."""
    return f"{sum(item.pays_whole == item.theirs for item in found)} of {len(found)}"


def generated_section() -> str:
    """The tables, as Markdown."""
    lines: list[str] = []
    for recipe, takes in FILTERS:
        by_tokens = {tokens: tuple(comparisons(recipe, takes, tokens)) for tokens in TOKENS}
        skipped = sum(not item.theirs for item in by_tokens[EXPLAINED_TOKENS])
        lines += [f"### {recipe.name.capitalize()}", ""]
        lines += [f"torchao's filter skips {skipped} of the {len(WIDTHS) ** 2} layers. Agreement:", ""]
        lines += ["| tokens | whole layers alike | every product alike |", "|---:|---:|---:|"]
        lines += [
            f"| {tokens} | {whole_agreement(found)} | {agreement(found)} |" for tokens, found in by_tokens.items()
        ]
        for tokens, found in by_tokens.items():
            lines += ["", f"{recipe.name}, {tokens} tokens:", "", *_grid(found)]
        lines += ["", f"Where we differ with {EXPLAINED_TOKENS} tokens:", "", "| N | K | torchao | why |"]
        lines += ["|---:|---:|---|---|"]
        for item in by_tokens[EXPLAINED_TOKENS]:
            if not item.agrees:
                theirs = "takes" if item.theirs else "skips"
                lines.append(f"| {item.columns} | {item.contraction} | {theirs} | {item.reason} |")
        lines.append("")
    return "\n".join(lines)


def _grid(found: tuple[Comparison, ...]) -> list[str]:
    cells = {(item.columns, item.contraction): item.cell for item in found}
    lines = [f"| N \\ K | {' | '.join(map(str, WIDTHS))} |", f"|---:|{'---|' * len(WIDTHS)}"]
    return lines + [f"| {n} | {' | '.join(cells[n, k] for k in WIDTHS)} |" for n in WIDTHS]


def page_with(text: str, section: str) -> str:
    """``text`` with ``section`` between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the page is out of date.")] = False,
) -> None:
    """Write the generated part of docs/fp8-eligibility.md."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = page_with(text, generated_section())
    if check and fresh != text:
        raise typer.Exit(_OUT_OF_DATE)
    if not check:
        PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
