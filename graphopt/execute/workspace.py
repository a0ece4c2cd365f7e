"""What operators allocate inside themselves, found by running each distinct call once under the allocator's eye.

Pointwise operators of one dtype and without numbers, views, factories and plain matrix products allocate nothing but
their result. Everything else (convolutions, attention, normalisation backward, reductions, ...) is run once for each
distinct combination of operator, shapes, strides and options, on zeros; what it allocates beyond its results is
remembered for the process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphopt.execute.measure import memory_changes
from graphopt.execute.paging.trial import trial_arguments
from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec

log = logging.getLogger(__name__)

# A size no operator allocates: prime and odd.
_MARKER_BYTES = 7919

_KNOWN: dict[Any, int] = {}


class MeasuredWorkspace:
    """A Workspace that answers from measurements of this process; ``learn`` a program before it is asked."""

    def learn(self, program: Program) -> None:
        """Measure every call of ``program`` that has not been measured before."""
        unknown: dict[Any, fx.Node] = {}
        for node in program.ops():
            if _may_allocate(node):
                key = _key(node)
                if key is not None and key not in _KNOWN:
                    unknown.setdefault(key, node)
        if unknown:
            _measure(unknown)

    def __call__(self, node: fx.Node) -> int:
        """Bytes that ``node`` allocates and frees inside itself."""
        if not _may_allocate(node):
            return 0
        key = _key(node)
        if key is not None and key not in _KNOWN:
            _measure({key: node})  # a pass made it after the program was learned
        return _KNOWN.get(key, 0)


def _may_allocate(node: fx.Node) -> bool:
    if ops.is_getitem(node) or ops.is_scalar_op(node) or ops.is_view(node) or ops.is_factory(node):
        return False
    # They allocate their result alone, and cannot be tried: a ticket of zeros means nothing.
    if ops.is_transfer(node) or ops.is_page_in(node):
        return False
    tensors = list(_tensor_values(node.all_input_nodes))
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    if ops.is_pointwise(node):
        # With mixed dtypes, that of the result included, the CPU converts operands in temporaries. A number where the
        # operator wants a tensor becomes one, and is converted.
        return len({tensor.dtype for tensor in (*tensors, *_tensor_values([node]))}) > 1 or _wraps_number(node)
    return not (ops.is_matmul(node) and all(_is_blas_ready(tensor) for tensor in tensors))


def _wraps_number(node: fx.Node) -> bool:
    """Whether a number among the arguments of ``node`` is made a tensor of."""
    op = ops.overload(node)
    if op is None:
        return False
    if op._overloadname.endswith("Scalar"):  # written by torch with the operator that takes a tensor
        return True
    given = zip(op._schema.arguments, node.args, strict=False)
    return any(
        isinstance(argument.type, torch.TensorType) and isinstance(_content(value), (int, float, complex))
        for argument, value in given
    )


def _content(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def _is_blas_ready(tensor: torch.Tensor) -> bool:
    """Whether a matrix can be read as it lies: rows or columns contiguous, the other stride at least as large."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return False
    if tensor.dim() < 2:
        return tensor.is_contiguous()
    (rows, columns), (row_stride, column_stride) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = column_stride == 1 and row_stride >= max(columns, 1)
    by_columns = row_stride == 1 and column_stride >= max(rows, 1)
    return (by_rows or by_columns) and (tensor.dim() == 2 or tensor.is_contiguous() or by_columns)


def _tensor_values(nodes: Iterable[fx.Node]) -> Iterable[torch.Tensor]:
    return (value for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor))


def _key(node: fx.Node) -> Any:
    def part(value: Any) -> Any:
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            return TensorSpec.of(held) if isinstance(held, torch.Tensor) else type(held).__name__
        if isinstance(value, (list, tuple)):
            return tuple(part(item) for item in value)
        return (type(value).__name__, str(value))

    arguments = tuple(part(value) for value in node.args)
    keywords = tuple((name, part(value)) for name, value in sorted(node.kwargs.items()))
    return (node.target, arguments, keywords, torch.get_num_threads())


def _measure(unknown: dict[Any, fx.Node]) -> None:
    for key, node in unknown.items():
        arguments = trial_arguments(node) or fx.map_arg((node.args, node.kwargs), _real_zeros)

        def call(node: fx.Node = node, arguments: Any = arguments) -> Any:
            return node.target(*arguments[0], **arguments[1])  # type: ignore[operator]

        try:
            with torch.random.fork_rng(), torch.no_grad():
                groups = memory_changes([call], marker_bytes=_MARKER_BYTES)
        except RuntimeError as error:
            # torch's fake values can differ from real ones in dtype (statistics of a mixed-precision layer_norm), and
            # then this trial call fails where the step's own will not.
            log.warning("the workspace of %s is unknown and counted as 0: %s", node.target, error)
            groups = []
        _KNOWN[key] = _beyond_results(groups[0]) if groups else 0


def _beyond_results(changes: list[int]) -> int:
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak - level


def _real_zeros(node: fx.Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    spec = TensorSpec.of(value)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).zero_()
