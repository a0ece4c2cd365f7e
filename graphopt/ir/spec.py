"""What goes in and out of a Program: tensor specs, inputs, outputs, and the signature that joins them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

_DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype as dumps print it, such as ``bf16``."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, stride (in elements) and device of a tensor value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor``, real or fake."""
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
        return cls(tuple(tensor.shape), tensor.dtype, stride, tensor.device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= int(size)
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps between strides."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ScalarSpec:
    """A Python number that enters a graph, such as a learning rate; it occupies no tensor memory."""

    type_name: str = "float"

    @property
    def nbytes(self) -> int:
        """Always 0."""
        return 0

    def __str__(self) -> str:
        return self.type_name


class InputKind(StrEnum):
    """What an input of a Program is."""

    PARAM = "param"
    BUFFER = "buffer"
    BATCH = "batch"
    TANGENT = "tangent"
    SEED = "seed"
    STATE = "state"
    SCALAR = "scalar"


class OutputKind(StrEnum):
    """What an output of a Program is."""

    USER = "user"
    GRAD = "grad"
    BUFFER_UPDATE = "buffer_update"
    PARAM_UPDATE = "param_update"
    STATE_UPDATE = "state_update"
    BATCH_UPDATE = "batch_update"


UPDATE_KINDS = frozenset(
    {OutputKind.BUFFER_UPDATE, OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE, OutputKind.BATCH_UPDATE}
)
"""Outputs that are written back into the input of the same name."""


@dataclass(frozen=True)
class Input:
    """One input: ``name`` is the user's name (parameter path, batch key), ``kind`` its role. ``is_far``: it lies
    outside ordinary memory (in a memory map, or in the host's beside a device), and only parts are ever brought in.
    """

    name: str
    kind: InputKind
    spec: TensorSpec | ScalarSpec
    is_far: bool = False


@dataclass(frozen=True)
class Output:
    """One output; ``name`` is the user's name, or the name of the input that it updates or belongs to."""

    name: str
    kind: OutputKind
    spec: TensorSpec | ScalarSpec


@dataclass(frozen=True)
class Signature:
    """Inputs in placeholder order and outputs in return order. A pass never changes what it means."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    def inputs_of(self, *kinds: InputKind) -> Iterator[tuple[int, Input]]:
        """Position and input of every input of one of ``kinds``, in order."""
        return ((i, entry) for i, entry in enumerate(self.inputs) if entry.kind in kinds)

    def outputs_of(self, *kinds: OutputKind) -> Iterator[tuple[int, Output]]:
        """Position and output of every output of one of ``kinds``, in order."""
        return ((i, entry) for i, entry in enumerate(self.outputs) if entry.kind in kinds)

    def input_index(self, name: str, *kinds: InputKind) -> int | None:
        """Position of the input called ``name`` among ``kinds``, or None."""
        return next((i for i, entry in self.inputs_of(*kinds) if entry.name == name), None)


def updated_input_kind(kind: OutputKind) -> InputKind:
    """The kind of input that an update output of ``kind`` is written into."""
    return {
        OutputKind.BUFFER_UPDATE: InputKind.BUFFER,
        OutputKind.PARAM_UPDATE: InputKind.PARAM,
        OutputKind.STATE_UPDATE: InputKind.STATE,
        OutputKind.BATCH_UPDATE: InputKind.BATCH,
    }[kind]
