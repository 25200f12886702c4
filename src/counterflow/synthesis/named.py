"""The orders that named schemes have for a problem; a computed order has to beat them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.orders.slices import sliced_workload, slices_option
from counterflow.schedule.placement import Placement
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.schedule.scheme import SLICES, SPLIT, Scheme
from counterflow.schedule.workload import Workload

from .problem import Problem, Words


def named(problem: Problem, more: Callable[[], bool] = lambda: True) -> Iterator[tuple[str, Words]]:
    """Every named scheme with the same ops, as words; micro-batches may be assigned to other pipes.

    In large problems each takes seconds. So schemes take turns, and each begins with the last of its options,
    which need the most memory. ``more`` is called before each further turn of a scheme, and returns whether
    to continue.

    >>> from counterflow.schedule.placement import linear
    >>> from counterflow.schedule.workload import plain
    >>> from counterflow.synthesis.posing import (problem_of)
    >>> sorted({name.partition("(")[0] for name, _ in named(problem_of(plain(linear(3), 4, split=True)))})
    ['dapple', 'zb-h1', 'zb-h2']
    """
    known: set[Words] = set()
    waiting = deque(_of_scheme(problem, scheme) for scheme in registry.SCHEMES.values() if scheme.synchronous)
    first = len(waiting)
    while waiting and (first > 0 or more()):
        first -= 1
        orders = waiting.popleft()
        for name, words in orders:
            if words not in known:
                known.add(words)
                yield name, words
                waiting.append(orders)
                break


def _of_scheme(problem: Problem, scheme: Scheme) -> Iterator[tuple[str, Words]]:
    wanted, lengths = _likeness(problem.workload), problem.workload.lengths
    for options in reversed(list(_options(scheme, problem.workload))):
        try:
            scheme.refuse_too_large(options)
            if _likeness(sliced_workload(scheme.workload_of(options), lengths)) != wanted:
                continue
            slices = {SLICES: slices_option(lengths)} if len(lengths) > 1 else {}
            schedule = scheme.schedule({**options, **slices})
        except ConfigError:  # no schedule of this size
            continue
        if _likeness(schedule.workload) != wanted:
            continue
        if problem.workload.recomputes:
            schedule = with_recomputations(schedule)
        words = replace(problem, workload=schedule.workload).words_of(schedule)
        if words is not None:
            yield str(schedule), words


_Likeness = tuple[Placement, Counter[tuple[int, tuple[tuple[int, int, tuple[int, ...]], ...]]]]


def _likeness(workload: Workload) -> _Likeness | None:
    """Key that two workloads share if their orders are words of the same letters."""
    if not workload.synchronous or not workload.trains or workload.periods != 1:
        return None
    if any(len(batch.micro_batches) != 1 for batch in workload.passes):
        return None
    shares = (
        (batch.pipe, tuple((s.part, s.parts, s.split) for s in batch.shares)) for batch in workload.passes
    )
    return workload.placement, Counter(shares)


def _options(scheme: Scheme, workload: Workload) -> Iterator[Mapping[str, OptionValue]]:
    placement = workload.placement
    size: dict[str, OptionValue] = {
        scheme.depth: placement.workers,
        "micro_batches": workload.micro_batches,
    }
    for more in scheme.planner(placement.workers, workload.micro_batches, placement.stages):
        yield size | dict(more)
        if scheme.option(SPLIT.name) is not None:
            yield size | dict(more) | {SPLIT.name: not more.get(SPLIT.name, SPLIT.default)}
