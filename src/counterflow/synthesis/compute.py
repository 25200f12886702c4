"""Runs the methods one after another, until the time is up or the best order is proved.

Invariant: the result keeps all limits, and is not worse than any named scheme of the same workload that keeps
them and for which there was time. Placement and micro-batches are never changed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cache

from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.orders.slices import slices_option
from counterflow.schedule.placement import linear
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import Costs

from .bounds.lower import Bound, lower_bound
from .named import named
from .posing import problem_of
from .problem import ACTIVATIONS, Limit, Objective, Problem, Words, value_of
from .solver import solver_is_there
from .synthesis_result import PROVED, Synthesis

Report = Callable[[float, float, str], None]
"""Called with the best value, the bound, and the method that found it or is running."""

START = "the order to begin with"
"""Method of a result that nothing improved."""

_NAMED = 0.4
"""Share of time after which each named scheme is built once, and not with further options."""

_REPEATED = 0.4
"""Share of the remaining time for repeating blocks and for squeezing."""

_SQUEEZED = 8
"""Number of best named orders that are squeezed."""

_VALUED = 0.2
"""Share of its time that the simulator may take while orders improve quickly."""

_MOVES_TURN = 10_000
"""Moves of the search for each turn of the blocks."""

_SEARCHED = 0.4
"""Share of time for the search, if the exact method follows ..."""

_PROOF_SHARE = 0.3
"""... which has at least this share, or ..."""

_PROOF = 3.0
"""... this many seconds, however long anything before it took."""

_EFFORT = 1e-4
"""The solver's deterministic time for each move."""


def synthesize(
    workload: Workload,
    costs: Costs | None = None,
    *,
    peak: Limit | None = None,
    memory_bytes: Limit | None = None,
    objective: Objective | str = Objective.MAKESPAN,
    seconds: float = 30.0,
    moves: int | None = None,
    seed: int = 0,
    start: Schedule | None = None,
    report: Report | None = None,
) -> Synthesis:
    """Search for the best schedule of a workload, with a bound on how much better a schedule could be.

    Ctrl-C ends the search with the best order so far. OR-tools, an extra (``counterflow[synthesize]``),
    proves and improves orders of small problems; without it only bounds that need no solver are computed.

    Args:
        workload: the workload to order; it must be synchronous, with micro-batches one by one, whole or in
            slices.
        costs: seconds and bytes; default: a forward costs 1, a backward 2, messages nothing.
        peak: maximum activations that a worker stashes, in (stage x micro-batch) units; one number, or one
            per worker.
        memory_bytes: maximum bytes of a worker, including weights and optimiser state; one number, or one per
            worker.
        objective: ``makespan`` of one step, or ``steady``: the step time without a barrier.
        seconds: approximate duration, unless an order is proved earlier. The first use on a machine takes
            half a minute more, in which loops are compiled.
        moves: search budget in moves instead of ``seconds``; the result is then the same on every machine.
        seed: seed of the search.
        start: a schedule of this workload to begin with, in addition to the named schemes; used if it keeps
            the limits.
        report: called with the best value, the bound and the current activity.

    Raises:
        ConfigError: the workload is asynchronous or has doubled forwards or divided backwards, costs do not
            fit it, a limit is too small for one micro-batch, or ``start`` has another workload.

    >>> from counterflow.schedule.placement import linear
    >>> from counterflow.schedule.workload import plain
    >>> found = synthesize(plain(linear(4), 8, split=True), peak=4)
    >>> found.makespan, found.lower_bound, found.proved, found.method
    (27.0, 27.0, True, 'zb-h1(stages=4, micro_batches=8)')
    """
    began = time.monotonic()
    problem = problem_of(workload, costs, peak=peak, memory_bytes=memory_bytes, objective=objective)
    first = None if start is None else problem.words_of(start)
    return _Computation(problem, report, first).run(began, seconds, moves, seed)


