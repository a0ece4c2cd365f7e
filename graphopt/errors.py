"""Every error graphopt raises. Each message says what was expected, what came, and what to do."""

from __future__ import annotations


class GraphoptError(Exception):
    """Base of all graphopt errors."""


class CaptureError(GraphoptError):
    """The model cannot be turned into a graph; the message names the user's source line and a way out."""


class OutputError(GraphoptError, ValueError):
    """A requested output or loss does not exist, or the loss cannot be differentiated."""


class UnsupportedError(GraphoptError, ValueError):
    """The request is understood and deliberately refused; the message says what to do instead."""


class BatchError(GraphoptError, ValueError):
    """A batch does not fit the model's signature."""


class ProgramError(GraphoptError):
    """A Program breaks the rules of the IR."""


class PassError(GraphoptError):
    """A pass broke its contract; carries the program text around the node and how to reproduce it."""


class PipelineError(GraphoptError, ValueError):
    """A pipeline is not well formed: unknown pass, wrong option, wrong order or wrong kind of pass."""


class StateError(GraphoptError):
    """Training state is missing, mismatched, or left incomplete by a failure inside an update."""


class OffloadError(GraphoptError):
    """A value could not be sent to far memory or brought back; the message says what to change."""


class DataError(GraphoptError, ValueError):
    """A file or text given by the user cannot be used."""


class BudgetError(GraphoptError, ValueError):
    """A step cannot be made to fit into its budget. ``smallest_bytes``: the smallest budget that some plan meets."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
