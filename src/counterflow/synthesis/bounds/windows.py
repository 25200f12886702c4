"""Windows of ops: the minimum time before each op's start, and after its end.

Rules that hold in every order have the form: *the k-th op of one letter, then the (k + shift)-th of another*.
They follow from the inputs of ops, from the order of micro-batches, and from limits of memory if one stage
alone fills a worker's memory.

Invariant: every schedule of the problem keeps the rules once its micro-batches are numbered by their order
(``problem.py`` says why that delays nothing); so heads and tails hold for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter

from counterflow.schedule.ir import OpKind

from ..problem import CLOSE, Problem, Store

_CLOSELY = 300_000
"""Number of ops times workers from which on ..."""

_NEAR = 8
"""... only this many of the first and last micro-batches are considered for each worker's span."""


@dataclass(frozen=True, slots=True)
class Precedence:
    """A rule: the (k + shift)-th op of a letter starts this long after the end of the k-th of another."""

    before: int
    after: int
    shift: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Windows:
    """The rules of a problem, and the heads and tails that follow.

    Attributes:
        problem: the problem.
        busy: by letter, seconds that its worker is busy with messages after each op.
        rules: rules that hold in every order.
    """

    problem: Problem
    busy: tuple[float, ...]
    rules: tuple[Precedence, ...]

    @cached_property
    def heads(self) -> list[list[float]]:
        """Minimum time from the start of the step to an op's start, by letter and micro-batch."""
        return self._longest([0.0] * len(self.problem.letters))

    @cached_property
    def tails(self) -> list[list[float]]:
        """Minimum time from an op's end to the end of the step, by letter and micro-batch."""
        return self._longest([self.problem.tail + summed for summed in self.summed], back=True)

    def of_span(self, worker: int) -> tuple[list[list[float]], list[list[float]]]:
        """Heads and tails within a worker's span: from its first start until it has its gradients.

        They are -inf for ops that do not follow one of its ops, or are not followed by one. In large problems
        only the first and last micro-batches are considered closely.
        """
        letters = self.problem.letters
        near = None if self.problem.ops * self.problem.workers <= _CLOSELY else _NEAR
        letters_held = self.problem.of_worker(worker)
        summed = {
            n: sync.seconds for sync in self.problem.sums if worker in sync.workers for n in sync.letters
        }
        starts = [0.0 if n in letters_held else -math.inf for n in range(len(letters))]
        lasts = [
            max(self.busy[n] if n in letters_held else -math.inf, summed.get(n, -math.inf))
            for n in range(len(letters))
        ]
        return self._longest(starts, near), self._longest(lasts, near, back=True)

    def _longest(
        self, first: list[float], near: int | None = None, *, back: bool = False
    ) -> list[list[float]]:
        """Longest paths to the start of each op from ops that start at ``first``, by letter, or later.

        With ``back`` time is reversed: then they are paths from the end of each op. Without a path it is
        -inf. The first ``near`` micro-batches are computed, and the others follow from these.
        """
        letters = self.problem.letters
        into: list[list[tuple[int, int, float]]] = [[] for _ in letters]
        for rule in self.rules:
            source, target = (rule.after, rule.before) if back else (rule.before, rule.after)
            into[target].append((source, rule.shift, rule.seconds))
        order = self._order[::-1] if back else self._order
        paths: list[list[float]] = [[] for _ in letters]
        for k in range(min(max(x.count for x in letters), near or self.problem.ops)):
            for n in order:
                if k >= letters[n].count:
                    continue
                at = first[n]
                for source, shift, seconds in into[n]:
                    if k >= shift:
                        at = max(at, paths[source][k - shift] + letters[source].seconds + seconds)
                paths[n].append(at)
        for x, busy, row in zip(letters, self.busy, paths, strict=True):
            row += [row[-1] + k * (x.seconds + busy) for k in range(1, x.count - len(row) + 1)]
        return [row[::-1] for row in paths] if back else paths

    @cached_property
    def summed(self) -> tuple[float, ...]:
        """Seconds of the sum that waits for each letter; 0 if there is none."""
        seconds = [0.0] * len(self.problem.letters)
        for sync in self.problem.sums:
            for letter in sync.letters:
                seconds[letter] = sync.seconds
        return tuple(seconds)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return in_order(self.problem)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {n: place for place, n in enumerate(self._order)}

    def later(self, letter: int, wanted: Collection[int] | None = None) -> dict[int, float]:
        """Minimum time from an op's start to the ops of its micro-batch that follow from it, by letter.

        Args:
            letter: letter of the op.
            wanted: letters that are surely in the result; None: all.
        """
        times = {letter: 0.0}
        letters, places = self.problem.letters, self._places
        end = None if wanted is None else 1 + max((places[n] for n in wanted), default=-1)
        for n in self._order[places[letter] + 1 : end]:
            for need in letters[n].needs:
                if need.letter in times:
                    waits = self.busy[need.letter] if need.link is None else need.seconds
                    at = times[need.letter] + letters[need.letter].seconds + waits
                    times[n] = max(times.get(n, 0.0), at)
        return times


