"""Cuts with one layer moved from a stage to another, for every such move, without writing these cuts out.

A table of where stages begin after each move is cubic in the stages of a deep model. A move changes the
stages between its ends by one layer each, in the same way for all moves in that direction; so a sum over
stages is a difference of two running sums.

Invariant: numbers are in the order of moves: none, then by source, then by target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OfStages = Callable[[Ints, Ints], Floats]
"""Function of the first layer of each stage, and of the layer after its last: a number of each stage."""

_Changed = tuple[Floats, Floats, Floats]
"""By stage: if a layer leaves it, if it is between a move's ends, and if it gets a layer."""


@dataclass(frozen=True, slots=True)
class Moves:
    """No move, then a layer's from each source to each other stage; layers between move by one stage.

    Attributes:
        ends: the first layer of each stage, then the number of layers.
        sources: stages of two layers or more.
    """

    ends: Ints
    sources: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 1 + len(self.sources) * (self._stages - 1)

    @property
    def _stages(self) -> int:
        return len(self.ends) - 1

    def after(self, move: int) -> Ints:
        """The ends after a move."""
        ends = self.ends.copy()
        if move > 0:
            number, target = divmod(move - 1, self._stages - 1)
            source = self.sources[number]
            target += target >= source
            ends[source + 1 : target + 1] -= 1
            ends[target + 1 : source + 1] += 1
        return ends

    def now(self, of: OfStages) -> Floats:
        """A number of each stage without a move."""
        return of(self.ends[:-1], self.ends[1:])

    def sums(self, now: Floats, *terms: tuple[OfStages, Floats]) -> Floats:
        """Sums over stages, ``[move][worker]``.

        Args:
            now: the sums without a move, by worker.
            terms: numbers of stages, and their weights, ``[stage][worker]``.
        """
        sums = np.empty((len(self), len(now)))
        sums[0] = now
        if not self.sources:
            return sums
        later, earlier = (self._terms(terms, later=later) for later in (True, False))
        # Between are the stages up to the one before the higher end, without those up to the lower end.
        source, between, target = later
        running = np.cumsum(between, axis=0)
        down = now + source - running, target + running - between
        source, between, target = earlier
        running = np.cumsum(between, axis=0)
        up = now + source + running - between, target - running
        for stage, to_earlier, to_later in self._rows():
            np.add(up[0][stage], up[1][:stage], out=sums[to_earlier])
            np.add(down[0][stage], down[1][stage + 1 :], out=sums[to_later])
        return sums

    def most(self, of: OfStages) -> Floats:
        """Maximum over stages of a number of each, by move."""
        now, maxima = self.now(of), np.empty(len(self))
        if not self.sources:
            maxima[0] = now.max()
            return maxima
        before = np.concatenate(([-math.inf], np.maximum.accumulate(now)[:-1]))
        behind = np.concatenate((np.maximum.accumulate(now[::-1])[::-1][1:], [-math.inf]))
        maxima[0] = now.max()
        source_up, between_up, target_up = self._changed(of, later=False)
        source, between, target = self._changed(of, later=True)
        for stage, to_earlier, to_later in self._rows():
            row = maxima[to_earlier]
            np.maximum(before[:stage], target_up[:stage], out=row)
            np.maximum(row, max(source_up[stage], behind[stage]), out=row)
            np.maximum(row[:-1], np.maximum.accumulate(between_up[1:stage][::-1])[::-1], out=row[:-1])
            row = maxima[to_later]
            np.maximum(behind[stage + 1 :], target[stage + 1 :], out=row)
            np.maximum(row, max(source[stage], before[stage]), out=row)
            np.maximum(row[1:], np.maximum.accumulate(between[stage + 1 : -1]), out=row[1:])
        return maxima

    def _rows(self) -> Iterator[tuple[int, slice, slice]]:
        begin = 1
        for stage in self.sources:
            end = begin + self._stages - 1
            yield stage, slice(begin, begin + stage), slice(begin + stage, end)
            begin = end

    def _terms(self, terms: tuple[tuple[OfStages, Floats], ...], *, later: bool) -> list[Floats]:
        total = [np.zeros(())] * 3
        for of, weights in terms:
            now = self.now(of)
            changes = ((changed - now)[:, np.newaxis] * weights for changed in self._changed(of, later=later))
            total = [sums + more for sums, more in zip(total, changes, strict=True)]
        return total

    def _changed(self, of: OfStages, *, later: bool) -> _Changed:
        begin, end = self.ends[:-1], self.ends[1:]
        if later:
            before = np.maximum(begin - 1, 0)  # the first stage gets no layer from an earlier one
            return of(begin, end - 1), of(before, end - 1), of(before, end)
        behind = np.minimum(end + 1, end[-1])
        return of(begin + 1, end), of(begin + 1, behind), of(begin, behind)
