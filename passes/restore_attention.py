"""Give attention back the ``is_causal`` and ``enable_gqa`` that a model's eager code uses and its capture lost.

Before (transformers under ``torch.export``: a mask made from positions, key and value heads repeated)::

    mask = aten.expand.default(and_2, [B, -1, T, T])
    key = aten._unsafe_view.default(clone, [B, H, T, D])        # clone of expand of unsqueeze of k
    out = aten.scaled_dot_product_attention.default(q, key, value, mask, scale=0.25)

After::

    out = aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True, scale=0.25, enable_gqa=True)

A mask that is all open disappears; one that is exactly causal (query i sees keys 0..i, as many queries as keys, in
every batch and head) becomes ``is_causal=True``. The mask is evaluated, block by block, never stored. Heads are
regrouped only where a mask disappears here, because that is what eager does: transformers 5.24 repeats heads exactly
where it passes a mask (``transformers/integrations/sdpa_attention.py``, ``use_gqa_in_sdpa``). ``regroup_all`` also
regroups calls that came without a mask; their gradients then differ from eager's in the last bits.

Saves, for the whole of forward and backward, per call: ``B*T*T`` elements, because each call turns a boolean mask into
floats and keeps them for backward, and ``2 * B*(H - H_kv)*T*D`` elements of repeated keys and values. On a GPU it also
lets the flash kernel be chosen. The ops that made the mask and the heads become dead: run ``drop-dead`` after it.
Costs one evaluation of each mask while compiling: on 2 CPU cores 0.04 s for 4,096 x 4,096 and 1.1 s for
32,768 x 32,768, in 32 MiB.

Numerics. For finite queries, keys and values, on CPU (torch 2.13; f32, f64, bf16, f16; flash and math kernels; dropout
too): removing a mask is bit-equal in values and gradients; regrouping is bit-equal in values, while gradients of k and
v are summed over the heads of a group in another order (in f32 1e-6, in bf16 one rounding less). On a GPU another
kernel runs, which rounds differently. The result equals what eager computes.

Refuses a mask that depends on an input (padding, given positions, a learned bias) or is neither open nor causal (a
sliding window shorter than the sequence, a prefix), and heads that eager repeats as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.constants import ConstantValues, NotConstant
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

_LARGEST_GROUPED_HEAD = 256
"""Elements; transformers 5.24 repeats heads that are larger, or whose keys and values differ in size."""

_AS_GOOD_AS_MINUS_INFINITY = -1e38
"""The lowest finite f32, bf16 or f64, used as a mask: exp(score + it - largest) is 0 unless a score exceeds 1e38.
The lowest f16, -65504, is not that far from real scores and does not count."""


class _MaskKind(Enum):
    ABSENT = auto()
    OPEN = auto()
    CAUSAL = auto()
    NEEDED = auto()


@dataclass(frozen=True)
class _Mask:
    """What a mask was found to be; ``reason`` says why it is needed, if it is."""

    kind: _MaskKind
    reason: str = ""


@dataclass(frozen=True)
class _Attention:
    """The arguments of one attention call."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    dropout: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @classmethod
    def of(cls, node: fx.Node) -> _Attention:
        """The arguments that ``node`` passes, defaults filled in."""
        schema = _ATTENTION._schema.arguments
        given = {a.name: ops.argument(node, position, a.name, a.default_value) for position, a in enumerate(schema)}
        names = {"mask": "attn_mask", "dropout": "dropout_p"}
        return cls(**{field: given[names.get(field, field)] for field in cls.__dataclass_fields__})

    def insert_before(self, program: Program, anchor: fx.Node) -> fx.Node:
        """A new call with these arguments."""
        keywords: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        if self.enable_gqa:
            keywords["enable_gqa"] = True
        positional = (self.query, self.key, self.value, self.mask, self.dropout, self.is_causal)
        return program.insert_before(anchor, _ATTENTION, *positional, **keywords)


@dataclass(frozen=True)
class _RepeatedHeads:
    """Heads made by repeating each head of ``source`` ``factor`` times in a row."""

    source: fx.Node
    factor: int


@dataclass(frozen=True)
class RestoreAttention(Pass):
    """See the module's docstring; ``regroup_all`` also regroups heads where eager repeats them."""

    name: ClassVar[str] = "restore-attention"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    regroup_all: bool = False

    def apply(self, program: Program) -> Changes:
        """Restore every attention call whose mask or repeated heads are proven unnecessary."""
        masks = _MaskReader(program)
        count = 0
        refusals: list[Refusal] = []
        for node in program.ops():
            if not ops.is_call(node, _ATTENTION):
                continue
            call = _Attention.of(node)
            mask = masks.read(program, call)
            restored, reasons = self._restore(program, call, mask)
            if restored != call and not _replace(program, node, restored):
                restored, reasons = call, ("without the mask the result would have another layout",)
            count += restored != call
            refusals.extend(Refusal.at(node, reason) for reason in reasons)
        if count:
            program.refresh()  # views of a replaced call must share the memory of the new one
        return Changes(count, tuple(refusals))

    def _restore(self, program: Program, call: _Attention, mask: _Mask) -> tuple[_Attention, tuple[str, ...]]:
        if mask.kind is _MaskKind.NEEDED:
            return call, (mask.reason,)
        if mask.kind is not _MaskKind.ABSENT:
            call = replace(call, mask=None, is_causal=mask.kind is _MaskKind.CAUSAL)
        key, value = (_repeated_heads(program, heads) for heads in (call.key, call.value))
        if key is None and value is None:
            return call, ()
        reason = self._keep_heads_because(program, call, mask, key, value)
        if reason or key is None or value is None:
            return call, (f"key and value heads stay repeated: {reason}",)
        return replace(call, key=key.source, value=value.source, enable_gqa=True), ()

    def _keep_heads_because(
        self, program: Program, call: _Attention, mask: _Mask, key: _RepeatedHeads | None, value: _RepeatedHeads | None
    ) -> str:
        """Why the repeated heads must stay, or the empty string."""
        if key is None or value is None:
            return f"only the {'values' if key is None else 'keys'} are repeated"
        if key.factor != value.factor:
            return f"keys {key.factor} times, values {value.factor} times"
        if mask.kind is _MaskKind.ABSENT and not self.regroup_all:
            return "the model itself repeats them here (option regroup_all regroups them)"
        key_size, value_size = (program.spec(heads).shape[-1] for heads in (call.key, call.value))
        if key_size != value_size or key_size > _LARGEST_GROUPED_HEAD:
            return f"eager groups equal sizes up to {_LARGEST_GROUPED_HEAD}; keys have {key_size}, values {value_size}"
        return ""


