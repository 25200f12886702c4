"""Memory of a block, and faults of starts that are no block, apart from how blocks are found."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.synthesis.blocks.modulo import Pattern, _peak, cut_of, pattern_of
from counterflow.synthesis.kernel import numbers_of
from counterflow.synthesis.problem import CLOSE, Problem, Words


def held(problem: Problem, pattern: Pattern) -> tuple[tuple[float, ...], ...]:
    """By store and worker, the most that is held while a pattern repeats itself."""
    numbers, cut = numbers_of(problem), cut_of(pattern)
    workers = range(problem.workers)
    return tuple(
        tuple(float(_peak(numbers, cut, store, w)) for w in workers) for store in range(len(problem.stores))
    )


def faults(problem: Problem, starts: tuple[float, ...], period: float) -> Iterator[str]:
    """What keeps starts from being those of a block of this period within all limits."""
    letters = problem.letters
    numbers = numbers_of(problem)
    close = CLOSE * period
    for n, letter in enumerate(letters):
        for edge in range(numbers.into[n], numbers.into[n + 1]):
            if starts[n] + close < starts[numbers.maker[edge]] + numbers.after[edge]:
                yield f"{letter} starts before what it takes from {letters[numbers.maker[edge]]} is there"
    pattern = pattern_of(problem, starts, period)
    for worker, row in enumerate(pattern.orders):
        for one, other in zip(row, (*row[1:], row[0]), strict=True):
            rounds = pattern.rounds[other] - pattern.rounds[one] - (other == row[0])
            if starts[other] - rounds * period + close < starts[one] + numbers.keeps[one] and len(row) > 1:
                yield f"worker {worker}: {letters[other]} starts while {letters[one]} runs"
    for store, holds in zip(problem.stores, held(problem, pattern), strict=True):
        for worker, most in enumerate(holds):
            if most > store.most[worker] * (1 + CLOSE):
                yield f"worker {worker} holds {most:g} {store.name}, {store.most[worker]:g} are allowed"


def mirrored(words: Words) -> Words:
    """The words read from their ends."""
    return tuple(word[::-1] for word in words)
