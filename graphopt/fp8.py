"""Recipes of FP8 training: how operands of matrix products are scaled, in which formats, and which products take part.

``precision="fp8"`` is ``Precision(compute="fp8", fp8=Tensorwise())``; a recipe may be given in its place. A recipe
prints as text, ``rowwise;gradients=e5m2;exclude=lm_head|*.gate``, and ``recipe_of`` reads that back; all
but ``choose``, a function, of which a text has the name alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from graphopt.errors import UnsupportedError

Format = Literal["e4m3", "e5m2"]
WeightGradient = Literal["fp8", "bf16"]
Saved = Literal["none", "products", "all"]
History = Literal["max", "most_recent"]
Decides = Literal["auto", "host", "device"]

_SEPARATORS = ";,|{}"
"""What stands between the parts of a recipe, a pass and a pipeline that are written as text."""

_LARGEST_MARGIN = 8
"""Of delayed scaling: about half the powers of two that E4M3 holds as normal numbers (2**-6 to 448)."""


@dataclass(frozen=True)
class ProductFacts:
    """What ``choose`` is asked about: a product ``[rows, contraction] @ [contraction, columns]`` in the module at the
    path ``module``. ``role``: "forward", "input gradient" or "weight gradient"; ``weights``: the parameters that it
    reads, or whose gradient it is.
    """

    module: str
    role: str
    rows: int
    columns: int
    contraction: int
    weights: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes share. Operands of forward products, activations and weights, are E4M3 everywhere.

    ``gradients``: the format of gradients; E4M3 keeps four bits of each number, E5M2 three and a range 2**15 times as
    wide. ``power_of_two``: scales are rounded up to powers of two, so that dividing by them changes no bit but loses up
    to one of the range. ``weight_gradient``: what the weight-gradient products run in; "bf16" reads both operands
    before they were quantized. ``saved``: what is kept for the backward part in FP8: "none"; "products": what a product
    of the backward part reads in FP8; "all": also what other operators of the backward part read.

    ``exclude`` and ``include``: patterns of module paths, as in ``fnmatch``, whose products never or always take part,
    whatever they cost; a module below one that is named is named too, and ``exclude`` goes first. ``choose``: a
    predicate of ProductFacts that decides in the place of costs and places where neither does. ``skip_first`` and
    ``skip_last``: how many of the repeated layers at either end never take part. ``target``: the class of device whose
    costs count, such as "H100" (None: the device that runs; on a CPU costs are not counted). ``decides``: where it is
    decided whether a step is skipped because of Inf or NaN, unless a ``LossScale`` says so. It is
    if a tensor that is quantized or the gradient of a parameter holds one; a step that quantizes nothing does not look.

    UnsupportedError for a value that a field does not have.
    """

    gradients: Format = "e4m3"
    power_of_two: bool = False
    weight_gradient: WeightGradient = "fp8"
    saved: Saved = "all"
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    choose: Callable[[ProductFacts], bool] | None = None
    target: str | None = None
    skip_first: int = 0
    skip_last: int = 0
    decides: Decides = "auto"

    name: ClassVar[str] = "recipe"

    def __post_init__(self) -> None:
        if type(self) is Recipe:
            raise UnsupportedError(f"Recipe is what all recipes share; use one of {', '.join(RECIPES)}")
        _check_choice("gradients", self.gradients, get_args(Format))
        _check_choice("power_of_two", self.power_of_two, (True, False))
        _check_choice("weight_gradient", self.weight_gradient, get_args(WeightGradient))
        _check_choice("saved", self.saved, get_args(Saved))
        _check_choice("decides", self.decides, get_args(Decides))
        for field in ("exclude", "include"):
            object.__setattr__(self, field, _checked_patterns(field, getattr(self, field)))
        for field in ("skip_first", "skip_last"):
            count = getattr(self, field)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise UnsupportedError(f"{field} expects a number of layers from 0 on, came {count!r}")
        if self.choose is not None and not callable(self.choose):
            raise UnsupportedError(f"choose expects a function of ProductFacts, came {self.choose!r}")
        if self.target is not None and (not isinstance(self.target, str) or not self.target):
            raise UnsupportedError(f"target expects the name of a device such as 'H100', came {self.target!r}")

    def __str__(self) -> str:
        """The recipe as text: its name and the fields that differ from its defaults."""
        set_fields = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return ";".join((self.name, *(f"{field.name}={_text(getattr(self, field.name))}" for field in set_fields)))


