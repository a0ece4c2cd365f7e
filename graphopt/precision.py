"""What precision a step is computed in, as a checked value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch

from graphopt.errors import UnsupportedError
from graphopt.fp8 import Recipe, Tensorwise, recipe_of

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
            raise UnsupportedError(f"fp8={self.fp8!r} needs compute='fp8', came compute={self.compute!r}")

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
        f"{value!r}; float32 is 'fp32', bfloat16 'bf16', float16 'fp16'"
    )


def precision_for(model: torch.nn.Module, precision: Precision) -> Precision:
    """``precision`` with the modules that ``model`` itself asks to keep; UnsupportedError for a pattern of no module.

    transformers models name them: ``_keep_in_fp32_modules`` for float16, ``_keep_in_fp32_modules_strict`` for both.
    """
    paths = [path for path, _ in model.named_modules() if path]
    unknown = [item for item in precision.keep_fp32 if not any(fnmatchcase(path, item) for path in paths)]
    if unknown:
        close = [path for item in unknown for path in get_close_matches(item, paths, n=3)] or paths[:5]
        raise UnsupportedError(
            f"keep_fp32 expects patterns of module paths, came {', '.join(map(repr, unknown))}, which no module "
            f"matches; there are {', '.join(dict.fromkeys(close)) or 'none'}"
        )
    if not precision.lowers:
        return precision
    asked = [*_strings(model, "_keep_in_fp32_modules_strict")]
    if precision.compute == "fp16":
        asked += _strings(model, "_keep_in_fp32_modules")
    # A name is a part of the path anywhere, as in transformers.
    own = tuple(dict.fromkeys(pattern for name in asked for pattern in (name, f"*.{name}")))
    return replace(precision, keep_fp32=(*precision.keep_fp32, *own))


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
