"""Explanation of the best plan: its limit, and the change that would make the second-best win.

Invariant: every number comes from simulating the plans again with other links, other all-reduces or more
memory; nothing is guessed. It also says if no such change would make the second-best win.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .play import Play
from .prediction import Parts
from .search.search_result import Plan, SearchResult

_MOST = 64.0
"""Maximum factor by which links and all-reduces are made slower or faster."""

_NEAR = 1e-8
"""Share of a gap below which it counts as closed."""

_MOST_CHORDS = 60


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A change that makes two plans equally fast.

    Attributes:
        what: ``messages`` or ``all-reduces``.
        times: factor of their seconds; above 1 they are slower.
    """

    what: str
    times: float


@dataclass(frozen=True, slots=True)
class Why:
    """Explanation of the best plan.

    Attributes:
        parts: parts of its step's seconds.
        limit: the largest part beyond compute, by its name in ``Parts``; None if all of it is compute.
        second: the best plan of another scheme; None if there is none.
        second_parts: parts of that plan's step.
        break_evens: changes with which the second is as fast as the best.
        in_more_memory: the plan that would be best if devices had the memory that its fullest worker needs.
    """

    parts: Parts
    limit: str | None
    second: Plan | None
    second_parts: Parts | None
    break_evens: tuple[BreakEven, ...]
    in_more_memory: Plan | None


def why(result: SearchResult) -> Why:
    """Explain the result of a search.

    Args:
        result: result of the search, with one plan or more.
    """
    best = result.of_schemes[0]
    second = result.of_schemes[1] if len(result.of_schemes) > 1 else None
    parts = best.play.parts()
    beyond = {name: getattr(parts, name) for name in Parts.__slots__ if name != "compute"}
    limit = max(beyond, key=lambda name: beyond[name])
    return Why(
        parts=parts,
        limit=limit if beyond[limit] > 1e-9 * best.seconds else None,
        second=second,
        second_parts=second.play.parts() if second else None,
        break_evens=tuple(_break_evens(best.play, second.play)) if second else (),
        in_more_memory=result.in_more_memory,
    )


def _break_evens(best: Play, second: Play) -> list[BreakEven]:
    changes = []
    for what, change in _CHANGES.items():

        def gap(times: float, change: Callable[[Play, float], Play] = change) -> float:
            return change(second, times).seconds - change(best, times).seconds

        for end in (1 / _MOST, _MOST):
            times = _crossing(gap, end)
            if times is not None:
                changes.append(BreakEven(what, times))
    return changes


_CHANGES: dict[str, Callable[[Play, float], Play]] = {
    "messages": lambda play, times: replace(play, p2p_scale=times),
    "all-reduces": lambda play, times: replace(play, allreduce_scale=times),
}


def _crossing(gap: Callable[[float], float], end: float) -> float | None:
    """A factor between 1 and ``end`` at which the gap is 0, if it is gone at the end.

    By chords; an end that stays twice has its value halved (the Illinois rule). Gaps are straight in pieces.
    """
    inner, outer, moved = 1.0, end, 0
    over, under = gap(inner), gap(outer)
    if over <= 0 or under > 0:
        return None
    near = _NEAR * over
    for _ in range(_MOST_CHORDS):
        middle = inner + (outer - inner) * over / (over - under)
        here = gap(middle)
        if abs(here) <= near:
            return middle
        if here > 0:
            inner, over = middle, here
            under /= 2 if moved > 0 else 1
            moved = 1
        else:
            outer, under = middle, here
            over /= 2 if moved < 0 else 1
            moved = -1
    return outer
