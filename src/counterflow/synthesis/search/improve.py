"""Search: orders by list scheduling, then by local moves. Fast, good at any size, without a proof.

List scheduling gives each op a time at which it is due and lets a free worker take what is due first
(``kernel.build``). Due times follow a rule of a few numbers, by which forwards run ahead of backwards and
weight gradients lag behind; the numbers are improved by trying. The best orders, and those that the caller
knows, are then annealed (``moves.anneal``), fewer of them from round to round.

Invariant: nothing worse than the best start that keeps the limits is returned. The same seed and number of
moves give the same orders on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from time import monotonic

import numpy as np

from counterflow.schedule.ir import Product

from ..bounds.windows import first_starts
from ..problem import Problem, Words, value_of
from .building import Due, build, room_of
from .compiled import (
    NEVER,
    Flat,
    Floats,
    Numbers,
    Scratch,
    flat_of,
    numbers_of,
    scratch_of,
    settle,
    words_of,
    worth,
)
from .moves import Plan, State, anneal, start, state_of

Report = Callable[[float, str], None]
"""Told the seconds (of makespan or steady step) of the best order so far, and how it was found."""

SETTLED = 4
"""Steps played until workers stand at the border of two steps as they will."""

_TRIES = 600
_BATCH = 8
_SURVIVORS = 12
_ROUNDS = (8, 4, 2, 2)
"""How many orders are annealed in each round; each round has as many moves in all."""

_WARM, _COLD = 0.1, 0.003
"""How much may be lost by a move, at first and at last, in mean seconds of an op."""

_SLICE_MOVES_OPS = 4_000_000
"""Moves times ops between two looks at the clock: about a tenth of a second."""

_THREADS = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """When ops are due, as a few numbers. A round is the time of one micro-batch of each pipe.

    Attributes:
        forward: the weight of how early a stage's first forward can start at best.
        ahead: how far forwards run ahead of backwards: this share of the forwards that fit into the least
            time from a micro-batch's forward to its backward on the same stage.
        more: so many rounds further ahead.
        spread: how much longer weight gradients wait on stages whose backwards come early.
        late: how many rounds weight gradients wait.
        noise: how much chance there is, in rounds.
        wait: how long a worker waits for what is due first, in rounds.
        seed: of the chance.
    """

    forward: float
    ahead: float
    more: float
    spread: float
    late: float
    noise: float
    wait: float
    seed: int


class Search:
    """List scheduling and moves for one problem."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self.problem = problem
        self.numbers: Numbers = numbers_of(problem)
        self.steady = problem.steady
        self._seed = seed
        self._scratch: Scratch = scratch_of(self.numbers, problem.workers)
        self._room = room_of(self.numbers, problem.workers)
        lengths = np.bincount(self.numbers.worker, weights=self.numbers.ops, minlength=problem.workers)
        self._first = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self._forward = np.array([x.kind.whole for x in problem.letters])
        self._weights = np.array([x.kind.takes is None for x in problem.letters])
        self._round = max(problem.work()) / np.maximum(self.numbers.ops, 1)
        early = np.array(first_starts(problem))
        self._out, self._back = (
            self._of_stage(early, product) for product in (Product.OUTPUT, Product.INPUT_GRADIENT)
        )
        self._trip = self._back - self._out
        seconds = np.where(self._forward, self.numbers.seconds, 0.0)
        of_worker = np.bincount(self.numbers.worker, weights=seconds, minlength=problem.workers)
        self._forwards = np.maximum(of_worker[self.numbers.worker], 1e-9 * self._round)

    def _of_stage(self, early: Floats, product: Product) -> Floats:
        """By letter, when the op of its stage could start that gives a product to another one."""
        letters = self.problem.letters
        found = {(x.pipe, x.stage): early[i] for i, x in enumerate(letters) if x.kind.gives is product}
        return np.array([found[x.pipe, x.stage] for x in letters])

    def seconds(self, words: Words) -> float:
        """The makespan or steady step of words, by the compiled play; infinite where they deadlock."""
        return self._value(flat_of(words))

    def _value(self, flat: Flat) -> float:
        begin = np.zeros(self.problem.workers)
        if self.steady:
            settle(self.numbers, self._scratch, flat, begin, SETTLED)
        return float(worth(self.numbers, self._scratch, flat, begin, self.steady))

    def built(self, rule: Rule) -> Flat | None:
        """Words by a rule; None where there is none within the limits."""
        rounds = self._round
        backward = rounds * (rule.ahead * self._trip / self._forwards + rule.more)
        due = rule.forward * self._out + np.where(self._forward, 0.0, backward)
        due += self._weights * (rule.spread * (self._back.max(initial=0.0) - self._back) + rule.late * rounds)
        due += np.random.default_rng(rule.seed).random(len(due)) * rule.noise * rounds
        wait = rule.wait * float(rounds.min())
        return self.listed(due, rounds, wait)

    def listed(self, due: Floats, step: Floats, wait: float = 0.0) -> Flat | None:
        """Words by due times: the k-th op of letter l is due at ``due[l] + k * step[l]``."""
        flat = Flat(np.zeros(self._first[-1], dtype=np.int64), self._first)
        found = build(self.numbers, self._scratch, self._room, Due(due, step, wait), flat)
        return flat if found else None

    def starts(self, tries: int = _TRIES, until: float = np.inf) -> list[Words]:
        """The best different orders of list scheduling, best first; ``until`` is a time of ``monotonic``."""
        chance = np.random.default_rng(self._seed)
        found: dict[bytes, tuple[float, Rule, Flat]] = {}
        with ThreadPoolExecutor(_THREADS) as pool:
            for number in range(0, tries, _BATCH):
                if number and monotonic() > until:
                    break
                kept = sorted(found.values(), key=lambda one: one[0])[:_SURVIVORS]
                rules = [
                    _any_rule(chance)
                    if number < tries // 2 or not kept
                    else _like(kept[chance.integers(len(kept))][1], chance)
                    for _ in range(_BATCH)
                ]
                parts = [rules[thread::_THREADS] for thread in range(_THREADS)]
                ends = [until] * _THREADS
                for tried in pool.map(Search._tried, [self, *self._others], parts, ends):
                    found.update((key, one) for key, one in tried.items() if key not in found)
        best = sorted(found.values(), key=lambda one: one[0])[:_SURVIVORS]
        return [words_of(flat) for _, _, flat in best]

    @cached_property
    def _others(self) -> list[Search]:
        """The same search for the other threads."""
        return [Search(self.problem, self._seed) for _ in range(_THREADS - 1)]

    def _tried(self, rules: Iterable[Rule], until: float) -> dict[bytes, tuple[float, Rule, Flat]]:
        """By its word, what each rule is worth; the first in any case."""
        found: dict[bytes, tuple[float, Rule, Flat]] = {}
        for number, rule in enumerate(rules):
            if number and monotonic() > until:
                break
            flat = self.built(rule)
            if flat is not None and (value := self._value(flat)) < NEVER:
                found.setdefault(flat.word.tobytes(), (value, rule, flat))
        return found


