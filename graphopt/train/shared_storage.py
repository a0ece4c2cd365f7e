"""Which tensors are the same memory: ties (same place), views (overlapping places), and what that means for files.

A file holds every place once. Two names of one place are a tie; other overlapping places are stored as copies, which
must agree where they overlap when they are put back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """The memory of a tensor: its storage, the first byte and the one after the last, and how it is laid out."""

    storage: tuple[str, int]
    start: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool

    def covers(self, other: Place) -> bool:
        """Whether every byte of ``other`` is one of mine."""
        inside = self.storage == other.storage and self.start <= other.start and other.end <= self.end
        return self == other or (inside and self.contiguous)

    def overlaps(self, other: Place) -> bool:
        """Whether the byte ranges meet."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Packed:
    """Tensors by name, contiguous and without shared memory, and the names that stand for one of them."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]


@dataclass(frozen=True)
class Conflict:
    """Two names of a file whose values differ although the model gives them the same memory."""

    first: str
    second: str


def place_of(tensor: torch.Tensor) -> Place | None:
    """The Place of a dense tensor; None for an empty one, which shares nothing."""
    if tensor.numel() == 0:
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Place(
        storage=(str(tensor.device), tensor.untyped_storage().data_ptr()),
        start=start,
        end=start + (last + 1) * tensor.element_size(),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
        contiguous=tensor.is_contiguous(),
    )


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """``tensors`` as a file wants them; only what overlaps another place or is not contiguous is copied."""
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    first_name: dict[Place, str] = {}
    for name, place in places.items():
        if place is not None:
            first_name.setdefault(place, name)
    copied = _overlapping(first_name)
    packed, aliases = {}, {}
    for name, tensor in tensors.items():
        place = places[name]
        if place is not None and first_name[place] != name:
            aliases[name] = first_name[place]
        elif place in copied:
            packed[name] = tensor.clone(memory_format=torch.contiguous_format)
        else:
            packed[name] = tensor.resolve_conj().resolve_neg().contiguous()
    return Packed(packed, aliases)


def find_conflicts(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> tuple[Conflict, ...]:
    """The pairs of names in ``values`` that cannot both be written into the memory ``targets`` gives them."""
    by_storage: dict[tuple[str, int], dict[Place, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in values:
        place = place_of(targets[name])
        if place is not None:
            by_storage[place.storage][place].append(name)
    conflicts: list[Conflict] = []
    for places in by_storage.values():
        ties = [_tie_conflicts(names, values) for names in places.values()]
        conflicts += [conflict for found in ties for conflict in found]
        if len(places) > 1 and not any(ties):
            conflicts += _view_conflicts({place: names[0] for place, names in places.items()}, values)
    return tuple(conflicts)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit by bit (NaN equals itself, 0.0 is not -0.0)."""
    if first is second:
        return True
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def _overlapping(places: Iterable[Place]) -> set[Place | None]:
    """The places to copy so that the rest shares no memory: of two that overlap, the smaller one."""
    copied: set[Place | None] = set()
    kept: dict[tuple[str, int], list[Place]] = defaultdict(list)
    for place in sorted(places, key=lambda place: place.start - place.end):
        if any(place.overlaps(other) for other in kept[place.storage]):
            copied.add(place)
        elif place.contiguous:
            kept[place.storage].append(place)
    return copied


def _tie_conflicts(names: list[str], values: Mapping[str, torch.Tensor]) -> list[Conflict]:
    first, *others = names
    return [Conflict(first, name) for name in others if not same_bytes(values[first], values[name])]


def _view_conflicts(names: Mapping[Place, str], values: Mapping[str, torch.Tensor]) -> list[Conflict]:
    """Write all into a scratch copy of the storage, then see whose value was overwritten by another."""
    scratch = torch.empty(max(place.end for place in names), dtype=torch.uint8)
    for place, name in names.items():
        _at(scratch, place).copy_(values[name])
    lost = [place for place, name in names.items() if not same_bytes(_at(scratch, place), values[name])]
    return [
        Conflict(names[place], names[other])
        for place in lost
        for other in names
        if other != place and other.overlaps(place)
    ]


def _at(scratch: torch.Tensor, place: Place) -> torch.Tensor:
    offset = place.start // place.dtype.itemsize
    return torch.empty(0, dtype=place.dtype).set_(scratch.untyped_storage(), offset, place.shape, place.stride)
