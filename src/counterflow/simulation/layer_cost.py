"""Cost of a layer: seconds by kind of op, as lines in the samples of a micro-batch.

A stage's cost is the fold of its layers' costs (``LayerCost.fold``), and has the same form.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from counterflow.schedule.op import OpKind


class Line(NamedTuple):
    """Amounts at sizes of a micro-batch, in samples, rising.

    Invariant: it passes through the amounts. Between two sizes it is linear; above the largest it is
    extrapolated from the last two, from a single one in proportion; it is never below 0.

    >>> line = Line((1, 4), (1.0, 2.5))
    >>> line.at(0.5), line.at(2), line.at(8), line.in_proportion(0.5)
    (1.0, 1.5, 4.5, 0.5)
    """

    sizes: tuple[float, ...]
    amounts: tuple[float, ...]

    def at(self, samples: float) -> float:
        """Amount at a size; constant below the smallest, because a device that is not fully used is not
        faster with less work.
        """
        sizes, amounts = self
        if samples <= sizes[0]:
            return amounts[0]
        if len(sizes) == 1:
            return amounts[0] * samples / sizes[0]
        high = min(bisect_left(sizes, samples), len(sizes) - 1)
        low = high - 1
        slope = (amounts[high] - amounts[low]) / (sizes[high] - sizes[low])
        return max(0.0, amounts[high] + slope * (samples - sizes[high]))

    def in_proportion(self, samples: float) -> float:
        """Amount at a size; below the smallest in proportion, as bytes are."""
        if samples < self.sizes[0]:
            return self.amounts[0] * samples / self.sizes[0]
        return self.at(samples)


def proportional(amount: float) -> Line:
    """Return the line through 0 with this amount for one sample.

    >>> proportional(3.0).at(0.5), proportional(3.0).at(2)
    (1.5, 6.0)
    """
    return Line((0.0, 1.0), (0.0, amount))


_PASS = OpKind.FORWARD, OpKind.BACKWARD
"""Kinds of op of one pass of a micro-batch."""

NO_OVERHEAD: Mapping[OpKind, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of a layer, or of all layers of a stage, by kind of op.

    Attributes:
        lines: by kind of op, how often each line counts; no entry: it takes no time but its overhead.
        fixed: share of a micro-batch's seconds that a slice takes however short it is.
        attention: by kind of op, share of its seconds that is attention to earlier positions, so that a later
            slice takes longer; no entry: none.
        overhead: by kind of op, seconds that an op takes in addition, however small its part of a micro-batch
            is; no entry: none.
    """

    lines: Mapping[OpKind, tuple[tuple[int, Line], ...]]
    fixed: float = 0.0
    attention: Mapping[OpKind, float] = field(default_factory=dict)
    overhead: Mapping[OpKind, float] = field(default_factory=dict)
    cache: dict[tuple[OpKind, float], float] = field(default_factory=dict, compare=False, repr=False)
    """Seconds that were computed, by kind and samples."""

    @classmethod
    def fold(
        cls,
        layers: Sequence[LayerCost],
        samples: float,
        overhead: Mapping[OpKind, float] = NO_OVERHEAD,
        *,
        sliced: bool = True,
    ) -> LayerCost:
        """Cost of layers that run one after another in each op.

        Args:
            layers: the layers; equal ones should be the same object.
            samples: samples of a micro-batch; the shares of layers are weighted with their seconds at this
                size.
            overhead: by kind of op, seconds in addition to the layers.
            sliced: True if the shares that slices take are known.
        """
        counts = Counter(map(id, layers))
        distinct = [(counts[key], layer) for key, layer in {id(layer): layer for layer in layers}.items()]
        lines = {
            kind: tuple(
                (n * times, line) for n, layer in distinct for times, line in layer.lines.get(kind, ())
            )
            for kind in OpKind
        }
        stage = cls(lines, overhead=overhead)
        if not sliced or not any(layer.fixed or layer.attention for layer in layers):
            return stage
        both = [n * sum(layer.seconds(kind, samples) for kind in _PASS) for n, layer in distinct]
        if not (total := sum(both)):
            return stage
        pairs = [*zip(both, (layer for _, layer in distinct), strict=True)]
        fixed = sum(layer.fixed * seconds for seconds, layer in pairs) / total
        attention = (
            sum(layer.attention.get(OpKind.FORWARD, 0.0) * seconds for seconds, layer in pairs) / total
        )
        return replace(stage, fixed=fixed, attention=stage.attention_shares(attention, fixed, samples))

    def attention_shares(self, share: float, fixed: float, samples: float) -> dict[OpKind, float]:
        """Share of attention by kind of op, from that of a forward and of a backward.

        Only one half of a split backward attends, so its share is larger.
        """
        halves = sum(self.seconds(kind, samples) for kind in OpKind if kind.half)
        shares = {kind: share for kind in OpKind if kind.attends}
        for kind in shares:
            if kind.half:
                seconds = self.seconds(kind, samples)
                shares[kind] = min(share * halves / seconds if seconds else 0.0, 1.0 - fixed)
        return shares

    def seconds(self, kind: OpKind, samples: float, share: float = 1.0) -> float:
        """Seconds of an op without its overhead.

        Args:
            kind: kind of the op.
            samples: samples that it computes at once.
            share: number of times that it does, or the share of it that it computes, see ``slice_share``.
        """
        key = kind, samples
        known = self.cache.get(key)
        if known is None:
            known = sum(count * line.at(samples) for count, line in self.lines.get(kind, ()))
            self.cache[key] = known
        return known * share

    def op_seconds(self, kind: OpKind, samples: float, share: float = 1.0) -> float:
        """Seconds of an op with its overhead; see ``seconds``."""
        return self.seconds(kind, samples, share) + self.overhead.get(kind, 0.0)

    def slice_share(self, kind: OpKind, work: float, attention: float) -> float:
        """Share of an op's seconds that its slice of a micro-batch takes.

        Args:
            kind: kind of the op.
            work: the slice's share of the sequence.
            attention: its share of the attention, see ``Piece.attention``.

        >>> from counterflow.schedule.op import F
        >>> half = LayerCost({}, attention={F: 0.5})
        >>> half.slice_share(F, 0.5, 0.25), half.slice_share(F, 0.5, 0.75)
        (0.375, 0.625)
        """
        grows = self.attention.get(kind, 0.0)
        return self.fixed + (1.0 - self.fixed - grows) * work + grows * attention