@dataclass(frozen=True, kw_only=True)
class Tensorwise(Recipe):
    """One scale for each tensor, from its present largest value. Gradients are E5M2.

    The cheapest scales: forward and backward read the same codes of a value, which is quantized once. One large number
    costs all others their precision.
    """

    gradients: Format = "e5m2"
    name: ClassVar[str] = "tensorwise"


@dataclass(frozen=True, kw_only=True)
class Rowwise(Recipe):
    """One scale for each row or column along the contraction. All operands are E4M3, scales powers of two.

    A large number costs its own row alone. A value that is contracted along both dimensions, as all of a layer are, is
    quantized twice; with powers of two for scales both copies hold the same numbers wherever neither leaves the range.
    """

    power_of_two: bool = True
    name: ClassVar[str] = "rowwise"


@dataclass(frozen=True, kw_only=True)
class Blockwise(Recipe):
    """A scale for 1 x 128 elements of activations and gradients, and for 128 x 128 of weights. All are E4M3.

    The 128 lie along the contraction. Weights are quantized once for forward and backward, what flows twice.
    """

    power_of_two: bool = True
    name: ClassVar[str] = "blockwise"


@dataclass(frozen=True, kw_only=True)
class Delayed(Recipe):
    """One scale for each tensor, from its largest values in the last ``history`` micro-steps. Gradients are E5M2.

    ``margin``: the scale leaves room for values ``2**margin`` times as large. At most 8: E4M3 holds about 15 powers of
    two as normal numbers, and the other half is for the values themselves. ``algo``: "max" of the history, or
    "most_recent".
    """

    gradients: Format = "e5m2"
    history: int = 1024
    margin: int = 0
    algo: History = "max"
    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("history", 1), ("margin", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UnsupportedError(f"{field} expects a whole number from {least} on, came {value!r}")
        if self.margin > _LARGEST_MARGIN:
            raise UnsupportedError(
                f"margin expects at most {_LARGEST_MARGIN}, came {self.margin}: E4M3 holds about 15 powers of two as "
                "normal numbers, and more than half of them would stay unused"
            )
        _check_choice("algo", self.algo, get_args(History))


RECIPES: dict[str, type[Recipe]] = {kind.name: kind for kind in (Tensorwise, Rowwise, Blockwise, Delayed)}


def recipe_of(value: Any) -> Recipe:
    """The recipe that ``value`` means: a recipe, its name, or what it prints; UnsupportedError for anything else."""
    if isinstance(value, Recipe):
        return value
    name, *parts = value.split(";") if isinstance(value, str) else ("",)
    if name not in RECIPES:
        raise UnsupportedError(f"an FP8 recipe is one of {', '.join(RECIPES)} or a graphopt.fp8 value, came {value!r}")
    kind = RECIPES[name]
    given = [_parsed(kind, part) for part in parts]
    repeated = [field for field, count in Counter(field for field, _ in given).items() if count > 1]
    if repeated:
        raise UnsupportedError(
            f"the recipe {name} as text expects each field once, came {', '.join(repeated)} again; several patterns "
            "are written a|b"
        )
    return kind(**dict(given))


def _parsed(kind: type[Recipe], part: str) -> tuple[str, Any]:
    """Name and value of a field of ``kind`` that is written ``name=value``."""
    name, _, text = part.partition("=")
    default = {field.name: field.default for field in fields(kind)}.get(name)
    if name in ("exclude", "include"):
        return name, tuple(text.split("|"))
    if name == "target":
        return name, text
    if default is None:
        known = [field.name for field in fields(kind) if field.name != "choose"]
        raise UnsupportedError(f"the recipe {kind.name} as text expects fields {', '.join(known)}, came {part!r}")
    if isinstance(default, bool):
        return name, {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, int):
        return name, int(text) if text.isdigit() else text
    return name, text


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "|".join(value)
    return str(getattr(value, "__name__", value))


def _checked_patterns(field: str, patterns: Any) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise UnsupportedError(
            f"{field} expects a tuple of module patterns, came the string {patterns!r}: write {field}=({patterns!r},)"
        )
    if not isinstance(patterns, Iterable):
        raise UnsupportedError(f"{field} expects a tuple of module patterns, () for none, came {patterns!r}")
    patterns = tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern or set(pattern) & set(_SEPARATORS):
            raise UnsupportedError(
                f"{field} expects module patterns such as 'lm_head' or '*.wo' without any of {_SEPARATORS}, "
                f"came {pattern!r}"
            )
    return patterns


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise UnsupportedError(f"{name} expects one of {', '.join(map(repr, choices))}, came {value!r}")