def in_order(problem: Problem) -> tuple[int, ...]:
    """The letters, each after the letters that it needs for the same micro-batch."""
    needed = {n: [need.letter for need in x.needs] for n, x in enumerate(problem.letters)}
    return tuple(TopologicalSorter(needed).static_order())


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
            rules.append(Precedence(need.letter, n, 0, waits))
        rules.append(Precedence(n, n, 1, busy[n]))
    for store in problem.stores:
        for worker in range(problem.workers):
            rules += [
                replace(rule, seconds=rule.seconds + busy[rule.before])
                for pipe in range(problem.workload.placement.pipes)
                for rule in _rules_of_store(problem, store, worker, pipe)
            ]
    return Windows(problem, tuple(busy), tuple(rules))


def _rules_of_store(problem: Problem, store: Store, worker: int, pipe: int) -> Iterator[Precedence]:
    """Rules that follow from a limit on a worker, for the stages of one pipe that it holds, and their slices.

    Say u <= v if neither the stage nor the slice of u is later than that of v: then the forward of u comes
    before that of v, and its backward after that of v. Say the forward of u for micro-batch k + c has started
    and the input gradient of v (u <= v) for k has not ended. Then all micro-batches from k to k + c hold all
    up to u, and k holds the rest of all up to v as well, now or later while the others still do. If that
    exceeds the limit, it is impossible.
    """
    letters = problem.letters
    letters_held = [n for n in problem.of_worker(worker) if letters[n].pipe == pipe]
    number: dict[tuple[int, int], dict[OpKind, int]] = {}
    for n in letters_held:
        number.setdefault((letters[n].stage, letters[n].part), {})[letters[n].kind] = n
    units = sorted(number)
    chains = [_Chain.of(problem, store, number[unit]) for unit in units]
    if any(chain.least <= 0 for chain in chains):
        return
    most = store.allowed(worker)
    up_to = [
        {place for place, second in enumerate(units) if second[0] <= unit[0] and second[1] <= unit[1]}
        for unit in units
    ]
    for chain, low in zip(chains, up_to, strict=True):
        below = math.fsum(chains[place].least for place in low)
        for last, high in zip(chains, up_to, strict=True):
            if not low <= high:
                continue
            room = count_within(most - math.fsum(chains[place].least for place in high - low), below)
            # The memory that is then freed is freed by a W of k, if input gradients free nothing.
            waits = min(chains[place].weights for place in high)
            if 0 < room < letters[chain.forward].count:
                yield Precedence(last.input_gradient, chain.forward, room, waits)
        if chain.after > 0 and chain.last != chain.input_gradient:
            room = count_within(most, min(chain.least, chain.after))
            if room < letters[chain.forward].count:
                yield Precedence(chain.last, chain.forward, room)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Memory that a micro-batch holds of one stage and slice.

    Attributes:
        forward: letter of its forward.
        input_gradient: letter of its backward, or input gradient.
        last: letter that ends it: its backward, or weight gradients.
        least: minimum memory until its input gradient has ended.
        after: memory from then until the end.
        weights: seconds of the weight gradients, if the input gradient frees nothing; otherwise 0.
    """

    forward: int
    input_gradient: int
    last: int
    least: float
    after: float
    weights: float

    @classmethod
    def of(cls, problem: Problem, store: Store, number: Mapping[OpKind, int]) -> _Chain:
        forward = number[OpKind.FORWARD]
        weights = number.get(OpKind.WEIGHT_GRADIENTS)
        middle = number[OpKind.BACKWARD if weights is None else OpKind.INPUT_GRADIENT]
        memory = store.at_start[forward] + store.at_end[forward]
        least = min(store.at_start[forward], memory, memory + store.at_start[middle])
        if (recomputation := number.get(OpKind.RECOMPUTATION)) is not None:  # anywhere between the two
            memory += store.at_start[recomputation] + store.at_end[recomputation]
        after = memory + store.at_start[middle] + store.at_end[middle]
        if weights is None:
            return cls(forward, middle, middle, least, after, 0.0)
        after = min(after, after + store.at_start[weights])
        frees_nothing = min(after, memory + store.at_start[middle]) >= least
        return cls(
            forward,
            middle,
            weights,
            least,
            after,
            problem.letters[weights].seconds if frees_nothing else 0.0,
        )


def count_within(most: float, size: float) -> int:
    """Number of things of a size that fit into a limit.

    >>> count_within(0.3, 0.1)
    3
    """
    return math.floor(min(most / size * (1 + CLOSE), 2.0**60))
