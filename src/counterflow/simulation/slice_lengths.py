"""Lengths of slices that take equally long, where later positions cost more than earlier ones.

A slice from b to e of a sequence of one takes a share of the whole sequence's time:
``fixed + (1 - fixed - attention) (e - b) + attention (e² - b²)``. All slices together take the same whatever
their lengths, so a pipeline of P workers is fastest if the slowest slice is fastest: TeraPipe's problem with
this cost. It is solved exactly, because a slice takes longer the further it goes, so that slices which each
go as far as a time allows are fewest.

Source: Li et al., TeraPipe (ICML 2021, arXiv 2102.07988), section 3.3: the sum of all slices' times and P - 1
times the longest one's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

from counterflow.errors import ConfigError

MOST_SLICES = 64
"""The most slices that are tried where their number is not given."""

ROUNDING = 1e-9
"""Rounding of shares of one time, by which their sum may exceed it: those of several layers are averaged."""


def exceed_whole(*shares: float) -> bool:
    """True if shares of one time are more than it.

    >>> exceed_whole(0.5, 0.5 + 1e-12), exceed_whole(0.7, 0.4)
    (False, True)
    """
    return sum(shares) > 1 + ROUNDING


def balanced_slices(
    positions: int,
    slices: int | None = None,
    *,
    attention: float = 0.0,
    fixed: float = 0.0,
    workers: int = 1,
    micro_batches: int = 1,
    multiple: int = 1,
) -> tuple[int, ...]:
    """The lengths of slices whose longest time is shortest; for the option ``slices`` of a scheme.

    Args:
        positions: positions of the whole sequence.
        slices: number of slices; None: the number with the shortest step, as TeraPipe counts it, of up to 64.
        attention: share of the whole sequence's time that is attention to earlier positions.
        fixed: share of it that each slice takes, however short it is.
        workers: P, for the number of slices.
        micro_batches: N, for the number of slices.
        multiple: number of positions of which each length but the last is a multiple.

    Returns:
        The lengths, of which the sum is ``positions``.

    Raises:
        ConfigError: a number is out of its range, or there are fewer positions than slices.

    >>> balanced_slices(1024, 4), balanced_slices(1024, 4, attention=1.0)
    ((256, 256, 256, 256), (512, 212, 163, 137))
    >>> balanced_slices(1024, attention=0.2, fixed=0.04, workers=8, micro_batches=4, multiple=64)
    (192, 192, 128, 128, 128, 128, 128)
    """
    if positions < 1 or multiple < 1 or workers < 1 or micro_batches < 1:
        raise ConfigError(
            f"positions={positions}, multiple={multiple}, workers={workers}, micro_batches={micro_batches}: "
            "all must be 1 or more"
        )
    if min(attention, fixed) < 0 or exceed_whole(attention, fixed):
        raise ConfigError(
            f"attention={attention:g}, fixed={fixed:g}: are shares of one time; must be 0 or more, their sum "
            "1 or less"
        )
    points = [*range(0, positions, multiple), positions]
    most = len(points) - 1
    if slices is not None:
        if not 1 <= slices <= most:
            raise ConfigError(
                f"slices={slices}: must be between 1 and {most}, the multiples of {multiple} in {positions} "
                "positions"
            )
        return _Sequence(points, attention, fixed).shortest(slices)
    sequence = _Sequence(points, attention, fixed)
    candidates = [sequence.shortest(n) for n in range(1, min(most, MOST_SLICES) + 1)]

    def step(lengths: tuple[int, ...]) -> float:
        times = sequence.times(lengths)
        return micro_batches * math.fsum(times) + (workers - 1) * max(times)

    return min(candidates, key=step)


class _Sequence:
    def __init__(self, points: list[int], attention: float, fixed: float) -> None:
        self._points, self._length = points, points[-1]
        self._attention, self._fixed = attention, fixed
        self._linear = max(0.0, 1.0 - attention - fixed)

    def shortest(self, slices: int) -> tuple[int, ...]:
        """Lengths of this many slices."""
        low, high = 0.0, self._time(0, self._length)
        while low < (middle := (low + high) / 2) < high:
            if self._cuts(middle, slices) is None:
                low = middle
            else:
                high = middle
        cuts = self._cuts(high, slices)
        assert cuts is not None
        while len(cuts) <= slices:  # a single step between points takes longest
            cuts = sorted([*cuts, self._halfway(cuts)])
        return tuple(end - begin for begin, end in pairwise(cuts))

    def times(self, lengths: tuple[int, ...]) -> list[float]:
        """Times of slices of these lengths, in the whole's."""
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        return [self._time(begin, end) for begin, end in pairwise(ends)]

    def _time(self, begin: int, end: int) -> float:
        b, e = begin / self._length, end / self._length
        return self._fixed + self._linear * (e - b) + self._attention * (e * e - b * b)

    def _cuts(self, most: float, slices: int) -> list[int] | None:
        """The ends of fewest slices that take no longer than ``most``; None: more than ``slices``."""
        points, cuts, at = self._points, [0], 0
        while cuts[-1] < self._length:
            begin = cuts[-1]
            further = bisect_right(points, most, lo=at + 1, key=lambda end: self._time(begin, end)) - 1
            if further == at or len(cuts) > slices:
                return None
            at = further
            cuts.append(points[at])
        return cuts

    def _halfway(self, cuts: list[int]) -> int:
        places = [bisect_right(self._points, cut) - 1 for cut in cuts]
        first, last = max(pairwise(places), key=lambda both: both[1] - both[0])
        return self._points[(first + last) // 2]
