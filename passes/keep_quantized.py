"""Activations that wait for the backward part wait as FP8 codes, one byte an element.

Before (recipe tensorwise; a feed-forward block with a relu, and one with a SiLU)::

    relu: 'bf16[T,F]' = aten.relu.default(up)
    codes: 'f8e4m3[T,F]', scale: 'f32[1,1]' = graphopt.quantize_fp8.default(relu, 'e4m3', [0, 0], False)
    down = graphopt.fp8_matmul.default(codes, scale, ...)                              # forward
    silu: 'bf16[T,F]' = aten.silu.default(gate)
    ...
    mul = aten.mul.Tensor(grad, silu)                                                  # backward
    threshold = aten.threshold_backward.default(grad_1, relu, 0)
    mm_7 = graphopt.fp8_matmul.default(t(grad_codes), ..., codes, scale, ...)          # weight gradient

After (``saved="all"``): ``relu`` and ``silu`` die in the forward part::

    silu_codes, silu_scale = graphopt.quantize_fp8.default(silu, 'e4m3', [1, 128], True)
    ...
    silu_again = graphopt.dequantize_fp8.default(silu_codes, silu_scale, [1, 128], torch.bfloat16)
    mul = aten.mul.Tensor(grad, silu_again)
    zeros: 'u8[T*F/8]' = graphopt.pack_bits.default(relu)                               # forward
    relu_again = graphopt.unpack_bits.default(zeros, [T, F], torch.bfloat16)            # ones where relu is not 0
    threshold = aten.threshold_backward.default(grad_1, relu_again, 0)

What is kept of a value follows from who reads it in the backward part:

- FP8 products alone: the codes that they read. This is exact. With ``saved="none"`` the value itself is kept, and the
  same codes are made of it again.
- Others too (``saved="products"`` and "all"): they read what the codes stand for, so that one byte is kept, not three.
- Others alone (``saved="all"``): codes are made for keeping, E4M3 with a power of two for each 128 elements.
- The backward of a relu, of the relu's own result: a bit an element that says where it is not zero, beside the codes if
  others read them. This is exact; codes are not asked, as what is small beside the number that made the scale is zero
  there.
- Float32 copies of a value in two bytes are made again from it (``saved="all"``), and codes are padded again, once for
  all readers, where they or what they are made of is kept anyway. This is exact.

Saves 1 byte of 2, or 3 of 4, an element. Costs a pass over each value that is quantized and a pass for each reader. The
values of the forward part stay as they are, and so does the loss. What is decided here does not depend on what else is
computed again or moved: with and without checkpointing, gradients are bit-equal.

Refuses, with a row that says why, what ``Fp8Tolerance`` objects to: operands and output of attention, results of a
softmax, random draws, statistics, what products in two bytes read, what is compared, divided by or subtracted from one,
what an operator that jumps reads, what the gradient of the loss itself is made from; and outputs. Then the value is
kept as it is, and its codes are made again rather than kept beside it. Weights are ``recast-weights``' affair. Values
below 4 KiB are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.fp8 import Recipe, Tensorwise, recipe_of
from graphopt.ir import ops
from graphopt.ir.decisions import Action, Decision
from graphopt.ir.fp8_codes import Codes, codes_of, is_quantize, make_again, make_one_layout
from graphopt.ir.fp8_padding import is_padding
from graphopt.ir.fp8_rows import covers, make_rows, objection_to_rows, rows_of, value_again
from graphopt.ir.fp8_tolerance import Fp8Tolerance
from graphopt.ir.kept_values import ForwardValue, LateUse, forward_values
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import dtype_name
from graphopt.ir.twins import insert_twin
from graphopt.ir.view_copies import read_instead
from graphopt.ir.zero_masks import asks_for_zeros, has_zero_mask, pack_zeros, zeros_again
from graphopt.pipeline.pass_base import Changes, Numerics, Pass
from graphopt.planner.costs import node_seconds
from graphopt.planner.machine_rates import machine_rates

_DEFAULT = Tensorwise()

_NO_PRODUCT = "no product reads it in FP8"

_WORTH_QUANTIZING = 4 * 2**10
"""Bytes of a value. Below, two calls cost more than the memory is worth."""


@dataclass(frozen=True)
class KeepQuantized(Pass):
    """See the module's docstring. ``recipe``: a ``graphopt.fp8`` value, its name or its text; its ``saved`` counts."""

    recipe: Recipe | str = _DEFAULT

    name: ClassVar[str] = "keep-quantized"
    stage: ClassVar[Stage] = Stage.JOINT
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    tolerance: ClassVar[float | None] = 0.25  # a value in each of four layers in a row, 2**-4 each
    after: ClassVar[tuple[str, ...]] = ("tag-fp8", "insert-quantize")

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", recipe_of(self.recipe))

    def apply(self, program: Program) -> Changes:
        """Act on each value that the backward part reads, and write a row about it."""
        if not program.fp8.rows:
            return Changes(0)
        saved = recipe_of(self.recipe).saved
        program.refresh()  # views of what an earlier pass exchanged show the memory of what stands there now
        count = _make_copies_again(program, saved)
        keeper = _Keeper(program, saved)
        large = [value for value in keeper.values if _is_large(value)]  # before anything is erased
        count += sum(keeper.settle(value) for value in large)
        program.decisions = program.decisions.joined(*keeper.rows)
        if count:
            program.refresh()
        return Changes(count)


