"""A worker's memory over time, from byte costs and the times of its ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add

import numpy as np

from counterflow.program.player import Floats


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of each worker's memory.

    A forward's stash exists from its start to the end of its backward. If the backward is split, the part
    that only the input gradient needs is freed with it, the rest with the weight gradients. What a
    recomputation makes again exists from its start to the end of its backward. Weights, gradients and
    optimiser state of every copy exist throughout, a further weight version from its update until nothing
    needs it.

    Attributes:
        base: memory that each worker holds before its first op.
        at_start: by op, memory that is added when it starts.
        at_end: by op, memory that is added when it has ended; negative if freed.
        versions: by op, memory of weight versions that are made, or freed, when it has ended.
    """

    base: list[float]
    at_start: Floats
    at_end: Floats
    versions: Floats


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one worker as steps: from ``times[i]`` on it holds ``amounts[i]`` (bytes, unless stated
    otherwise).
    """

    times: tuple[float, ...]
    amounts: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The largest amount."""
        return max(self.amounts)


def memory_use(
    workers: Sequence[int], changes: Changes, start: Sequence[float], end: Sequence[float]
) -> tuple[MemoryUse, ...]:
    """Memory of every worker over time.

    Args:
        workers: each worker's first op, then one past the last op of all.
        changes: memory that exists throughout, and memory that each op adds.
        start: start of each op, in seconds.
        end: end of each op.
    """
    uses = []
    for worker, (first, stop) in enumerate(pairwise(workers)):
        # (time, rank, change): at equal times, frees come first.
        steps: list[tuple[float, int, float]] = []
        for node in range(first, stop):
            for time, change in (
                (start[node], float(changes.at_start[node])),
                (end[node], float(changes.at_end[node])),
                (end[node], float(changes.versions[node])),
            ):
                if change:
                    steps.append((time, 0 if change < 0 else 1, change))
        uses.append(_steps(changes.base[worker], steps))
    return tuple(uses)


def peaks_of(first: Sequence[int], changes: Changes) -> tuple[float, ...]:
    """Maximum memory of each worker, as in ``memory_use``, from the order of its ops alone.

    A worker runs one op at a time, so its memory during each op follows from the ops before it. ``first``
    contains each worker's first op, then one past the last.
    """
    return tuple(map(add, changes.base, above_base(first, changes)))


def above_base(first: Sequence[int], changes: Changes) -> list[float]:
    """Memory of each worker above its base at its maximum."""
    most = []
    for begin, stop in pairwise(first):
        nodes = slice(begin, stop)
        change = changes.at_end[nodes] + changes.versions[nodes]
        after = np.cumsum(changes.at_start[nodes] + change)
        during = after - change
        most.append(max(0.0, float(during.max()), float(after[-1])) if len(after) else 0.0)
    return most


def _steps(base: float, changes: list[tuple[float, int, float]]) -> MemoryUse:
    times, amounts = [0.0], [base]
    for time, _, change in sorted(changes):
        amount = amounts[-1] + change
        if time == times[-1]:
            amounts[-1] = amount
        else:
            times.append(time)
            amounts.append(amount)
    return MemoryUse(tuple(times), tuple(amounts))
