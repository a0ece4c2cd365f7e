"""Recipes of FP8 training: how operands of matrix products are scaled, in which formats, and which products take part.

``precision="fp8"`` is ``Precision(compute="fp8", fp8=Tensorwise())``; a recipe may be given in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from graphopt.errors import UnsupportedError

Format = Literal["e4m3", "e5m2"]
WeightGradient = Literal["fp8", "bf16"]
Saved = Literal["none", "products", "all"]
Decides = Literal["auto", "host", "device"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes share. Forward operands are E4M3.

    ``gradients``: the format of gradients. ``power_of_two``: scales are powers of two. ``weight_gradient``: what the
    weight-gradient products run in. ``saved``: what is kept for the backward part in FP8: "none"; "products": what a
    product of the backward part reads in FP8; "all": also what other operators of the backward part read. ``exclude``
    and ``include``: patterns of module paths whose products never or always take part, whatever they cost;
    ``choose``: a predicate of a product's facts, asked where neither decides. ``target``: the device whose costs count
    (None: the device that runs). ``decides``: where it is decided whether a step is skipped because of Inf or NaN; see
    ``LossScale``, which decides where there is one.
    """

    gradients: Format = "e4m3"
    power_of_two: bool = False
    weight_gradient: WeightGradient = "fp8"
    saved: Saved = "all"
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    choose: Callable[[Any], bool] | None = None
    target: str | None = None
    decides: Decides = "auto"

    name: ClassVar[str] = "recipe"

    def __post_init__(self) -> None:
        for field, known in (
            ("gradients", ("e4m3", "e5m2")),
            ("weight_gradient", ("fp8", "bf16")),
            ("saved", ("none", "products", "all")),
            ("decides", ("auto", "host", "device")),
        ):
            if getattr(self, field) not in known:
                raise UnsupportedError(
                    f"{field} expects one of {', '.join(map(repr, known))}, came {getattr(self, field)!r}"
                )
        for field in ("exclude", "include"):
            patterns = getattr(self, field)
            if isinstance(patterns, str):
                raise UnsupportedError(
                    f"{field} expects a tuple of module patterns, came the string {patterns!r}: write "
                    f"{field}=({patterns!r},)"
                )
            object.__setattr__(self, field, tuple(patterns))


@dataclass(frozen=True, kw_only=True)
class Tensorwise(Recipe):
    """One scale for each tensor, from its present largest value. Gradients are E5M2."""

    gradients: Format = "e5m2"
    name: ClassVar[str] = "tensorwise"


@dataclass(frozen=True, kw_only=True)
class Rowwise(Recipe):
    """One scale for each row or column along the contraction. All operands are E4M3."""

    power_of_two: bool = True
    name: ClassVar[str] = "rowwise"


@dataclass(frozen=True, kw_only=True)
class Blockwise(Recipe):
    """A scale for 1 x 128 elements of activations and gradients, and for 128 x 128 of weights. All are E4M3."""

    power_of_two: bool = True
    name: ClassVar[str] = "blockwise"


@dataclass(frozen=True, kw_only=True)
class Delayed(Recipe):
    """One scale for each tensor, from its largest values in the last ``history`` micro-steps. Gradients are E5M2.

    ``margin``: the scale leaves room for values ``2**margin`` times as large. ``algo``: "max" of the history, or
    "most_recent".
    """

    gradients: Format = "e5m2"
    history: int = 1024
    margin: int = 0
    algo: Literal["max", "most_recent"] = "max"
    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.history, bool) or not isinstance(self.history, int) or self.history < 1:
            raise UnsupportedError(f"history expects a whole number of micro-steps from 1 on, came {self.history!r}")
        if self.algo not in ("max", "most_recent"):
            raise UnsupportedError(f"algo expects 'max' or 'most_recent', came {self.algo!r}")


RECIPES: dict[str, type[Recipe]] = {kind.name: kind for kind in (Tensorwise, Rowwise, Blockwise, Delayed)}


def recipe_of(value: Any) -> Recipe:
    """The recipe that ``value`` (a name, or a recipe) means; UnsupportedError for anything else."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in RECIPES:
        return RECIPES[value]()
    raise UnsupportedError(f"an FP8 recipe is one of {', '.join(RECIPES)} or a graphopt.fp8 value, came {value!r}")