class _MaskReader:
    """Evaluates each mask once, though every layer uses it."""

    def __init__(self, program: Program) -> None:
        self._constants = ConstantValues(program)
        self._found: dict[fx.Node, _Mask] = {}

    def read(self, program: Program, call: _Attention) -> _Mask:
        """What the mask of ``call`` is."""
        if call.mask is None:
            return _Mask(_MaskKind.ABSENT)
        if call.mask not in self._found:
            self._found[call.mask] = self._classify(call.mask)
        found = self._found[call.mask]
        mask_sizes = program.spec(call.mask).shape[-2:]
        call_sizes = (program.spec(call.query).shape[-2], program.spec(call.key).shape[-2])
        if found.kind is not _MaskKind.CAUSAL or mask_sizes == call_sizes == call_sizes[::-1]:
            return found
        queries, keys = call_sizes
        if mask_sizes == call_sizes:
            return _Mask(_MaskKind.NEEDED, f"mask is causal, but there are {queries} queries and {keys} keys")
        return _Mask(_MaskKind.NEEDED, f"mask of {list(mask_sizes)} is spread over {queries} queries and {keys} keys")

    def _classify(self, mask: fx.Node) -> _Mask:
        blocks = self._constants.blocks(mask)
        if isinstance(blocks, NotConstant):
            return _Mask(_MaskKind.NEEDED, f"mask {blocks.reason}")
        if mask.meta["val"].dim() < 2:
            return _Mask(_MaskKind.NEEDED, "mask has less than two dimensions")
        is_open, not_causal = True, ""
        for block in blocks:
            seen = _seen(block.values)
            if seen is None:
                return _Mask(_MaskKind.NEEDED, "mask adds numbers other than 0 and minus infinity")
            first_row = block.start[-2]
            is_open = is_open and bool(seen.all())
            not_causal = not_causal or _not_causal_because(seen.reshape(seen.shape[-2:]), first_row)
            if not_causal and not is_open:
                return _Mask(_MaskKind.NEEDED, not_causal)
        return _Mask(_MaskKind.OPEN if is_open else _MaskKind.CAUSAL)


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Where a mask lets a query see a key; None if it is not of the kind that only hides."""
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(mask.dtype).min
    hidden = mask == float("-inf")
    if lowest < _AS_GOOD_AS_MINUS_INFINITY:
        hidden |= mask == lowest
    seen = mask == 0
    return seen if bool((seen | hidden).all()) else None


def _not_causal_because(seen: torch.Tensor, first_row: int) -> str:
    """Why rows ``first_row...`` of a mask are not causal, or the empty string. seen: b1[rows, keys]."""
    causal = torch.ones_like(seen, memory_format=torch.contiguous_format).tril(first_row)
    if torch.equal(seen, causal):
        return ""
    first_wrong = int((seen != causal).flatten().byte().argmax())
    row, column = divmod(first_wrong, seen.shape[1])
    if seen[row, column]:
        return f"mask is not causal: row {first_row + row} sees column {column}"
    window = int(seen[row].sum())
    if window and torch.equal(seen, causal & ~causal.tril(first_row - window)):
        return f"mask is a sliding window of {window}"
    return f"mask is not causal: row {first_row + row} does not see column {column}"


def _repeated_heads(program: Program, heads: fx.Node) -> _RepeatedHeads | None:
    """How ``heads`` [B,H,T,D] were made by ``source[:, :, None].expand(B, H/n, n, T, D).reshape(B, H, T, D)``, if so.

    Between source, expand and result the elements keep their row-major order, so the shapes alone prove it.
    """
    shape = program.spec(heads).shape
    expand = heads
    while ops.keeps_order(expand):
        expand = expand.all_input_nodes[0]
    if len(shape) != 4 or not ops.is_expand(expand):
        return None
    batch, num_heads, length, size = shape
    grouped = program.spec(expand).shape
    if len(grouped) != 5 or grouped != (batch, grouped[1], grouped[2], length, size):
        return None
    num_groups, factor = grouped[1:3]
    source = expand.all_input_nodes[0]
    if num_groups * factor != num_heads or program.spec(source).shape != (batch, num_groups, 1, length, size):
        return None
    while program.spec(source).shape != (batch, num_groups, length, size):
        if not ops.keeps_order(source):
            return None
        source = source.all_input_nodes[0]
    return _RepeatedHeads(source, factor)


def _replace(program: Program, node: fx.Node, restored: _Attention) -> bool:
    """Whether ``restored`` could take the place of ``node``: its result must have the same spec."""
    replacement = restored.insert_before(program, node)
    if program.spec(replacement) != program.spec(node):
        program.erase_if_unused(replacement)
        return False
    program.replace(node, replacement)
    return True
