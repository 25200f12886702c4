"""When each op may run at all: the least time before its start, and after its end.

What holds in every order is a list of rules: *the k-th op of one letter, then the (k + shift)-th of another*.
They come from what ops take, from the order of micro-batches, and from limits of memory where one stage
alone fills a worker's memory.

Invariant: every schedule of the problem keeps the rules once its micro-batches are numbered by their order
(``problem.py`` says why that delays nothing); so heads and tails hold for each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from counterflow.schedule.ir import OpKind

from .problem import Objective, Problem, Store

CLOSE = 1e-9
"""Of a limit: so much more is still within it, since sums of floats round."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The (k + shift)-th op of a letter starts so long after the end of the k-th of another."""

    before: int
    after: int
    shift: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Windows:
    """The rules of a problem, and the heads and tails that follow.

    Attributes:
        problem: the problem.
        busy: by letter, how long its worker is busy with its messages after each op.
        rules: what holds in every order.
    """

    problem: Problem
    busy: tuple[float, ...]
    rules: tuple[Rule, ...]

    @cached_property
    def heads(self) -> list[list[float]]:
        """By letter and micro-batch: no op starts earlier."""
        letters = self.problem.letters
        into: list[list[Rule]] = [[] for _ in letters]
        for rule in self.rules:
            into[rule.after].append(rule)
        found: list[list[float]] = [[] for _ in letters]
        for k in range(max(x.count for x in letters)):
            for n in self._order:
                if k >= letters[n].count:
                    continue
                at = 0.0
                for rule in into[n]:
                    if k >= rule.shift:
                        ended = found[rule.before][k - rule.shift] + letters[rule.before].seconds
                        at = max(at, ended + rule.seconds)
                found[n].append(at)
        return found

    @cached_property
    def tails(self) -> list[list[float]]:
        """By letter and micro-batch: after the op's end the step lasts at least so much longer."""
        problem, letters = self.problem, self.problem.letters
        out: list[list[Rule]] = [[] for _ in letters]
        for rule in self.rules:
            out[rule.before].append(rule)
        last = [problem.tail + summed for summed in self.summed]
        found = [[0.0] * x.count for x in letters]
        for k in reversed(range(max(x.count for x in letters))):
            for n in reversed(self._order):
                if k >= letters[n].count:
                    continue
                most = last[n]
                for rule in out[n]:
                    if k + rule.shift < letters[rule.after].count:
                        after = found[rule.after][k + rule.shift] + letters[rule.after].seconds
                        most = max(most, after + rule.seconds)
                found[n][k] = most
        return found

    @cached_property
    def summed(self) -> tuple[float, ...]:
        """By letter, the seconds of the sum that waits for it; 0 where there is none."""
        found = [0.0] * len(self.problem.letters)
        for one in self.problem.sums:
            for letter in one.letters:
                found[letter] = one.seconds
        return tuple(found)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The letters, each after those that it needs for the same micro-batch."""
        needed = {n: [need.letter for need in x.needs] for n, x in enumerate(self.problem.letters)}
        return tuple(TopologicalSorter(needed).static_order())

    def later(self, letter: int) -> dict[int, float]:
        """From the start of an op to the starts of the ops of its micro-batch that follow from it; least."""
        found = {letter: 0.0}
        letters = self.problem.letters
        for n in self._order:
            for need in letters[n].needs:
                if need.letter in found:
                    waits = self.busy[need.letter] if need.link is None else need.seconds
                    at = found[need.letter] + letters[need.letter].seconds + waits
                    found[n] = max(found.get(n, 0.0), at)
        return found


def windows_of(problem: Problem) -> Windows:
    """The rules of a problem."""
    letters = problem.letters
    busy = [0.0] * len(letters)
    if problem.busy:
        for x in letters:
            for need in x.needs:
                if need.link is not None:
                    busy[need.letter] += need.seconds
    rules = []
    for n, x in enumerate(letters):
        for need in x.needs:
            waits = busy[need.letter] if need.link is None else need.seconds
            rules.append(Rule(need.letter, n, 0, waits))
        rules.append(Rule(n, n, 1, busy[n]))
    for store in problem.stores:
        for worker in range(problem.workers):
            rules += [
                Rule(before, after, shift, busy[before])
                for before, after, shift in chains_of_store(problem, store, worker)
            ]
    return Windows(problem, tuple(busy), tuple(rules))


def chains_of_store(problem: Problem, store: Store, worker: int) -> list[tuple[int, int, int]]:
    """What a limit means on a worker with one stage of one pipe: (letter, later letter, shift)."""
    of_kind = {problem.letters[n].kind: n for n in problem.of_worker(worker)}
    if len(of_kind) < len(problem.of_worker(worker)):
        return []
    forward = of_kind[OpKind.FORWARD]
    held = store.at_start[forward] + store.at_end[forward]
    least = min(held, store.at_start[forward])
    found = []
    for kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENTS):
        if kind not in of_kind:
            continue
        n = of_kind[kind]
        least = min(least, held, held + store.at_start[n])
        if least <= 0:
            break
        # Where it has not ended, the room + 1 micro-batches from k on hold at least so much each.
        room = count_within(store.most[worker], least)
        if room < problem.letters[forward].count:
            found.append((n, forward, room))
        held += store.at_start[n] + store.at_end[n]
    return found


def count_within(most: float, each: float) -> int:
    """How many of something fit into a limit.

    >>> count_within(0.3, 0.1)
    3
    """
    return math.floor(min(most / each * (1 + CLOSE), 2.0**60))


def is_steady(problem: Problem) -> bool:
    """Whether the steady step is made small, not the makespan."""
    return problem.objective is Objective.STEADY
