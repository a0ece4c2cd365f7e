"""Learning rate schedules of a step: they move only if an update has been applied since they moved last.

A user writes ``scheduler = LambdaLR(step.optimizer, ...)`` and calls ``scheduler.step()`` after each ``step(...)``.
After a skipped update that call must change nothing. torch tells an optimizer nothing of its schedulers, so they are
looked for among the living objects. One that must rest is made an instance of a subclass of its own class whose
``step`` does nothing; the next applied update makes it what it was. Nothing is stored in the scheduler, so its
``state_dict`` is that of any other, and it is pickled and copied as an instance of its own class.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler


class Schedules:
    """The schedulers of one optimizer, found when they are needed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        self._positions: weakref.WeakKeyDictionary[LRScheduler, Any] = weakref.WeakKeyDictionary()
        self._seen: tuple[int, int] | None = None

    def note_applied(self) -> None:
        """An update was applied: every schedule may move again."""
        for scheduler in self._find():
            _release(scheduler)
            self._positions[scheduler] = _position(scheduler)

    def note_skipped(self) -> None:
        """An update was skipped: schedules that have moved since the last applied one rest until the next.

        One that has not moved since, because it moves once an epoch, still has that update to follow.
        """
        for scheduler in self._find(everywhere=True):
            if self._positions.get(scheduler) != _position(scheduler):
                _hold(scheduler, _nothing)
            else:
                _release(scheduler)

    def hold_until_known(self, find_out: Callable[[], None]) -> None:
        """It is not known yet whether the update was applied: a schedule calls ``find_out`` when it is to move.

        ``find_out`` ends in ``note_applied`` or ``note_skipped``.
        """
        for scheduler in self._find():
            _hold(scheduler, find_out)

    def _find(self, *, everywhere: bool = False) -> list[LRScheduler]:
        """All schedulers of the optimizer; the whole heap is looked through only if there may be new ones.

        Each scheduler refers to its optimizer, so a new one shows in the number of references, unless an old one died
        at the same time, which shows in the number of known ones.
        """
        seen = (sys.getrefcount(self._optimizer), len(self._known))
        if everywhere or seen != self._seen:
            for item in gc.get_objects():
                # type(), because objects may lie about their class, or compute it.
                if issubclass(type(item), LRScheduler) and getattr(item, "optimizer", None) is self._optimizer:
                    self._known.add(item)
            self._seen = (sys.getrefcount(self._optimizer), len(self._known))
        return list(self._known)


def _position(scheduler: LRScheduler) -> Any:
    """Where a schedule is: how far it counts, and those it is made of."""
    parts = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", None), tuple(_position(part) for part in parts)


def _nothing() -> None:
    """What is to be done when a schedule is to move that must rest."""


class _Resting:
    """What is mixed into the class of a scheduler that rests."""

    own_class: ClassVar[type[LRScheduler]]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing, unless it turns out that the update was applied."""
        _find_out[self]()
        if not isinstance(self, _Resting):  # what was found out has made it what it was
            self.step(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an instance of its own class: resting is not part of what a scheduler is."""
        own_class = self.own_class
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        return (function, tuple(own_class if argument is type(self) else argument for argument in arguments), *rest)


_find_out: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()
_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _hold(scheduler: LRScheduler, find_out: Callable[[], None]) -> None:
    _find_out[scheduler] = find_out
    if not isinstance(scheduler, _Resting):
        scheduler.__class__ = _resting_class(type(scheduler))


def _release(scheduler: LRScheduler) -> None:
    _find_out.pop(scheduler, None)
    if isinstance(scheduler, _Resting):
        scheduler.__class__ = scheduler.own_class  # type: ignore[assignment]


def _resting_class(own_class: type[LRScheduler]) -> type:
    if own_class not in _classes:
        body = {"own_class": own_class, "__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
        _classes[own_class] = type(own_class.__name__, (_Resting, own_class), body)
    return _classes[own_class]