def _make_copies_again(program: Program, saved: str) -> int:
    """Let the backward part make copies of what is kept anyway again; how many."""
    copies = _Copies(program, saved)
    position = {node: i for i, node in enumerate(program.ops())}
    rows = []
    for value in copies.values:
        if not value.is_kept or value.is_returned or not _is_large(value):
            continue
        reason = copies.reason(value.base)
        if reason is None:
            continue
        base: Any = value.base
        ordered = sorted(value.uses, key=lambda use: position[use.user])
        # Codes take a byte an element: one padded copy for all readers. Wide numbers wait for none.
        groups = [ordered] if is_padding(base) else [[use] for use in ordered]
        for uses in groups:
            anchor = uses[0].user
            copy = insert_twin(program, anchor, base, base.target, *base.args, **base.kwargs)
            read_instead(program, uses, anchor, {base: copy})
        seconds = node_seconds(base, machine_rates()) * len(groups)
        origin = str(program.origin(base))
        rows.append(Decision(base.name, Action.RECAST, value.nbytes, seconds, reason, origin, len(groups)))
    program.decisions = program.decisions.joined(*rows)
    if rows:
        program.refresh()
    return len(rows)


class _Copies:
    """Which values of a program are copies of what is kept anyway, and why they are made again."""

    def __init__(self, program: Program, saved: str) -> None:
        self.values = forward_values(program)
        self._program = program
        self._saved = saved
        self._tolerance = Fp8Tolerance(program)
        self._value_of = {node: value for value in self.values for node in value.holders}

    def reason(self, node: fx.Node) -> str | None:
        """Why ``node`` is made again, if it is such a copy: wide numbers, or codes that were padded."""
        if is_padding(node):
            quantized = _quantized(node)
            if quantized is None or not self._tolerance.is_activation(quantized) or not self._is_left(node, quantized):
                return None
            return f"padded codes of {quantized.name}, padded again where they are read; exact"
        if self._saved == "all" and self._tolerance.is_activation(node) and _widens_two_bytes(self._program, node):
            return f"a float32 copy of {node.all_input_nodes[0].name}, made again from it where it is read; exact"
        return None

    def _is_left(self, padded: fx.Node, quantized: fx.Node) -> bool:
        """Whether something that ``padded`` can be made of is kept without it: the codes, or what they are of."""
        codes, source = self._value_of.get(padded.all_input_nodes[0]), self._value_of.get(quantized)
        if codes is not None and codes.is_kept:
            return True
        if source is None:
            return False
        reading, asking = _split_readers(self._program, source)
        if self._saved == "none" or source.is_returned or reading:
            return True
        return bool(asking) and self._tolerance.objection(source, ()) is not None


def _split_readers(program: Program, value: ForwardValue) -> tuple[list[LateUse], list[LateUse]]:
    """Who reads the numbers of ``value`` in the backward part, and who asks for its zeros; quantizers left out."""
    others = [use for use in value.uses if not is_quantize(use.user)]
    asking = [use for use in others if asks_for_zeros(use)] if has_zero_mask(program, value) else []
    return [use for use in others if use not in asking], asking


