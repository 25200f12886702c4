"""Placements: which worker holds which stage of which pipe.

Invariant: every pipe has every stage exactly once; a placement says nothing about order or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from counterflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement: ``pipes_stages[p][s]`` is the worker that holds stage ``s`` of pipe ``p``."""

    workers: int
    pipes_stages: tuple[tuple[int, ...], ...]
    _hash: int = field(init=False, repr=False, compare=False)
    """The hash, computed once because a search looks up placements of a thousand numbers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.workers, self.pipes_stages)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def pipes(self) -> int:
        """Number of pipes."""
        return len(self.pipes_stages)

    @property
    def stages(self) -> int:
        """Number of stages of every pipe."""
        return len(self.pipes_stages[0])

    def worker(self, pipe: int, stage: int) -> int:
        """The worker that holds ``stage`` of ``pipe``."""
        return self.pipes_stages[pipe][stage]

    def stages_on(self, worker: int) -> Iterator[tuple[int, int]]:
        """The (pipe, stage) pairs that ``worker`` holds, by pipe, then stage."""
        for pipe, stages in enumerate(self.pipes_stages):
            for stage, holder in enumerate(stages):
                if holder == worker:
                    yield pipe, stage

    def summed(self, amounts: Sequence[float]) -> list[float]:
        """Sums of an amount per stage over the stages that each worker holds."""
        sums = [0.0] * self.workers
        for stages in self.pipes_stages:
            for worker, amount in zip(stages, amounts, strict=True):
                sums[worker] += amount
        return sums

    def copies(self, stage: int) -> tuple[tuple[int, int], ...]:
        """The (pipe, worker) pairs that hold a copy of ``stage``."""
        return tuple((pipe, stages[stage]) for pipe, stages in enumerate(self.pipes_stages))

    def chunk(self, pipe: int, stage: int) -> int:
        """Number of earlier stages of the same pipe on the same worker (0 for its first)."""
        stages = self.pipes_stages[pipe]
        return stages[:stage].count(stages[stage])


def linear(stages: int) -> Placement:
    """Stage ``s`` on worker ``s``.

    >>> linear(4).pipes_stages
    ((0, 1, 2, 3),)
    """
    return Placement(stages, (tuple(range(stages)),))


def bidirectional(stages: int, pairs: int = 1) -> Placement:
    """``pairs`` down pipes, then as many up pipes (Chimera section 3.6, Figure 8).

    Down pipe ``i`` has stage ``s`` on worker ``(i·D/f + s) mod D``; up pipe ``i`` is its reverse list.

    >>> bidirectional(4).pipes_stages
    ((0, 1, 2, 3), (3, 2, 1, 0))
    >>> bidirectional(8, pairs=2).pipes_stages[1]
    (4, 5, 6, 7, 0, 1, 2, 3)
    >>> bidirectional(8, pairs=2).pipes_stages[3]
    (3, 2, 1, 0, 7, 6, 5, 4)
    """
    if stages < 2 or stages % 2:
        lower = f"{stages - 1} or " if stages > 2 else ""
        raise ConfigError(
            f"stages={stages}: two directions need an even number of stages, 2 or more; "
            f"use {lower}{max(2, stages + 1)}"
        )
    if pairs < 1 or (stages // 2) % pairs:
        legal = [f for f in range(1, stages // 2 + 1) if (stages // 2) % f == 0]
        raise ConfigError(
            f"pairs={pairs}: the number of pairs of pipes must divide stages/2 = {stages // 2}; "
            f"legal: {', '.join(map(str, legal))}"
        )
    shift = stages // pairs
    down = [tuple((i * shift + s) % stages for s in range(stages)) for i in range(pairs)]
    return Placement(stages, (*down, *(tuple(reversed(pipe)) for pipe in down)))


def wave(workers: int, waves: int) -> Placement:
    """``2·workers·waves`` stages of one pipe that run down, up, down, … (Hanayo section 3.2).

    >>> wave(2, waves=2).pipes_stages
    ((0, 1, 1, 0, 0, 1, 1, 0),)
    """
    down = tuple(range(workers))
    return Placement(workers, ((down + down[::-1]) * waves,))


def looped(workers: int, chunks: int) -> Placement:
    """Stage ``s`` on worker ``s mod workers`` (interleaved 1F1B, grouped GPipe and WPipe).

    >>> looped(3, chunks=2).pipes_stages
    ((0, 1, 2, 0, 1, 2),)
    """
    return Placement(workers, (tuple(range(workers)) * chunks,))
