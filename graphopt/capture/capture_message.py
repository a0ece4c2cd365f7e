"""The text of a CaptureError made from whatever export raised: the user's line, torch's first line, a way out."""

from __future__ import annotations

import re
import traceback

from graphopt.capture.origins import UNKNOWN_LINE, own_line, user_frame

_REPORT_IT = re.compile(r"[^.]*(file an issue|open an issue|report this)[^.]*(\.|$)", re.IGNORECASE)


def capture_message(error: BaseException) -> str:
    """Where the model cannot be captured, what torch said, and what to do."""
    text = str(error).strip()
    where = own_line(traceback.extract_tb(error.__traceback__)) or ": ".join(filter(None, user_frame(text)))
    first_line = _REPORT_IT.sub("", text.splitlines()[0]).strip() if text else ""
    what = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return f"the model cannot be captured at\n  {where or UNKNOWN_LINE}\n{what}\nwhat to do: {_way_out(str(error))}"


def _way_out(message: str) -> str:
    if "data-dependent" in message or "Could not guard" in message or "GuardOnDataDependent" in message:
        return (
            "this line looks at the content of a tensor; replace the Python `if`, `.item()` or tensor-sized loop by "
            "torch.where, masking, or a plain Python number passed in the batch"
        )
    if "fake tensor in the exported program constant" in message:
        return (
            "a tensor of this forward went around the graph, usually through .data or a cache outside of the model; "
            "use .detach() (or torch.no_grad()) in place of .data, and buffers in place of caches"
        )
    if "Cannot copy out of meta" in message or "numpy" in message:
        return "this line leaves torch (numpy, .tolist(), printing); keep the computation in tensors"
    return (
        "run the model once without graphopt on the same batch; if that works, move what this line does out of "
        "forward(), or write it with tensor operations only"
    )