class _Computation:
    def __init__(self, problem: Problem, report: Report | None, first: Words | None) -> None:
        self._problem, self._report, self._first = problem, report, first
        self._bound = lower_bound(problem)
        self._words = one_by_one(problem)
        self._known: list[tuple[float, Words]] = []
        self._value, self._method = math.inf, ""
        self._named: tuple[str, float] | None = None
        self._stopped = False

    def run(self, began: float, seconds: float, moves: int | None, seed: int) -> Synthesis:
        until = math.inf if moves is not None else began + seconds
        self._take(self._words, "one micro-batch after another")
        try:
            self._build_named(began + _NAMED * seconds if moves is None else until, until)
            if self._first is not None and self._problem.fits(self._first):
                self._take(self._first, START)
            if not self._proved:
                before = time.monotonic()
                _compile()
                until += time.monotonic() - before
                self._repeat(_remaining(until) * _REPEATED, moves, seed)
            if not self._proved:
                self._search(_remaining(until), moves, seed)
            if not self._proved:
                self._prove(max(_remaining(until), min(seconds * _PROOF_SHARE, _PROOF)), moves, seed)
        except KeyboardInterrupt:
            self._stopped = True
        schedule = self._problem.schedule(self._words, options=options_of(self._problem))
        return Synthesis(
            schedule,
            self._problem.costs,
            self._problem.objective,
            self._bound,
            self._method,
            self._named,
            self._stopped,
        )

    @property
    def _proved(self) -> bool:
        return self._value <= self._bound.seconds * (1 + PROVED)

    def _build_named(self, another: float, until: float) -> None:
        """Add named orders: until ``until`` one of each scheme, and until an earlier time another one of
        each.
        """
        for name, words in named(self._problem, lambda: time.monotonic() < another):
            if self._problem.fits(words):
                value = self._take(words, name)
                if self._named is None or value < self._named[1]:
                    self._named = name, value
            if self._proved or time.monotonic() > until:
                return

    def _repeat(self, seconds: float, moves: int | None, seed: int) -> None:
        from .blocks.candidates import candidates  # noqa: PLC0415  (compiled loops take a while)

        turns = None if moves is None else 1 + moves // _MOVES_TURN
        starts = self._best_known()[:_SQUEEZED]
        next_look, waiting = 0.0, None
        try:
            goal = self._bound.seconds
            for words in candidates(
                self._problem, starts, seconds=seconds, turns=turns, seed=seed, goal=goal
            ):
                now = time.monotonic()
                if moves is None and now < next_look:  # each is better than all before
                    waiting = words
                    continue
                waiting = None
                self._take(words, "repeating blocks")
                if self._proved:
                    return
                after = time.monotonic()
                next_look = after + (after - now) / _VALUED
        finally:
            if waiting is not None:
                self._take(waiting, "repeating blocks")

    def _search(self, seconds: float, moves: int | None, seed: int) -> None:
        from .search.improve import improve  # noqa: PLC0415  (compiled loops take a while)

        for how, words in improve(
            self._problem,
            self._best_known(),
            seconds=seconds * (_SEARCHED if self._provable else 1.0),
            moves=moves,
            seed=seed,
            goal=self._bound.seconds,
        ):
            self._take(words, how)

    def _best_known(self) -> list[Words]:
        return [words for _, words in sorted(self._known, key=lambda pair: pair[0])]

    @property
    def _provable(self) -> bool:
        from .exact.solve import tractable  # noqa: PLC0415

        return tractable(self._problem) and solver_is_there()

    def _prove(self, seconds: float, moves: int | None, seed: int) -> None:
        if not self._provable:
            return
        from .exact.solve import solve  # noqa: PLC0415

        result = solve(
            self._problem,
            self._words,
            self._bound.seconds,
            seconds=seconds if moves is None else math.inf,
            effort=None if moves is None else moves * _EFFORT,
            seed=seed,
            threads=1 if moves is not None else min(8, os.cpu_count() or 1),
            report=self._report_solver,
        )
        if result.words is not None:
            self._take(result.words, "exact method")
        if result.bound > self._bound.seconds * (1 + PROVED):
            self._bound = Bound(result.bound, "the solver proved that no order within the limits takes less")
        if result.stopped:
            raise KeyboardInterrupt

    def _report_solver(self, value: float, bound: float, doing: str) -> None:
        if self._report is not None:
            self._report(value, max(bound, min(self._bound.seconds, value)), f"exact method: {doing}")

    def _take(self, words: Words, method: str = "search") -> float:
        value = value_of(self._problem, words)
        self._known.append((value, words))
        if value < self._value * (1 - PROVED):
            self._words, self._value, self._method = words, value, method
            self._send_report(value, method)
        return value

    def _send_report(self, value: float, method: str) -> None:
        if self._report is not None:
            self._report(value, min(self._bound.seconds, value), method)


def options_of(problem: Problem) -> Iterator[tuple[str, OptionValue]]:
    """Options that a computed schedule records in addition to its orders: sizes, limits and objective."""
    yield "workers", problem.workers
    yield "micro_batches", problem.workload.micro_batches
    if problem.workload.slices > 1:
        yield "slices", slices_option(problem.workload.lengths)
    for store in problem.stores:
        ends = sorted({min(store.most), max(store.most)})
        limit = " to ".join(f"{most:,.10g}" for most in ends)
        name = "peak" if store.name == ACTIVATIONS else f"activation_{store.name}"
        yield name, int(limit) if limit.isdecimal() else limit
    if problem.steady:
        yield "objective", str(problem.objective)


@cache
def _compile() -> None:
    from .blocks.candidates import candidates  # noqa: PLC0415  (compiled loops take a while)
    from .search.improve import improve  # noqa: PLC0415

    for objective in Objective:
        tiny = problem_of(plain(linear(2), 2, split=True), peak=2, objective=objective)
        words = list(candidates(tiny, [one_by_one(tiny)], seconds=0, turns=1, moves=1))
        list(improve(tiny, words, moves=1))


def _remaining(until: float) -> float:
    return max(0.0, until - time.monotonic())


def one_by_one(problem: Problem) -> Words:
    """One micro-batch after another, through all its stages and back: an order that every limit allows."""
    letters = problem.letters

    def place(n: int) -> tuple[int, ...]:
        x = letters[n]
        if x.kind.is_forward:
            return x.pipe, 0, x.stage, x.part
        return x.pipe, 1, -x.stage, -x.part, x.turn

    words: list[list[int]] = [[] for _ in range(problem.workers)]
    for k in range(max(x.count for x in letters)):
        for n in sorted(range(len(letters)), key=place):
            if k < letters[n].count:
                words[letters[n].worker].append(n)
    return tuple(map(tuple, words))
