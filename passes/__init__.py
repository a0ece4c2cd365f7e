"""The passes that ship with graphopt: one pass, one file, the file named as the pass."""

from __future__ import annotations

from collections.abc import Mapping

from graphopt.pipeline.pass_base import Pass

BY_NAME: Mapping[str, type[Pass]] = {}
