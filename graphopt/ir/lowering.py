"""Rewriting a forward graph to mixed precision, operator by operator, as the rules say."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops, precision_ops
from graphopt.ir.casting import Casts
from graphopt.ir.module_paths import matching_pattern
from graphopt.ir.precision_ops import Role
from graphopt.ir.precision_rules import Kind, Rule, Want, has_number_beyond, rule_of
from graphopt.ir.precision_table import PrecisionRow
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, dtype_name
from graphopt.ir.storage import tensors_in
from graphopt.ir.text import target_text

aten = torch.ops.aten

_TWO_BYTES = (torch.bfloat16, torch.float16)
_LOWERABLE = (torch.float32, *_TWO_BYTES)
_TABLE = "table: of positions, buffers and constants alone"
_NO_KERNEL = "no kernel of this type on this device"
_UNLEARNED = "no parameter takes part, and a buffer does"


class Lowering:
    """Lowers ``program`` to ``compute``; ``run`` once. Then ``rows`` say what each operator runs in, and ``declined``
    which matrix products were left and why.
    """

    def __init__(self, program: Program, compute: torch.dtype, *, patterns: tuple[str, ...], lowers_sums: bool) -> None:
        self._program = program
        self._compute = compute
        self._patterns = patterns
        self._lowers_sums = lowers_sums
        self._casts = Casts(program)
        self._original = {node: _dtype(node) for node in program.graph.nodes}
        self._kinds: dict[fx.Node, Kind] = {}
        self._learned: set[fx.Node] = set()
        self._parameters: dict[fx.Node, str] = {}
        self._masks: dict[fx.Node, fx.Node] = {}
        self._rows: list[PrecisionRow] = []
        self._num_changed = 0
        self.declined: list[tuple[fx.Node, str]] = []

    @property
    def rows(self) -> tuple[PrecisionRow, ...]:
        """One row for each operator on floats that is more than an arrangement of elements."""
        return tuple(self._rows)

    def run(self) -> int:
        """The number of calls that were added or changed."""
        program = self._program
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True):
            self._kinds[node] = self._input_kind(node, entry.kind)
            if entry.kind is InputKind.PARAM:
                self._learned.add(node)
                self._parameters[node] = entry.name
        for node in program.constants():
            self._kinds[node] = self._constant_kind(node)
        for node in program.ops():
            self._lower(node)
        self._restore_outputs()
        count = self._casts.num_made + self._num_changed
        if count:
            program.refresh()
        return count

    # ---- kinds ---------------------------------------------------------------------------------------------------

    def _input_kind(self, node: fx.Node, kind: InputKind) -> Kind:
        if kind is InputKind.PARAM:
            return self._kind_by_dtype(node, Kind.GIVEN)
        return self._kind_by_dtype(node, Kind.TABLE if kind is InputKind.BUFFER else Kind.RANGE)

    def _constant_kind(self, node: fx.Node) -> Kind:
        values = self._program.constant(node)
        is_large = (
            values.is_floating_point()
            and values.numel() > 0
            and bool((values.isfinite() & (values.abs() > torch.finfo(self._compute).max)).any())
        )
        return self._kind_by_dtype(node, Kind.RANGE if is_large else Kind.TABLE)

    def _kind_by_dtype(self, node: fx.Node, kind: Kind) -> Kind:
        """``kind`` for float32; what the dtype says for all else."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return kind
        dtype = _dtype(node)
        if dtype in _TWO_BYTES:
            return Kind.LOW
        return kind if dtype is torch.float32 else Kind.OTHER

    def _operand_kinds(self, node: fx.Node) -> dict[fx.Node, Kind]:
        """The kinds of the operands that hold floats, the mask of an attention left out."""
        mask = precision_ops.mask_argument(node)
        kinds = {operand: self._kinds[operand] for operand in node.all_input_nodes if operand is not mask}
        return {operand: kind for operand, kind in kinds.items() if kind is not Kind.OTHER}

    # ---- one operator --------------------------------------------------------------------------------------------

    def _lower(self, node: fx.Node) -> None:
        if any(operand in self._learned for operand in node.all_input_nodes):
            self._learned.add(node)
        kinds = self._operand_kinds(node)
        weights = tuple(self._parameters[operand] for operand in kinds if operand in self._parameters)
        rule = self._rule(node, kinds)
        self._apply(node, rule)
        self._kinds[node] = self._result_kind(node, rule, kinds)
        made = node.meta["val"]
        if rule.settles and isinstance(made, torch.Tensor) and made.dtype is torch.float32:
            self._casts.settle(node, self._compute)
            self._kinds[node] = Kind.LOW
        if ops.is_conversion(node) and set(node.kwargs) == {"dtype"} and _dtype(node) == self._compute:
            self._casts.know(node.args[0], node)  # type: ignore[arg-type]
        if kinds and precision_ops.role(node) is not Role.MOVES:
            self._rows.append(self._row(node, rule, weights))

    def _rule(self, node: fx.Node, kinds: dict[fx.Node, Kind]) -> Rule:
        found = set(kinds.values())
        if found <= {Kind.TABLE} and node not in self._learned:
            kind = Kind.RANGE if has_number_beyond(node, self._compute) else Kind.TABLE
            return Rule(Want.AS_MADE, kind, _TABLE)
        if not found:
            return Rule(Want.AS_MADE, Kind.TABLE, "made of integers")
        if self._is_foreign(node):
            return Rule(Want.ORIGINAL, Kind.WIDE, "float64 or complex operands")
        pattern = matching_pattern(self._program.origin(node).module, self._patterns)
        is_product = precision_ops.role(node) in (Role.MATRIX, Role.LINEAR_LOSS)
        if pattern is not None:
            reason = f"kept by keep_fp32 pattern {pattern!r}"
            if is_product:
                self.declined.append((node, reason))
            return Rule(Want.ORIGINAL, Kind.MIXED, reason)
        if is_product and Kind.TABLE in found and node not in self._learned:
            self.declined.append((node, _UNLEARNED))
            return Rule(Want.ORIGINAL, Kind.RANGE, _UNLEARNED)
        if is_product and precision_ops.lacks_kernel(node, self._compute):
            self.declined.append((node, _NO_KERNEL))
            return Rule(Want.ORIGINAL, Kind.MIXED, _NO_KERNEL)
        return rule_of(node, found, self._compute, lowers_sums=self._lowers_sums)

    def _is_foreign(self, node: fx.Node) -> bool:
        """Whether float64 (numbers in tensors left out, which follow) or complex values take part."""
        values = [node.meta["val"], *(operand.meta["val"] for operand in node.all_input_nodes)]
        tensors = [tensor for value in values for tensor in tensors_in(value)]
        result_is_wide = any(tensor.dtype is torch.float64 for tensor in tensors_in(values[0]))
        return result_is_wide or any(
            tensor.is_complex() or (tensor.dtype is torch.float64 and tensor.dim() > 0) for tensor in tensors
        )

    def _result_kind(self, node: fx.Node, rule: Rule, kinds: dict[fx.Node, Kind]) -> Kind:
        if ops.is_getitem(node):
            return self._kind_by_dtype(node, next(iter(kinds.values()), Kind.OTHER))
        return self._kind_by_dtype(node, rule.result)

    def _apply(self, node: fx.Node, rule: Rule) -> None:
        before = (node.args, node.kwargs)
        node.args = tuple(
            fx.map_arg(argument, lambda operand: self._operand(node, operand, rule)) for argument in node.args
        )
        node.kwargs = fx.map_arg(node.kwargs, lambda operand: self._operand(node, operand, rule))
        if rule.sums_wide and _type_of_sum(node) is None:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
        self._infer(node)
        self._num_changed += (node.args, node.kwargs) != before

    def _infer(self, node: fx.Node) -> None:
        try:
            node.meta["val"] = self._program.infer(node)
        except RuntimeError:
            if not ops.is_call(node, aten.view.default):
                raise
            # Operators may lay their result out differently for another dtype; then the view is a copy.
            node.target = aten.reshape.default
            node.meta["val"] = self._program.infer(node)

    # ---- operands ------------------------------------------------------------------------------------------------

    def _operand(self, node: fx.Node, operand: fx.Node, rule: Rule) -> fx.Node:
        """What ``node`` reads in the place of ``operand``."""
        made = self._casts.stand_in(operand)
        if _dtype(made) not in _LOWERABLE or self._kinds[operand] is Kind.OTHER:
            return made
        if operand is precision_ops.mask_argument(node) and rule.operands is Want.LOW:
            return self._mask(made, node)
        dtype = self._wanted(node, operand, rule)
        return made if dtype is None else self._casts.get(operand, dtype, node)

    def _wanted(self, node: fx.Node, operand: fx.Node, rule: Rule) -> torch.dtype | None:
        """The dtype that ``node`` needs of ``operand``; None: as made."""
        is_first = bool(node.args) and operand is node.args[0]
        kind = self._kinds[operand]
        if rule.first_alone and not is_first:
            return None
        if precision_ops.role(node) is Role.WHOLE and not is_first and rule.operands is not Want.ORIGINAL:
            return self._wanted_weight(node)
        match rule.operands:
            case Want.LOW:
                return self._compute
            case Want.WIDE:
                return torch.float32
            case Want.ORIGINAL:
                return self._original[operand]
            case Want.KEPT_LOW if kind is Kind.MIXED:
                return self._compute
        return None

    def _wanted_weight(self, node: fx.Node) -> torch.dtype | None:
        """The dtype of the weights of a normalisation whose input has got its own."""
        main = node.args[0]
        assert isinstance(main, fx.Node), f"{node.name} normalises no tensor"
        is_low = self._kinds[main] in (Kind.LOW, Kind.MIXED)
        if not is_low:
            return torch.float32
        device = self._program.spec(self._casts.stand_in(main)).device
        return None if precision_ops.takes_wide_weights(node, device) else self._compute

    def _mask(self, mask: fx.Node, reader: fx.Node) -> fx.Node:
        """A float mask in the compute type; a finite number below its range becomes its lowest, not -inf."""
        if _dtype(mask) is not torch.float32 or self._kinds.get(mask) is not Kind.RANGE:
            return self._casts.get(mask, self._compute, reader)
        if mask not in self._masks:
            insert = self._program.insert_before
            bounded = insert(reader, aten.clamp_min.default, mask, torch.finfo(self._compute).min)
            closed = insert(reader, aten.eq.Scalar, mask, -math.inf)
            kept = insert(reader, aten.masked_fill.Scalar, bounded, closed, -math.inf)
            self._num_changed += 3
            self._masks[mask] = self._casts.get(kept, self._compute, reader)
        return self._masks[mask]

    def _row(self, node: fx.Node, rule: Rule, weights: tuple[str, ...]) -> PrecisionRow:
        tensors = list(tensors_in(node.meta["val"]))
        dtype = dtype_name(tensors[0].dtype) if tensors else "number"
        kept = _dtype(self._casts.stand_in(node))
        if rule.settles and kept in _TWO_BYTES:
            dtype = f"{dtype} -> {dtype_name(kept)}"
        return PrecisionRow(
            value=node.name,
            operator=target_text(node.target),
            role=str(precision_ops.role(node)),
            dtype=dtype,
            reason=rule.reason,
            origin=self._program.origin(node),
            weights=weights,
        )

    # ---- the end -------------------------------------------------------------------------------------------------

    def _restore_outputs(self) -> None:
        """Return every output in the dtype that the signature promises."""
        output = self._program.output_node()
        values = []
        for value in self._program.output_values():
            dtype = self._original.get(value) if isinstance(value, fx.Node) else None
            values.append(self._casts.get(value, dtype, output) if dtype in _LOWERABLE else value)
        if tuple(values) != self._program.output_values():
            output.args = (tuple(values),)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node that holds one tensor; None for all others."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _type_of_sum(node: fx.Node) -> torch.dtype | None:
    """The dtype argument of a reduction, if it is given."""
    op = ops.overload(node)
    assert op is not None, f"{node.name} is no operator"
    for position, schema_argument in enumerate(op._schema.arguments):
        if schema_argument.name == "dtype":
            found: Any = ops.argument(node, position, "dtype")
            return found  # type: ignore[no-any-return]
    return None