def _any_rule(chance: np.random.Generator) -> Rule:
    def sometimes(most: float) -> float:
        return float(chance.random() * most) if chance.random() < 0.5 else 0.0

    return Rule(
        forward=3.5 * float(chance.random()),
        ahead=0.2 + 1.2 * float(chance.random()),
        more=float(chance.random()) - 0.7,
        spread=sometimes(6.0),
        late=sometimes(8.0),
        noise=sometimes(1.0),
        wait=sometimes(0.3),
        seed=int(chance.integers(1 << 30)),
    )


_STEPS = {
    "forward": 0.3,
    "ahead": 0.1,
    "more": 0.2,
    "spread": 0.5,
    "late": 0.5,
    "noise": 0.2,
    "wait": 0.05,
}


_LEAST = {"more": -2.0}


def _like(rule: Rule, chance: np.random.Generator) -> Rule:
    changed = {
        name: max(_LEAST.get(name, 0.0), getattr(rule, name) + float(chance.normal()) * step)
        for name, step in _STEPS.items()
        if chance.random() < 0.4
    }
    if chance.random() < 0.4:
        changed["seed"] = int(chance.integers(1 << 30))
    return replace(rule, **changed)


def improve(
    problem: Problem,
    starts: Iterable[Words] = (),
    *,
    seconds: float = 10.0,
    moves: int | None = None,
    seed: int = 0,
    goal: float = 0.0,
    report: Report | None = None,
) -> Words | None:
    """The best order that list scheduling and moves find.

    Args:
        problem: what is ordered.
        starts: orders to begin with, besides those of list scheduling.
        seconds: time for it; without ``moves`` as many are made as there is time for.
        moves: how many moves are made in all. Then the result does not depend on the machine.
        seed: of the chance.
        goal: seconds that cannot be beaten; where they are reached, the search ends.
        report: told of each better order.

    Returns:
        Words within the limits; None where none were found.

    Raises:
        Stopped: at Ctrl-C, with the best words so far.
    """
    began = monotonic()
    search = Search(problem, seed)
    best = _Best(search, goal, report)
    known = [words for words in starts if problem.fits(words)]
    try:
        best.take(known, "a start")
        tries = _TRIES if moves is None else min(_TRIES, 50 + moves // 400)
        listed = search.starts(tries, until=np.inf if moves is not None else began + _LISTED * seconds)
        best.take(listed, "list scheduling")
        left = None if moves is not None else max(0.0, began + seconds - monotonic())
        _anneal(search, best, [*known, *listed], _Budget(moves, left), seed)
    except KeyboardInterrupt:
        raise Stopped(best.words) from None
    return best.words


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with the best words so far."""

    def __init__(self, words: Words | None) -> None:
        super().__init__("stopped")
        self.words = words


_LISTED = 0.25
"""The share of time for list scheduling."""


class _Best:
    """The best order so far."""

    def __init__(self, search: Search, goal: float, report: Report | None) -> None:
        self.words: Words | None = None
        self.seconds = NEVER
        self._search, self._goal, self._report = search, goal, report

    @property
    def reached(self) -> bool:
        """Whether nothing can be better."""
        return self.seconds <= self._goal * (1 + 1e-9)

    def take(self, orders: Sequence[Words], how: str) -> None:
        """Keep the best of some orders if it is better. Only that one is simulated, which takes longest."""
        if not orders:
            return
        words = min(orders, key=self._search.seconds)
        value = value_of(self._search.problem, words)
        if value < self.seconds * (1 - 1e-12):
            self.words, self.seconds = words, value
            if self._report is not None:
                self._report(value, how)


@dataclass(frozen=True, slots=True)
class _Budget:
    """How long to go on: a number of moves, or seconds."""

    moves: int | None
    seconds: float | None

    def part(self, share: float) -> _Budget:
        moves, seconds = self.moves, self.seconds
        return _Budget(
            None if moves is None else int(moves * share), None if seconds is None else seconds * share
        )

    def done(self, moves: int, seconds: float) -> float:
        """Which share of it is used up."""
        if self.moves is not None:
            return moves / self.moves if self.moves else 1.0
        return seconds / self.seconds if self.seconds else 1.0


@dataclass(slots=True)
class _Climber:
    """One order on its way."""

    flat: Flat
    state: State
    scratch: Scratch

    @property
    def best(self) -> float:
        return float(self.state.worth[1])


def _anneal(search: Search, best: _Best, starts: Sequence[Words], budget: _Budget, seed: int) -> None:
    """Anneal orders in rounds; after each, only the better ones go on."""
    unit = float(np.average(search.numbers.seconds, weights=search.numbers.ops))
    if unit == 0:
        return
    ordered = sorted({words: search.seconds(words) for words in starts}.items(), key=lambda item: item[1])
    climbers = [
        _climber(search, words, seed * 1_000_003 + number)
        for number, (words, value) in enumerate(ordered[: _ROUNDS[0]])
        if value < NEVER
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, wanted in enumerate(_ROUNDS):
            climbers = sorted(climbers, key=lambda one: one.best)[:wanted]
            if not climbers or best.reached:
                return
            threads = 1 if budget.moves is not None else min(_THREADS, len(climbers))
            each = budget.part(threads / (len(_ROUNDS) * len(climbers)))
            heat = _WARM * unit / 2 ** max(0, number - 1), _COLD * unit
            stop = Event()
            jobs = [pool.submit(_climb, search, one, each, heat, stop) for one in climbers]
            try:
                for job in jobs:
                    job.result()
            except KeyboardInterrupt:
                stop.set()
                raise
            finally:
                best.take([words_of(Flat(x.state.best, x.flat.first)) for x in climbers], "local moves")


def _climber(search: Search, words: Words, seed: int) -> _Climber:
    flat = flat_of(words)
    one = _Climber(
        flat,
        state_of(search.numbers, flat, seed),
        scratch_of(search.numbers, search.problem.workers),
    )
    _restart(search, one)
    return one


def _restart(search: Search, one: _Climber) -> None:
    """Begin at the best words so far."""
    one.flat.word[:] = one.state.best
    one.state.begin[:] = 0.0
    if search.steady:
        settle(search.numbers, one.scratch, one.flat, one.state.begin, SETTLED)
    start(search.numbers, one.scratch, one.flat, one.state, search.steady)


def _climb(search: Search, one: _Climber, budget: _Budget, heat: tuple[float, float], stop: Event) -> None:
    """Anneal one order, from its best, in slices."""
    _restart(search, one)
    warm, cold = heat
    slice_moves = max(1, int(_SLICE_MOVES_OPS / search.problem.ops))
    moves, began = 0, monotonic()
    while not stop.is_set() and (done := budget.done(moves, monotonic() - began)) < 1:
        if budget.moves is not None:
            count = min(slice_moves, budget.moves - moves)
        else:  # a short one first, then none that is longer than what is left of the time
            left = int(moves / done * (1 - done)) if done and moves else slice_moves // 16
            count = max(1, min(slice_moves, left))
        until = done if budget.moves is None else budget.done(moves + count, 0.0)
        from_heat, to_heat = (warm * (cold / warm) ** share for share in (done, until))
        plan = Plan(count, from_heat, to_heat, search.steady)
        anneal(search.numbers, one.scratch, one.flat, one.state, plan)
        moves += count
