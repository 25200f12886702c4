"""Search: orders by list scheduling, then by local moves. Fast, good at any size, without a proof.

List scheduling gives each op a time at which it is due and lets a free worker take what is due first
(``building.py``). Due times follow a rule of a few numbers, by which forwards run ahead of backwards and
weight gradients lag behind; the numbers are improved by trying. The best orders, and those that the caller
knows, are then annealed (``moves.py``), fewer of them from round to round.

Invariant: nothing worse than the best start that keeps the limits is returned. The same seed and number of
moves give the same orders on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from threading import Event
from time import monotonic

import numpy as np

from counterflow.schedule.ir import Product

from ..bounds.windows import first_starts
from ..kernel import (
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
from ..problem import CLOSE, Problem, Words, value_of
from .building import Due, build, room_of
from .moves import Plan, anneal, start, state_of

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
        self.unit = float(np.average(self.numbers.seconds, weights=self.numbers.ops))
        """Mean seconds of an op."""
        self._seed = seed
        self._scratch: Scratch = scratch_of(self.numbers, problem.workers)
        self._room = room_of(self.numbers, problem.workers)
        lengths = np.bincount(self.numbers.worker, weights=self.numbers.ops, minlength=problem.workers)
        self._first = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self._weights = np.array([x.kind.takes is None for x in problem.letters])
        self._round = max(problem.work()) / np.maximum(self.numbers.ops, 1)
        early = np.array(first_starts(problem))
        self._out, self._back = (
            self._of_stage(early, product) for product in (Product.OUTPUT, Product.INPUT_GRADIENT)
        )
        self._trip = self._back - self._out
        seconds = np.where(self.numbers.forward, self.numbers.seconds, 0.0)
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
        due = rule.forward * self._out + np.where(self.numbers.forward, 0.0, backward)
        due += self._weights * (rule.spread * (self._back.max(initial=0.0) - self._back) + rule.late * rounds)
        due += np.random.default_rng(rule.seed).random(len(due)) * rule.noise * rounds
        wait = rule.wait * float(rounds.min())
        return self.listed(due, rounds, wait)

    def listed(self, due: Floats, step: Floats, wait: float = 0.0) -> Flat | None:
        """Words by due times: the k-th op of letter l is due at ``due[l] + k * step[l]``."""
        flat = Flat(np.zeros(self._first[-1], dtype=np.int64), self._first)
        found = build(self.numbers, self._scratch, self._room, Due(due, step, wait), flat)
        return flat if found else None

    def starts(self, tries: int = _TRIES, until: float = inf) -> list[Words]:
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
) -> Iterator[tuple[str, Words]]:
    """Orders that list scheduling and moves find, with how each was found: better than all before it.

    Ctrl-C is raised again once the best order was yielded.

    Args:
        problem: what is ordered.
        starts: orders to begin with, besides those of list scheduling.
        seconds: time for it; without ``moves`` as many are made as there is time for.
        moves: how many moves are made in all. Then the result does not depend on the machine.
        seed: of the chance.
        goal: seconds that cannot be beaten; where they are reached, the search ends.
    """
    began = monotonic()
    search = Search(problem, seed)
    least = inf

    def better(how: str, orders: Sequence[Words]) -> Iterator[tuple[str, Words]]:
        """The best of some orders, if it is. Only that one is simulated, which takes longest."""
        nonlocal least
        if orders:
            words = min(orders, key=search.seconds)
            value = value_of(problem, words)
            if value < least * (1 - _BETTER):
                least = value
                yield how, words

    known = [words for words in starts if problem.fits(words)]
    yield from better("a start", known)
    tries = _TRIES if moves is None else min(_TRIES, 50 + moves // 400)
    listed = search.starts(tries, until=inf if moves is not None else began + _LISTED * seconds)
    yield from better("list scheduling", listed)
    budget = _Budget(moves, None if moves is not None else max(0.0, began + seconds - monotonic()))
    ordered = sorted(
        {words: search.seconds(words) for words in (*known, *listed)}.items(), key=lambda one: one[1]
    )
    climbers = [
        _Climber(search, words, seed * 1_000_003 + number)
        for number, (words, value) in enumerate(ordered[: _ROUNDS[0]])
        if value < NEVER
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, wanted in enumerate(_ROUNDS if search.unit else ()):
            climbers = sorted(climbers, key=lambda one: one.best)[:wanted]
            if not climbers or least <= goal * (1 + CLOSE):
                return
            threads = 1 if moves is not None else min(_THREADS, len(climbers))
            each = budget.part(threads / (len(_ROUNDS) * len(climbers)))
            warm = _WARM / 2 ** max(0, number - 1)
            stop = Event()
            jobs = [pool.submit(one.climb, each, warm, stop) for one in climbers]
            try:
                for job in jobs:
                    job.result()
            finally:  # what was found until Ctrl-C counts
                stop.set()
                wait(jobs)
                yield from better("local moves", [one.words for one in climbers])


_BETTER = 1e-12
"""What is better by less is as good."""

_LISTED = 0.25
"""The share of time for list scheduling."""


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


class _Climber:
    """One order on its way."""

    def __init__(self, search: Search, words: Words, seed: int) -> None:
        self._search, self._numbers = search, search.numbers
        self._flat = flat_of(words)
        self._state = state_of(search.numbers, self._flat, seed)
        self._scratch = scratch_of(search.numbers, search.problem.workers)
        self._restart()

    @property
    def best(self) -> float:
        """What the best order so far is worth."""
        return float(self._state.worth[1])

    @property
    def words(self) -> Words:
        """The best order so far."""
        return words_of(Flat(self._state.best, self._flat.first))

    def _restart(self) -> None:
        """Begin at the best order so far."""
        self._flat.word[:] = self._state.best
        self._state.begin[:] = 0.0
        if self._search.steady:
            settle(self._numbers, self._scratch, self._flat, self._state.begin, SETTLED)
        start(self._numbers, self._scratch, self._flat, self._state, self._search.steady)

    def climb(self, budget: _Budget, warm: float, stop: Event) -> None:
        """Anneal the order, from its best, in slices; as warm at first, in mean seconds of an op."""
        self._restart()
        unit = self._search.unit
        warm, cold = warm * unit, _COLD * unit
        slice_moves = max(1, int(_SLICE_MOVES_OPS / self._search.problem.ops))
        moves, began = 0, monotonic()
        while not stop.is_set() and (done := budget.done(moves, monotonic() - began)) < 1:
            if budget.moves is not None:
                count = min(slice_moves, budget.moves - moves)
            else:  # a short one first, then none that is longer than what is left of the time
                left = int(moves / done * (1 - done)) if done and moves else slice_moves // 16
                count = max(1, min(slice_moves, left))
            until = done if budget.moves is None else budget.done(moves + count, 0.0)
            from_heat, to_heat = (warm * (cold / warm) ** share for share in (done, until))
            plan = Plan(count, from_heat, to_heat, self._search.steady)
            anneal(self._numbers, self._scratch, self._flat, self._state, plan)
            moves += count
