"""Words squeezed repeatedly at random: each turn draws words, and the delays that it allows.

The delay matters more than anything else. Good delays depend on the words, the costs and the side, so they
are drawn for each turn and side. The result joins a pool of the best words so far. The next turn draws from
the pool, or from the words given at first.

Invariant: the same seed and number of turns give the same words with any number of threads; yielded words are
within all limits and play to their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import exp, inf, log
from threading import Event
from time import monotonic

import numpy as np

from ..kernel import NEVER, FlatWords, flat_of, words_of
from ..problem import CLOSE, Problem, Words
from .squeeze import Lateness, Squeezer

_POOL = 8
"""Number of words in the pool."""

_MEAN_PLACE = 2.0
"""Mean place in the pool of the words with which a turn begins; 0 is the best."""

_AT_FIRST = 2
"""Turns for each of the words given, before the pool is drawn from."""

_FRESH = 0.3
"""Share of later turns that begin with the words given."""

_LATE = log(0.03), log(1.2)
"""Logarithms of the smallest and largest delay, in mean ops."""

_LIKE = 0.5
"""Share of turns from the pool with about the same delays as the turn that made their words ..."""

_NEAR = 0.3
"""... with this standard deviation of the logarithm."""

_THREADS = 2


@dataclass(frozen=True, slots=True)
class _SqueezeInput:
    flat: FlatWords
    late: Lateness
    back: bool


@dataclass(frozen=True, slots=True)
class _PoolEntry:
    seconds: float
    flat: FlatWords
    late: Lateness


class Wanderer:
    """A pool of words of one problem, and random numbers."""

    def __init__(self, problem: Problem, starts: Iterable[Words], seed: int = 0) -> None:
        self._squeezers = [Squeezer(problem) for _ in range(_THREADS)]
        self._starts = [flat_of(words) for words in starts]
        self._pool: list[_PoolEntry] = []
        self._chance = np.random.default_rng(seed)
        self._mean = sum(problem.work()) / problem.ops

    def wandered(
        self, *, turns: int | None = None, until: float = inf, least: float = inf, goal: float = 0.0
    ) -> Iterator[Words]:
        """Words, each better than all before.

        Args:
            turns: number of turns; None: as many as time allows.
            until: time to stop, on the monotonic clock.
            least: duration of the best known words in seconds; only better ones are yielded.
            goal: seconds that cannot be beaten; reaching them ends the search.
        """
        done, stop = 0, Event()

        def ended() -> bool:
            return stop.is_set() or least <= goal * (1 + CLOSE) or monotonic() > until

        with ThreadPoolExecutor(_THREADS) as threads:
            try:
                while (turns is None or done < turns) and not ended():
                    drawn = [self._drawn(done + number) for number in range(_THREADS)]
                    jobs = [
                        threads.submit(squeezer.flat_squeezed, x.flat, x.late, back=x.back, ended=ended)
                        for squeezer, x in zip(self._squeezers, drawn, strict=True)
                    ]
                    done += len(jobs)
                    for job, turn in zip(jobs, drawn, strict=True):
                        seconds, flat = job.result()
                        self._take(_PoolEntry(seconds, flat, turn.late))
                        if seconds < least * (1 - CLOSE):
                            least = seconds
                            yield words_of(flat)
            finally:
                stop.set()  # an interrupt waits for no more than one squeeze

    def _drawn(self, number: int) -> _SqueezeInput:
        chance = self._chance
        back = bool(chance.integers(2))
        late = Lateness(*(exp(chance.uniform(*_LATE)) * self._mean for _ in range(2)))
        if not self._pool or number < _AT_FIRST * len(self._starts) or chance.random() < _FRESH:
            return _SqueezeInput(self._starts[int(chance.integers(len(self._starts)))], late, back)
        entry = self._pool[min(len(self._pool) - 1, int(chance.exponential(_MEAN_PLACE)))]
        if chance.random() < _LIKE:
            late = Lateness(
                *(seconds * exp(chance.normal(0.0, _NEAR)) for seconds in (entry.late.front, entry.late.back))
            )
        return _SqueezeInput(entry.flat, late, back)

    def _take(self, new: _PoolEntry) -> None:
        if new.seconds == NEVER:
            return
        if all(abs(new.seconds - entry.seconds) > CLOSE * entry.seconds for entry in self._pool):
            self._pool.append(new)
            self._pool.sort(key=lambda entry: entry.seconds)
            del self._pool[_POOL:]
