"""What precision a step is computed in, as a checked value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch

from graphopt.errors import UnsupportedError
from graphopt.fp8 import RECIPES, Recipe, Tensorwise, recipe_of

Compute = Literal["fp8", "bf16", "fp16", "fp32"]
Master = Literal["fp32", "stochastic", "remainder", "none"]
Residual = Literal["auto", "compute", "fp32"]


@dataclass(frozen=True)
class Precision:
    """How a step computes, and what its optimizer keeps of parameters.

    ``compute``: the type of matrix products and of what lies between them; "fp32" lowers nothing; "fp8" is "bf16" with
    matrix products in FP8 where that pays, as ``fp8`` says (a ``graphopt.fp8`` recipe or its name). ``master``: how
    parameters of two bytes an element are updated: "fp32" (a float32 copy is, and cast back), "stochastic" (rounded up
    or down by chance), "remainder" (bfloat16 with 16 more bits, exact), "none" (in their own dtype, as torch does).
    ``keep_fp32``: patterns of module paths, such as "lm_head" or
    "*.wo"; what runs in such a module, or below it, stays in float32.

    ``residual``: the type of sums that run through all layers. "compute": two bytes an element, as a model in bfloat16
    has it. "fp32": sums are kept in float32 as under ``torch.autocast``, and what backward needs of them is kept in
    the compute type where an operator takes it so. "auto": "compute" for bf16, whose range is float32's, and "fp32" for
    fp16, where a sum may leave the range.
    """

    compute: Compute = "bf16"
    master: Master = "fp32"
    keep_fp32: tuple[str, ...] = ()
    residual: Residual = "auto"
    fp8: Recipe | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep_fp32, str):
            raise UnsupportedError(
                f"keep_fp32 expects a tuple of module patterns, came the string {self.keep_fp32!r}: write "
                f"keep_fp32=({self.keep_fp32!r},)"
            )
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        _check_choice("compute", self.compute, get_args(Compute))
        _check_choice("master", self.master, get_args(Master))
        _check_choice("residual", self.residual, get_args(Residual))
        self._settle_recipe()
        wrong = [pattern for pattern in self.keep_fp32 if not isinstance(pattern, str) or not pattern]
        if wrong:
            raise UnsupportedError(f"keep_fp32 expects module patterns such as 'lm_head' or '*.wo', came {wrong}")

    def _settle_recipe(self) -> None:
        if self.compute == "fp8":
            object.__setattr__(self, "fp8", Tensorwise() if self.fp8 is None else recipe_of(self.fp8))
        elif self.fp8 is not None:
            raise UnsupportedError(f"fp8={str(self.fp8)!r} needs compute='fp8', came compute={self.compute!r}")

    @property
    def between(self) -> str:
        """The type of what lies between FP8 products, or of everything that is lowered."""
        return "bf16" if self.compute == "fp8" else self.compute

    @property
    def lowers(self) -> bool:
        """Whether anything is computed in less than float32."""
        return self.compute != "fp32"


def precision_of(value: Any) -> Precision:
    """The Precision that a user's ``precision=`` means; UnsupportedError for anything else."""
    if isinstance(value, Precision):
        return value
    if isinstance(value, Recipe):
        return Precision(compute="fp8", fp8=value)
    if value in get_args(Compute):
        return FULL if value == FULL.compute else Precision(compute=value)
    raise UnsupportedError(
        f"precision expects 'fp32', 'bf16', 'fp16', 'fp8', a graphopt.Precision or a graphopt.fp8 recipe, came "
        f"{value!r}; {_meant(value)}"
    )


def _meant(value: Any) -> str:
    """What to write in the place of ``value``."""
    if isinstance(value, str) and value.partition(";")[0] in RECIPES:
        return f"write graphopt.Precision('fp8', fp8={value!r}) or graphopt.fp8.{value.partition(';')[0].title()}(...)"
    if isinstance(value, type) and issubclass(value, Recipe):
        return f"write graphopt.fp8.{value.__name__}(), a value and not its class"
    return "float32 is 'fp32', bfloat16 'bf16', float16 'fp16'"


def precision_for(model: torch.nn.Module, precision: Precision) -> Precision:
    """``precision`` with the modules that ``model`` itself asks to keep; UnsupportedError for a pattern of no module,
    and for layers at the ends to be skipped where no layers are numbered.

    transformers models name them: ``_keep_in_fp32_modules`` for float16, ``_keep_in_fp32_modules_strict`` for both.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    _check_patterns("keep_fp32", precision.keep_fp32, paths)
    if precision.fp8 is not None:
        # Against the model, not what one program runs of it: evaluation, or another batch, may leave a module out.
        _check_patterns("exclude", precision.fp8.exclude, paths)
        _check_patterns("include", precision.fp8.include, paths)
        _check_ends(precision.fp8, paths)
    if not precision.lowers:
        return precision
    asked = [*_strings(model, "_keep_in_fp32_modules_strict")]
    if precision.compute == "fp16":
        asked += _strings(model, "_keep_in_fp32_modules")
    # A name is a part of the path anywhere, as in transformers.
    own = tuple(dict.fromkeys(pattern for name in asked for pattern in (name, f"*.{name}")))
    return replace(precision, keep_fp32=(*precision.keep_fp32, *own))


def _check_patterns(option: str, patterns: Sequence[str], paths: Sequence[str]) -> None:
    """Raise UnsupportedError for a pattern that matches none of ``paths``; the root's is empty and matches "*"."""
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(path, pattern) for path in paths)]
    if not unknown:
        return
    named = [path for path in paths if path]
    last = {path.rpartition(".")[2]: path for path in named}
    close = [
        name
        for pattern in unknown
        for name in (
            *((f"*.{pattern}",) if pattern in last else ()),
            *get_close_matches(pattern, named, n=3),
            *(f"*.{match}" for match in get_close_matches(pattern, list(last), n=2, cutoff=0.8) if match != pattern),
        )
    ]
    raise UnsupportedError(
        f"{option} expects patterns of module paths, came {', '.join(map(repr, unknown))}, which no module matches; "
        f"there are {', '.join(dict.fromkeys(close or named[:5])) or 'none'}"
    )


def _check_ends(recipe: Recipe, paths: Sequence[str]) -> None:
    """Raise UnsupportedError where layers are to be skipped and no module holds several numbered ones."""
    first, last = recipe.skip_first, recipe.skip_last
    stacks = Counter(path.rpartition(".")[0] for path in paths if path.rpartition(".")[2].isdigit())
    if (first or last) and max(stacks.values(), default=0) < 2:
        raise UnsupportedError(
            f"skip_first={first}, skip_last={last} expect layers with numbers in their module paths, such as "
            "'layers.0', and this model has none: name what to leave out with exclude="
        )


def _strings(model: torch.nn.Module, attribute: str) -> list[str]:
    found = {
        name for module in model.modules() for name in getattr(module, attribute, None) or () if isinstance(name, str)
    }
    return sorted(found)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    raise UnsupportedError(f"{name} expects one of {', '.join(map(repr, choices))}, came {value!r}")


FULL = Precision(compute="fp32", master="none")
"""Everything as the model has it, parameters of two bytes an element included: the step that torch takes."""
