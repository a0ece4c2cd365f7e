"""For which device FP8 is decided, and how fast it is: the one that a recipe names, else the one that runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphopt.fp8 import Recipe
from graphopt.kernels.fp8_support import support_of, support_on
from graphopt.planner.fp8_costs import AnalyticRates, Rates
from graphopt.planner.fp8_devices import DeviceClass, class_of_device, device_class
from graphopt.planner.fp8_measured import read_table

_EMULATED = ("cpu", "meta")
"""Types of device where FP8 runs as emulation, or not at all: a model on "meta" is only asked about."""


@dataclass(frozen=True)
class Setting:
    """``name``: the device as people read it; ``rates``: None where costs are not counted; ``reason``: why there is no
    FP8 at all, empty where there is.
    """

    name: str
    rates: Rates | None = None
    reason: str = ""


def setting_of(recipe: Recipe, device: torch.device) -> Setting:
    """The Setting of a program on ``device`` under ``recipe``; UnsupportedError for a target that is not known."""
    is_emulated = device.type in _EMULATED
    if recipe.target is None and is_emulated:
        return Setting("cpu (emulation: costs are not counted)")
    running = support_on(device)
    if not (is_emulated or running.has_fp8):
        return Setting(running.name, reason=running.reason)
    if recipe.target is not None:
        found = device_class(recipe.target)
    else:
        properties = torch.cuda.get_device_properties(device)
        found = class_of_device(properties.name, (properties.major, properties.minor))
    support = support_of(found.capability)
    if not support.has_fp8:
        return Setting(found.name, reason=f"{support.reason} ({found.name})")
    rates = rates_of(found, recipe)
    return Setting(rates.name + (", run as emulation on cpu" if is_emulated else ""), rates)


def needs_two_layouts(recipe: Recipe, device: torch.device) -> bool:
    """Whether FP8 products read operands with the contraction contiguous alone, on the target or else on ``device``."""
    support = support_on(device) if recipe.target is None else device_class(recipe.target).support
    return support.needs_two_layouts


def rates_of(device: DeviceClass, recipe: Recipe) -> Rates:
    """Measured rates of ``device`` if ``graphopt measure-fp8`` has left a table of it, else those of its data sheet."""
    table = read_table(device.name)
    return AnalyticRates(device, recipe) if table is None else table.rates(recipe)
