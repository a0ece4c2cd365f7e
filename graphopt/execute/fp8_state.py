"""The state of FP8 training: histories, evidence of what was not finite, and how often that made a step be skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import StateError
from graphopt.execute.fp8_history import Fp8History, checked_rows, saved_rows, scales_of
from graphopt.execute.held_weights import HeldWeights
from graphopt.fp8 import Delayed, Recipe
from graphopt.ir.fp8_watch import HISTORY, WEIGHT_HISTORY, Fp8Watch, described
from graphopt.ir.spec import TensorSpec

log = logging.getLogger(__name__)

_WARN_AFTER = 10
"""Skipped updates in a row after which a warning is logged, as for loss scaling."""

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Seen:
    """What one program saw of the tensors ``names``, and then of the gradients of ``parameters``: ``amax`` f32[T], Inf
    or NaN where one holds Inf or NaN."""

    names: tuple[str, ...]
    amax: torch.Tensor
    parameters: tuple[str, ...] = ()


def not_finite(seen: Iterable[Seen]) -> str:
    """Why a step is skipped: the first tensors that were not finite, in the order in which they were quantized.

    Gradients of parameters only where no quantized tensor tells it: they follow from those that do.
    """
    names: dict[str, None] = {}
    parameters: dict[str, None] = {}
    for one in seen:
        bad = (~torch.isfinite(one.amax)).tolist()
        split = len(one.names)
        names.update(dict.fromkeys(name for name, is_bad in zip(one.names, bad[:split], strict=True) if is_bad))
        found = zip(one.parameters, bad[split:], strict=True)
        parameters.update(dict.fromkeys(name for name, is_bad in found if is_bad))
    if parameters and not names:
        return f"gradients are not finite{_listed([f'of {name}' for name in parameters])}"
    return f"values quantized to FP8 are not finite{_listed([described(name) for name in names])}"


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    return f": {', '.join([*names[:_NAMES_SHOWN], *more])}" if names else ""


class Fp8State:
    """Beside the optimizer's state: what FP8 remembers from micro-step to micro-step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.history = Fp8History(recipe.history) if isinstance(recipe, Delayed) else None
        self.seen: list[Seen] = []  # by the micro-steps of the open window
        self.weights = HeldWeights()
        self.skipped_in_a_row = 0
        self._window_evidence: torch.Tensor | None = None

    def decides_on_device(self, device: torch.device) -> bool:
        """Whether the compiled program decides if an update is applied."""
        if self.recipe.decides == "auto":
            return device.type != "cpu"
        return self.recipe.decides == "device"

    def table(self, name: str, watch: Fp8Watch, spec: TensorSpec) -> torch.Tensor:
        """The live history f32[T,H] that a program with ``watch`` knows as ``name``."""
        assert self.history is not None, "only delayed scaling has a history"
        rows = {HISTORY: watch.delayed, WEIGHT_HISTORY: watch.delayed_weights}[name]
        return self.history.table(name, rows, spec.device)

    def scales(self, watch: Fp8Watch, spec: TensorSpec) -> torch.Tensor:
        """f32[T], new: what an evaluation with ``watch`` scales by, from the histories as they stand."""
        assert self.history is not None and isinstance(self.recipe, Delayed), "only delayed scaling has a history"
        return scales_of(self.history.as_it_stands(watch.delayed, spec.device), watch, self.recipe)

    def window_evidence(self, spec: TensorSpec) -> torch.Tensor:
        """The sum of the evidence of the open window, f32[]; zero at first."""
        if self._window_evidence is None:
            self._window_evidence = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        if self._window_evidence.device != spec.device:
            self._window_evidence = self._window_evidence.to(spec.device)
        return self._window_evidence

    def clear_window(self) -> None:
        """The window has ended: forget what was seen in it."""
        self.seen.clear()
        self.weights.close(self.history)
        if self._window_evidence is not None:
            self._window_evidence.zero_()

    def note_applied(self) -> None:
        """An update was applied."""
        self.skipped_in_a_row = 0

    def note_skipped(self, reason: str) -> None:
        """An update was skipped for ``reason``."""
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row % _WARN_AFTER == 0:
            log.warning(
                "fp8: %d updates in a row were skipped, the last because %s: nothing is being trained. Look for inf or "
                "NaN in the batch, lower the learning rate, or exclude the module with the recipe's exclude=",
                self.skipped_in_a_row,
                reason,
            )

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Histories by tensor name, the evidence of an open window, updates skipped in a row."""
        rows = {} if self.history is None else self.history.rows()
        return {
            "history": saved_rows(rows),
            "window": {
                "evidence": None if self._window_evidence is None else self._window_evidence.clone(),
                "weights": saved_rows(self.weights.pending_rows()),
            },
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Restore what ``state_dict`` gave and ``check_fp8_state`` has checked; None: of a step without FP8."""
        self.seen.clear()
        rows = {} if saved is None else checked_rows(saved["history"])
        if self.history is not None:
            self.history.load(rows)
        self.weights.load_pending({} if saved is None else checked_rows(saved["window"]["weights"]))
        evidence = None if saved is None else saved["window"]["evidence"]
        self._window_evidence = None if evidence is None else evidence.clone()
        self.skipped_in_a_row = 0 if saved is None else int(saved["skipped_in_a_row"])


def check_fp8_state(saved: Mapping[str, Any]) -> None:
    """Raise StateError for a saved state whose FP8 part is damaged."""
    found = saved.get("fp8")
    if found is None:
        return
    if not isinstance(found, Mapping) or set(found) != {"history", "window", "skipped_in_a_row"}:
        keys = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise StateError(f"expected history, window and skipped_in_a_row of FP8 training, came {keys}")
    checked_rows(found["history"])
    window = found["window"]
    if not isinstance(window, Mapping) or set(window) != {"evidence", "weights"}:
        raise StateError("expected evidence and weights of an open window of FP8 training")
    checked_rows(window["weights"])
    _check_evidence(window["evidence"])
    skipped = found["skipped_in_a_row"]
    if isinstance(skipped, bool) or not isinstance(skipped, int) or skipped < 0:
        raise StateError(f"skipped_in_a_row of FP8 training is a number of updates from 0 on, came {skipped!r}")


def _check_evidence(evidence: object) -> None:
    """Raise StateError for what is no evidence of a window: None, or one float32, which NaN is too."""
    if evidence is None:
        return
    came = repr(evidence)
    if isinstance(evidence, torch.Tensor):
        if evidence.dtype == torch.float32 and evidence.dim() == 0:
            return
        came = f"{evidence.dtype} {list(evidence.shape)}"
    raise StateError(f"the evidence of a window of FP8 training is None or one float32 without dimensions, came {came}")
