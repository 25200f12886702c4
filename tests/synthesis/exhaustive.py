"""Every order of a tiny problem within its limits, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from counterflow.synthesis.problem import Problem, Words, peaks, value_of


def every_word(problem: Problem, worker: int) -> Iterator[tuple[int, ...]]:
    """All words of a worker within its limits that do not wait for themselves."""
    letters = problem.letters

    def grown(word: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if any(peaks(store, (word,))[0] > store.allowed(worker) for store in problem.stores):
            return
        more = [n for n in problem.of_worker(worker) if word.count(n) < letters[n].count]
        if not more:
            yield word
        for n in more:
            inputs = [need.letter for need in letters[n].needs if letters[need.letter].worker == worker]
            if all(word.count(m) > word.count(n) for m in inputs):
                yield from grown((*word, n))

    return grown(())


def least(problem: Problem) -> tuple[float, Words]:
    """The best of all orders within the limits, and the worst."""
    words = product(*(tuple(every_word(problem, worker)) for worker in range(problem.workers)))
    fitting = [(value_of(problem, word), word) for word in words if problem.fits(word)]
    played = [(value, word) for value, word in fitting if value < float("inf")]
    return min(played)[0], max(played)[1]
