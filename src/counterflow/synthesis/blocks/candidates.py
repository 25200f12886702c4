"""Orders that repeat a block: blocks of short periods and ways, unrolled to all micro-batches, then squeezed.

The block of a problem does not grow with its micro-batches, so good ones are found even if whole orders are
too long to be searched. Blocks come from moves on a first one (``pattern_moves``), then from a solver if it
is installed (``pattern_solver``), which also proves some periods impossible.

Invariant: yielded words are within all limits and play to their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from time import monotonic

from ..kernel import flat_of, words_of
from ..problem import CLOSE, Problem, Words
from ..solver import solver_is_there
from .modulo import ModuloBlock, least_work, timed, unrolled
from .pattern_moves import first_pattern, improved
from .pattern_solver import Wanted, solved
from .squeeze import Lateness, Squeezer
from .wander import Wanderer

MOVES = 500_000
"""Moves per block and letter."""

MOST_FOR_SOLVER = 120
"""Maximum letters for the solver: with more it finds nothing that moves do not."""

_LATE = (inf, 0.5, 0.0)
"""Delays that a squeezed op may cause to the next one at first, in ops."""


def candidates(
    problem: Problem,
    starts: Iterable[Words] = (),
    *,
    seconds: float,
    turns: int | None = None,
    moves: int = MOVES,
    seed: int = 0,
    goal: float = 0.0,
) -> Iterator[Words]:
    """Words, each better than all before: starts and blocks, squeezed; then squeezed again at random.

    Args:
        problem: the problem.
        starts: known words, the best first; they are squeezed too.
        seconds: approximate duration; starts and the first block are always tried.
        turns: number of blocks by moves, with none by the solver, instead of ``seconds``; the words are then
            the same on every machine.
        moves: moves per block and letter.
        seed: seed of the random numbers.
        goal: seconds that cannot be beaten; reaching them ends the search.
    """
    until = inf if turns is not None else monotonic() + seconds
    squeezer = Squeezer(problem)
    mean = sum(problem.work()) / problem.ops
    known = list(starts)
    sources: list[Words] = []

    def unsqueezed() -> Iterator[Words]:
        yield from known[:_FIRST]
        for block in blocks(problem, seconds=_FOR_BLOCKS * seconds, turns=turns, moves=moves, seed=seed):
            yield unrolled(problem, block)

    def ended() -> bool:
        return monotonic() > until

    least = inf
    for words in unsqueezed():
        if words in sources:
            continue
        sources.append(words)
        for late in _LATE:
            both = Lateness(late * mean, late * mean)
            duration, flat = squeezer.flat_squeezed(flat_of(words), both, ended=ended)
            if duration < least:
                least = duration
                yield words_of(flat)
            if ended() or least <= goal * (1 + CLOSE):
                return
    many = None if turns is None else _WANDERS * turns
    sources += known[_FIRST:]
    yield from Wanderer(problem, sources, seed).wandered(turns=many, until=until, least=least, goal=goal)


_FOR_BLOCKS = 0.4
"""Share of the time in which blocks are searched."""

_FIRST = 2
"""Number of starts that are squeezed before the first block is made; the others are squeezed at random only.
"""

_WANDERS = 40
"""Turns of random squeezing for each of ``turns``."""


def way_of(problem: Problem, block: ModuloBlock) -> float:
    """Seconds from the start of a micro-batch's first op to the end of its last, on the slowest pipe."""
    return max(at + x.seconds for at, x in zip(block.starts, problem.letters, strict=True))


def blocks(
    problem: Problem, *, seconds: float, turns: int | None = None, moves: int = MOVES, seed: int = 0
) -> Iterator[ModuloBlock]:
    """Blocks of a problem. The caller's time between two of them counts too.

    Args:
        problem: the problem.
        seconds: time limit of the search; the first block is always searched.
        turns: see ``candidates``.
        moves: see ``candidates``.
        seed: seed of the random numbers.
    """
    until = inf if turns is not None else monotonic() + seconds
    first = timed(problem, first_pattern(problem))
    assert first is not None
    many = max(x.count for x in problem.letters)
    best = first
    moves = max(500, moves // len(problem.letters))
    kinds = (max(1, many - 1), 4 * many, max(1, many / 4))
    for turn in range(_TURNS if turns is None else turns):
        times = kinds[turn % len(kinds)]
        block = improved(problem, first, times=times, moves=moves, seed=seed * 1009 + turn)
        yield block
        best = min(best, block, key=lambda b: (many - 1) * b.period + way_of(problem, b))
        if monotonic() > until:
            return
    if turns is None and len(problem.letters) <= MOST_FOR_SOLVER and solver_is_there():
        yield from _solver_blocks(problem, best, until)


_TURNS = 6


def _solver_blocks(problem: Problem, best: ModuloBlock, until: float) -> Iterator[ModuloBlock]:
    """Blocks of ever shorter periods; then, of the shortest period, those of the shortest way and the least
    memory.

    The shortest period is determined to a thousandth, as far as time allows. A block of some period exists
    for each longer one too, with all starts stretched.
    """
    low = target = least_work(problem)
    while best.period > low * 1.001 and (remaining := until - monotonic()) > 0:
        answer = solved(problem, target, wanted=Wanted.ANY, seconds=remaining / 4, hint=best)
        if answer.block is not None and answer.block.period < best.period:
            best = answer.block
            yield best
        else:
            low = target
        target = (low + best.period) / 2
    for wanted in (Wanted.SHORT, Wanted.SMALL) if problem.stores else (Wanted.SHORT,):
        remaining = until - monotonic()
        if remaining <= 0:
            return
        answer = solved(problem, best.period * (1 + 1e-9), wanted=wanted, seconds=remaining / 2, hint=best)
        if answer.block is not None:
            yield answer.block