def _quantized(padded: fx.Node) -> fx.Node | None:
    """What the codes that ``padded`` pads are of; None where it pads no codes."""
    codes = ops.behind_views(padded.all_input_nodes[0])
    call = codes.all_input_nodes[0] if ops.is_getitem(codes) else codes
    return call.all_input_nodes[0] if is_quantize(call) else None


def _widens_two_bytes(program: Program, node: fx.Node) -> bool:
    if not ops.is_conversion(node) or program.spec(node).dtype is not torch.float32:
        return False
    return program.spec(node.all_input_nodes[0]).dtype.itemsize == 2


def _is_large(value: ForwardValue) -> bool:
    """Whether ``value`` is worth two calls; the scales of codes never are."""
    maker = value.base.args[0] if ops.is_getitem(value.base) else value.base
    return value.nbytes >= _WORTH_QUANTIZING and not (isinstance(maker, fx.Node) and is_quantize(maker))


@dataclass(frozen=True)
class _Zeros:
    """What is kept of a value's zeros: in words, the seconds that it costs, and its bytes."""

    text: str = ""
    seconds: float = 0.0
    nbytes: int = 0


class _Keeper:
    """Settles what is kept of each value of a program; ``rows`` says what and why."""

    def __init__(self, program: Program, saved: str) -> None:
        self.rows: list[Decision] = []
        self.values = forward_values(program)
        self._program = program
        self._saved = saved
        self._tolerance = Fp8Tolerance(program)
        self._rates = machine_rates()
        self._value_of = {node: value for value in self.values for node in value.holders}
        self._position = {node: i for i, node in enumerate(program.ops())}

    def settle(self, value: ForwardValue) -> int:
        """Decide about ``value`` and act; 1 if something changed."""
        if not self._tolerance.is_activation(value.base):
            return 0
        if self._program.decisions.of(value.base.name) is not None:
            return 0  # settled before
        codes = self._codes(value)
        read = [each for each in codes if self._uses(each.codes)]
        reading, asking = _split_readers(self._program, value)
        others = [*reading, *asking]
        if not others and not self._waiting(codes):
            return 0
        if self._saved == "none":
            return self._keep_value(value, read, "the recipe keeps nothing in FP8")
        if value.is_returned:
            return self._keep_value(value, read, "an output of the program holds it")
        if not others:
            self._note_codes(value, codes)
            return 0
        objection = self._tolerance.objection(value, reading)
        if objection is None and not reading and not self._waiting(codes) and self._saved != "all":
            objection = _NO_PRODUCT
        if objection is not None:
            return self._keep_value(value, read, objection)
        if not reading:
            return self._keep_zeros(value, codes, asking)
        return self._restore(value, codes, read, reading, asking)

    def _uses(self, node: fx.Node) -> tuple[LateUse, ...]:
        found = self._value_of.get(node)
        return () if found is None else found.uses

    def _codes(self, value: ForwardValue) -> list[Codes]:
        """Codes that the forward part makes of ``value``."""
        calls = dict.fromkeys(user for holder in value.holders for user in holder.users)
        return [each for call in calls if is_quantize(call) and call in self._position for each in codes_of(call)]

    def _waiting(self, codes: Sequence[Codes]) -> list[fx.Node]:
        """What of ``codes`` and their scales the backward part reads, as it was made or padded."""
        parts = [self._value_of[part] for each in codes for part in (each.codes, each.scale) if part in self._value_of]
        padded = [user for part in parts for holder in part.holders for user in holder.users if is_padding(user)]
        return [node for node in dict.fromkeys((*(part.base for part in parts), *padded)) if self._uses(node)]

    def _note_codes(self, value: ForwardValue, codes: list[Codes]) -> None:
        """The products alone read ``value``: nothing is to be done."""
        waiting = self._waiting(codes)
        products = dict.fromkeys(use.user.name for node in waiting for use in self._uses(node))
        reason = f"kept as FP8: the codes that {', '.join(products)} read; exact"
        self._add(value, Action.QUANTIZE, reason, kept_bytes=_nbytes(waiting))

    def _keep_zeros(self, value: ForwardValue, codes: list[Codes], asking: list[LateUse]) -> int:
        """Keep what ``asking`` want to know beside the codes that products read, and nothing else."""
        zeros = self._read_zeros(value, asking)
        waiting = self._waiting(codes)
        beside = "FP8: the codes that products read, and " if waiting else ""
        self._add(
            value,
            Action.QUANTIZE,
            f"kept as {beside}{zeros.text}; exact",
            seconds=zeros.seconds,
            kept_bytes=zeros.nbytes + _nbytes(waiting),
        )
        return 1

    def _read_zeros(self, value: ForwardValue, asking: list[LateUse]) -> _Zeros:
        """Let ``asking`` read a bit for each element of ``value``."""
        if not asking:
            return _Zeros()
        base = value.base
        packed = pack_zeros(self._program, base)
        seconds = node_seconds(packed, self._rates)
        for use in asking:
            again = zeros_again(self._program, packed, base, use.user)
            seconds += node_seconds(again, self._rates)
            read_instead(self._program, (use,), use.user, {base: again})
        readers = ", ".join(dict.fromkeys(use.user.name for use in asking))
        return _Zeros(f"a bit an element for {readers}", seconds, packed.meta["val"].nbytes)

    def _restore(
        self,
        value: ForwardValue,
        codes: list[Codes],
        read: list[Codes],
        others: list[LateUse],
        asking: list[LateUse],
    ) -> int:
        """Let ``others`` read the value as codes have it: those that are kept anyway, that there are, or new ones."""
        base = value.base
        is_whole = self._program.spec(base).nbytes == value.nbytes
        fitting = [each for each in (*read, *codes) if is_whole and covers(self._program, each, base)]
        if not fitting:
            objection = self._objection_to_new(value, read, is_whole=is_whole)
            if objection is not None:
                return self._keep_value(value, read, objection)
        rows = rows_of(self._program, fitting[0]) if fitting else make_rows(self._program, base)
        zeros = self._read_zeros(value, asking)
        seconds = zeros.seconds + (0.0 if rows.made is None else node_seconds(rows.made, self._rates))
        for use in others:
            again, call = value_again(self._program, rows, base, use.user)
            seconds += node_seconds(call, self._rates)
            read_instead(self._program, (use,), use.user, {base: again})
        beside = [each for each in read if not fitting or each is not fitting[0]]
        how = "codes of a product" if fitting else f"E4M3 codes with a scale for each {rows.grid[1]} elements"
        readers = ", ".join(dict.fromkeys(use.user.name for use in others))
        reason = f"kept as FP8: {how}; read back for {readers}" + (f"; {zeros.text}" if asking else "")
        kept_bytes = rows.nbytes + _nbytes(part for each in beside for part in (each.codes, each.scale)) + zeros.nbytes
        self._add(value, Action.QUANTIZE, reason, seconds=seconds, kept_bytes=kept_bytes)
        return 1

    def _objection_to_new(self, value: ForwardValue, read: list[Codes], *, is_whole: bool) -> str | None:
        """Why no codes are made for keeping ``value``, or None."""
        if read:
            return "the codes that products read show only a part of it"
        if self._saved != "all":
            return _NO_PRODUCT
        if not is_whole:
            return "its elements do not fill the memory that holds them"
        return objection_to_rows(self._program, value.base)

    def _keep_value(self, value: ForwardValue, read: list[Codes], why: str) -> int:
        """Keep ``value`` itself; codes that the backward part reads are made of it again."""
        seconds = 0.0
        for each in read:
            uses = tuple(dict.fromkeys((*self._uses(each.codes), *self._uses(each.scale))))
            first = min((use.user for use in uses), key=self._position.__getitem__)
            codes, scale = make_again(self._program, each, first)
            seconds += node_seconds(codes.all_input_nodes[0], self._rates)
            read_instead(self._program, uses, first, {each.codes: codes, each.scale: scale})
            if each.call.users:
                make_one_layout(self._program, each.call)
        name = dtype_name(self._program.spec(value.base).dtype)
        again = "; the codes that products read are made of it again" if read else ""
        self._add(value, Action.SAVE, f"kept in {name}: {why}{again}", seconds=seconds)
        return 1 if read else 0

    def _add(
        self, value: ForwardValue, action: Action, reason: str, *, seconds: float = 0.0, kept_bytes: int | None = None
    ) -> None:
        source = str(self._program.origin(value.base))
        row = Decision(value.base.name, action, value.nbytes, seconds, reason, source, kept_bytes=kept_bytes)
        self.rows.append(row)


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    """What keeping ``nodes`` takes."""
    return sum(node.meta["val"].nbytes for node in nodes)
