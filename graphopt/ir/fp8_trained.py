"""What training decided about forward products, so that an evaluation runs the same ones in FP8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Sizes = tuple[int, int, int]
_Place = tuple[str, tuple[str, ...], int]


@dataclass(frozen=True)
class ForwardProduct:
    """A forward product: the path of its module, the parameters that it reads, its rows, columns and contraction."""

    module: str
    weights: tuple[str, ...]
    sizes: Sizes


@dataclass(frozen=True)
class Decision:
    """Whether a product runs in FP8, and why."""

    is_fp8: bool
    reason: str


@dataclass(frozen=True)
class TrainedForward:
    """Decisions by module, parameters, and how many products of the same came before; at each size, and the latest."""

    decisions: Mapping[tuple[_Place, Sizes | None], Decision] = field(default_factory=dict)

    def with_decisions(self, decided: Sequence[tuple[ForwardProduct, Decision]]) -> TrainedForward:
        """These and those of a training program, ``decided`` in its order. What has no size says nothing of others."""
        found = dict(self.decisions)
        places = _places(product for product, _ in decided)
        for place, (product, decision) in zip(places, decided, strict=True):
            if all(product.sizes):
                found[place, product.sizes] = found[place, None] = decision
        return self if found == self.decisions else TrainedForward(found)

    def about(self, products: Sequence[ForwardProduct]) -> tuple[Decision | None, ...]:
        """The decision about each of the ``products`` of a program, in order: that at its size, or else the latest."""
        return tuple(
            self.decisions.get((place, product.sizes)) or self.decisions.get((place, None))
            for place, product in zip(_places(products), products, strict=True)
        )


def _places(products: Iterable[ForwardProduct]) -> Iterator[_Place]:
    seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for product in products:
        key = product.module, product.weights
        yield *key, seen[key]
        seen[key] += 1


NOTHING_TRAINED = TrainedForward()
