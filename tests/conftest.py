"""One thread for each of the processes that tests are spread over, so that they do not take cores from each other."""

from __future__ import annotations

import os

# pytest-xdist names its workers so; a worker reads this file before anything imports torch, which reads the variable
# once. Programs that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
