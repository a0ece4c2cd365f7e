"""Silence while exporting: torch reports a failure at length, in logs and on stderr; the CaptureError says it shorter.

Private torch: ``torch.export._trace`` prints the unfinished graph of a failed export (torch 2.11 to 2.14).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.export._trace as export_trace

_NOISY_LOGGERS = ("torch.fx.experimental", "torch.export", "torch._subclasses.fake_tensor")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Inside, export logs only what is critical and prints nothing."""
    existing = [name for name in logging.root.manager.loggerDict if name.startswith(_NOISY_LOGGERS)]
    loggers = [logging.getLogger(name) for name in dict.fromkeys((*_NOISY_LOGGERS, *existing))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    vars(export_trace)["print"] = lambda *_, **__: None  # hides the builtin from that module alone
    try:
        yield
    finally:
        del vars(export_trace)["print"]
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
