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
from typing import Any

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


_find_out: weakref.WeakKeyDictionary[LRScheduler, Callable[[], None]] = weakref.WeakKeyDictionary()
_resting_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
_OWN_CLASS = "_graphopt_own_class"


def _hold(scheduler: LRScheduler, find_out: Callable[[], None]) -> None:
    _find_out[scheduler] = find_out
    if not _is_resting(scheduler):
        scheduler.__class__ = _resting_class(type(scheduler))


def _release(scheduler: LRScheduler) -> None:
    _find_out.pop(scheduler, None)
    if _is_resting(scheduler):
        scheduler.__class__ = getattr(scheduler, _OWN_CLASS)


def _is_resting(scheduler: LRScheduler) -> bool:
    return hasattr(type(scheduler), _OWN_CLASS)


def _step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
    """The ``step`` of a scheduler that rests: nothing, unless it turns out that the update was applied."""
    _find_out[scheduler]()
    if not _is_resting(scheduler):  # what was found out has made it what it was
        scheduler.step(*args, **kwargs)


def _reduce(scheduler: LRScheduler, protocol: Any) -> Any:
    """``__reduce_ex__`` as of an instance of its own class: resting is no part of what a scheduler is.

    In the form of protocol 1, which every protocol can hold; later ones insist that the class is that of the instance.
    """
    own_class = getattr(scheduler, _OWN_CLASS)
    reduced = own_class.__reduce_ex__(scheduler, 1)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *rest = reduced
    arguments = tuple(own_class if argument is type(scheduler) else argument for argument in arguments)
    return (function, arguments, *rest)


def _resting_class(own_class: type[LRScheduler]) -> type:
    """A subclass of ``own_class`` of the same memory layout, so that instances can become one and go back."""
    if own_class not in _resting_classes:
        body = {
            "__slots__": (),
            "__module__": own_class.__module__,
            "__qualname__": own_class.__qualname__,
            _OWN_CLASS: own_class,
            "step": _step,
            "__reduce_ex__": _reduce,
        }
        _resting_classes[own_class] = type(own_class.__name__, (own_class,), body)
    return _resting_classes[own_class]
