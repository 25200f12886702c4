"""Lower bounds that no order can beat, with their reasons.

Each bound holds for every schedule of the problem within its limits, for any placement, number of pipes and
unequal workers:

* *path*: one micro-batch through all stages, and the work that precedes and follows it on its workers;
* *work*: of one worker, or link, whose ops have heads and tails (Jackson's preemptive one-machine bound);
* *memory*: while its first micro-batch makes its round trip through the other workers, a worker can run only
  the forwards that its limit holds; after its last forward it can run only the backwards of what it held then
  (Qi et al., arXiv 2401.10241, appendix B, has the first half);
* *room*: each micro-batch holds memory for a minimum time, and only a certain number fit at once;
* *round trips*: if no two micro-batches fit at once, a worker idles while each one makes its round trip
  through the other workers, but for what still fits beside it: the rest of earlier ones, and the first
  forwards of later ones.

Invariant: because sums of floats round, a bound may exceed the truth by 1e-9 of it, and by no more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..problem import RECOMPUTED, Problem, Store
from .windows import Windows, count_within, windows_of


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound, and its reason.

    Attributes:
        seconds: bound of the objective.
        reason: why the bound holds, in a sentence.
    """

    seconds: float
    reason: str


def lower_bound(problem: Problem) -> Bound:
    """The best bound of all; among equals the first, which is the simplest.

    >>> from counterflow.schedule.placement import linear
    >>> from counterflow.schedule.workload import plain
    >>> from counterflow.synthesis.posing import (problem_of)
    >>> print(lower_bound(problem_of(plain(linear(4), 8))))
    Bound(seconds=33.0, reason='worker 3 has 24 of work plus 9 of unavoidable idle time')
    """
    best = Bound(0.0, "time does not run backwards")
    for bound in bounds(problem):
        if bound.seconds > best.seconds * (1 + 1e-12):
            best = bound
    return best


def bounds(problem: Problem) -> Iterator[Bound]:
    """All bounds of a problem, simple ones first.

    In the steady state a worker's span, from its first start until it has its gradients, replaces the
    makespan: its mean over many steps is at most the step time, and each single step keeps all rules.
    """
    windows = windows_of(problem)
    if not problem.steady:
        yield _path(windows)
    for worker in range(problem.workers):
        if problem.of_worker(worker):
            yield from _worker(_Side(windows, worker))
        summed = [sync for sync in problem.sums if worker in sync.workers]
        if summed:
            seconds = math.fsum(sync.seconds for sync in summed)
            if not problem.steady:
                ready = [
                    max(windows.heads[n][-1] + problem.letters[n].seconds for n in sync.letters)
                    for sync in summed
                ]
                jobs = zip(
                    ready, (sync.seconds for sync in summed), [problem.tail] * len(summed), strict=True
                )
                seconds = one_machine(jobs)
            yield Bound(seconds, f"the gradient syncs of worker {worker} run one after another")
    yield from _links(windows)


def _path(windows: Windows) -> Bound:
    letters = windows.problem.letters
    most, at = max(
        (windows.heads[n][k] + x.seconds + windows.tails[n][k], n)
        for n, x in enumerate(letters)
        for k in range(x.count)
    )
    name, worker = letters[at], letters[at].worker
    return Bound(most, f"micro-batches occupy {name} of worker {worker} for this long")


def _worker(side: _Side) -> Iterator[Bound]:
    """A worker's work, and its idle time for each reason.

    If its forwards do not all fit into its memory, the last one starts after a backward. Then its idle times
    before the first backward and after the last forward add up. Otherwise one of the two counts, and the
    other is replaced by its idle time before its first op or after its last.
    """
    most = one_machine(side.jobs())
    name = f"worker {side.worker} has {side.work:,.6g} to do"
    if most > side.work:
        idle = f"{most - side.work:,.6g} of unavoidable idle time"
        yield Bound(most, f"worker {side.worker} has {side.work:,.6g} of work plus {idle}")
    else:
        yield Bound(most, name)
    first, last = side.before_first, side.after_last
    before = max(side.before_backward - side.forwards_within, first)
    after = max(side.after_forward - side.after_last_forward, last)
    if not side.full:
        if before - first >= after - last:
            after = last
        else:
            before = first
    yield Bound(
        before + side.work + after,
        f"{name}, idles {before:,.6g} before its first backward can start and {after:,.6g} after its last "
        "forward, when no more fits its memory",
    )
    for area, store in side.areas:
        yield Bound(
            first + area + last,
            f"worker {side.worker} holds {store.name} of each micro-batch too long for its limit, "
            f"{store.most[side.worker]:,.10g}",
        )
    if side.away:
        yield Bound(
            first + side.work + side.away + last,
            f"{name}, and idles {side.away:,.6g} in all while micro-batches that nearly fill its memory make "
            "their round trips",
        )


def _links(windows: Windows) -> Iterator[Bound]:
    problem = windows.problem
    if not problem.lanes:
        return
    heads, tails, letters = windows.heads, windows.tails, problem.letters
    jobs: dict[int, list[tuple[float, float, float]]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for n, x in enumerate(letters):
        for need in x.needs:
            if need.link is None:
                continue
            ends[need.link] = letters[need.letter].worker, x.worker
            maker_seconds = letters[need.letter].seconds
            jobs.setdefault(need.link, []).extend(
                (heads[need.letter][k] + maker_seconds, need.seconds, x.seconds + tails[n][k])
                for k in range(x.count)
            )
    for link, link_jobs in jobs.items():
        sender, receiver = ends[link]
        work = sum(p for _, p, _ in link_jobs)
        seconds = work if problem.steady else one_machine(link_jobs)
        yield Bound(seconds, f"the messages from worker {sender} to {receiver} take {work:,.6g}")


# One worker


class _Side:
    """Figures that limit one worker.

    Attributes:
        worker: its number.
        letters_held: its letters.
        work: seconds of compute, including messages if it is busy with them.
        before_first: seconds before its first op can start.
        after_last: seconds that follow its last op.
        before_backward: seconds before its first backward, or recomputation, can start.
        after_forward: seconds from the start of its last forward to the end.
        forwards_within: maximum seconds of compute before that.
        after_last_forward: maximum seconds of compute from the start of its last forward on.
        full: whether its forwards do not all fit into its memory.
        areas: by store, time that its limit needs to hold everything that micro-batches hold.
        away: seconds without work during the round trips of all micro-batches, if no two fit at once.
    """

    def __init__(self, windows: Windows, worker: int) -> None:
        problem = windows.problem
        self._problem, self._windows = problem, windows
        self.worker = worker
        self.letters_held = problem.of_worker(worker)
        letters = problem.letters
        self._takes = [x.seconds + busy for x, busy in zip(letters, windows.busy, strict=True)]
        self.work = math.fsum(letters[n].count * self._takes[n] for n in self.letters_held)
        if problem.steady:
            self._heads, self._tails = windows.of_span(worker)
        else:
            self._heads, self._tails = windows.heads, windows.tails
        self.before_first = min(self._heads[n][0] for n in self.letters_held)
        self.after_last = min(self._tails[n][-1] - windows.busy[n] for n in self.letters_held)
        self._forwards = [n for n in self.letters_held if letters[n].kind.is_forward]
        # The first backward belongs to the highest stage of some pipe, and to its last slice, since the
        # others need it; likewise the last forward.
        highest = {letters[n].pipe: letters[n].stage for n in self._forwards}
        last = [
            n
            for n in self._forwards
            if letters[n].stage == highest[letters[n].pipe] and letters[n].part == letters[n].parts - 1
        ]
        self._last_forwards = last
        self._recomputations = {
            letters[n].unit: n for n in self.letters_held if letters[n].turn == RECOMPUTED
        }
        # A recomputation needs no other stage's backward, so that it may be of any stage.
        first_backwards = list(self._recomputations.values()) or [self._of_stage(n)[0] for n in last]
        self.before_backward = min(self._heads[n][0] for n in first_backwards)
        self.after_forward = min(letters[n].seconds + self._tails[n][-1] for n in last)
        self.forwards_within = math.fsum(letters[n].count * self._takes[n] for n in self._forwards)
        self.after_last_forward = self._rest()
        self.full = False
        self.areas: list[tuple[float, Store]] = []
        self.away = 0.0
        for store in problem.stores:
            if math.isinf(store.most[worker]) or not all(self._states(store, n) for n in self._forwards):
                continue
            self._limit(store)

    def jobs(self) -> Iterator[tuple[float, float, float]]:
        """Its ops with heads and tails."""
        for n in self.letters_held:
            takes, busy = self._takes[n], self._windows.busy[n]
            for head, tail in zip(self._heads[n], self._tails[n], strict=True):
                yield head, takes, tail - busy

    def _of_stage(self, forward: int) -> list[int]:
        letters = self._problem.letters
        stage_letters = [n for n in self.letters_held if letters[n].unit == letters[forward].unit]
        return sorted(
            (n for n in stage_letters if letters[n].turn > RECOMPUTED), key=lambda n: letters[n].turn
        )

    def _recomputed(self, forward: int) -> int | None:
        return self._recomputations.get(self._problem.letters[forward].unit)

    def _states(self, store: Store, forward: int) -> list[tuple[float, float]]:
        """Memory of a micro-batch after its forward and after its input gradient, each with the work that is
        then left.

        What a recomputation takes and leaves is counted as its backward's, since it may run just before that.
        Empty if it is negative at some time, which no bound here covers.
        """
        memory = store.at_start[forward] + store.at_end[forward]
        rest, recomputation = self._of_stage(forward), self._recomputed(forward)
        states = []
        for place, n in enumerate(rest):
            change = 0.0
            if recomputation is not None and not place:
                change = store.at_start[recomputation] + store.at_end[recomputation]
            if memory < 0 or memory + change + store.at_start[n] < 0:
                return []
            more = rest[place:] if recomputation is None or place else [recomputation, *rest]
            states.append((memory, math.fsum(self._takes[m] for m in more)))
            memory += change + store.at_start[n] + store.at_end[n]
        return states if store.at_start[forward] >= 0 else []

    def _limit(self, store: Store) -> None:
        letters, most, allowed = self._problem.letters, store.most[self.worker], store.allowed(self.worker)
        states = {n: self._states(store, n) for n in self._forwards}
        # Before the first backward nothing is freed.
        goods = [(self._takes[n], states[n][0][0], letters[n].count) for n in self._forwards]
        self.forwards_within = min(self.forwards_within, most_within(allowed, goods))
        if math.fsum(letters[n].count * states[n][0][0] for n in self._forwards) > allowed:
            self.full = True
        # When the last forward starts, the remaining work is held, and there is room for that forward.
        goods = [(rest, size, letters[n].count) for n in self._forwards for size, rest in states[n]]
        rests = []
        for last in self._last_forwards:
            itself = self._takes[last] + states[last][0][1]
            rests.append(itself + most_within(allowed - store.at_start[last], goods))
        self.after_last_forward = min(self.after_last_forward, max(rests))
        area = math.fsum(letters[n].count * self._area(store, n, states[n]) for n in self._forwards)
        sizes = {size for n in self._forwards for size, _ in states[n]}
        if len(sizes) == 1 and (size := sizes.pop()) > 0:
            most = min(most, size * count_within(most, size))
        self.areas.append((area / most, store))
        self.away = max(self.away, self._away(store, states))

    def _area(self, store: Store, forward: int, states: list[tuple[float, float]]) -> float:
        letters, rest = self._problem.letters, self._of_stage(forward)
        seconds = letters[forward].seconds
        started = self._windows.later(forward, rest)
        ended = [seconds, *(started[n] + letters[n].seconds for n in rest)]
        area = min(store.at_start[forward], states[0][0]) * seconds
        for (size, _), begin, end in zip(states, ended, ended[1:], strict=False):
            area += size * (end - begin)
        return area

    def _away(self, store: Store, states: dict[int, list[tuple[float, float]]]) -> float:
        """Seconds without work between each micro-batch's last forward and its first backward.

        In this time a micro-batch frees nothing. If no two fit at once, no other runs its last forward
        meanwhile, so these times do not overlap. What else the worker runs then fits beside the micro-batch:
        backwards of others whose last forward came before, and forwards of others before their last one,
        which free nothing either.
        """
        letters = self._problem.letters
        size = dict.fromkeys((letters[n].pipe for n in self._forwards), 0.0)
        for n in self._forwards:
            size[letters[n].pipe] += states[n][0][0]
        allowed = store.allowed(self.worker)
        if 2 * min(size.values()) <= allowed:
            return 0.0
        idle = 0.0
        for last in self._last_forwards:
            pipe, count, back = letters[last].pipe, letters[last].count, self._of_stage(last)[0]
            room = allowed - size[pipe]
            trip = self._windows.later(last, [back])[back] - self._takes[last]
            # Meanwhile its stages are computed again.
            trip -= math.fsum(self._takes[n] for unit, n in self._recomputations.items() if unit[0] == pipe)
            for k in range(count):
                rests, forwards = [], []
                for n in self._forwards:
                    before = after = letters[n].count
                    if letters[n].pipe == pipe:
                        before, after = k, count - 1 - k
                    rests += [(rest, stays, before) for stays, rest in states[n]]
                    if n not in self._last_forwards:
                        forwards.append((self._takes[n], states[n][0][0], after))
                idle += max(trip - most_within(room, rests) - most_within(room, forwards), 0.0)
        return idle

    def _rest(self) -> float:
        letters = self._problem.letters
        forwards = max(self._takes[n] for n in self._last_forwards)
        return forwards + math.fsum(
            letters[n].count * self._takes[n] for n in self.letters_held if n not in self._forwards
        )


def most_within(most: float, goods: Iterable[tuple[float, float, int]]) -> float:
    """The maximum value of (value, size, count) goods that fits into a limit.

    Parts of goods count; only whole ones if all have the same size.

    >>> most_within(2.5, [(3, 1, 1), (2, 1, 4)]), round(most_within(2.5, [(3, 1, 1), (2, 2, 4)]), 6)
    (5.0, 4.5)
    """
    fitting = [(value, size, count) for value, size, count in goods if count and value > 0]
    sizes = {size for _, size, _ in fitting}
    total, room = 0.0, max(most, 0.0)
    if len(sizes) == 1 and (size := sizes.pop()) > 0:
        room, fitting = float(count_within(room, size)), [(value, 1.0, n) for value, _, n in fitting]
    for value, size, count in sorted(fitting, key=lambda good: -good[0] / good[1] if good[1] else -math.inf):
        amount = min(count, room / size) if size else count
        total += value * amount
        room -= size * amount
    return total


def one_machine(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The minimum makespan of (head, seconds, tail) jobs on one machine that may interrupt them.

    At every moment it runs the job with the longest tail among those whose head has passed (Jackson's rule).

    >>> one_machine([(0, 2, 5), (1, 3, 0), (1, 1, 9)])
    11.0
    """
    waiting: list[tuple[float, float]] = []
    now = most = 0.0
    coming = sorted(jobs)
    place = 0
    while place < len(coming) or waiting:
        if not waiting:
            now = max(now, coming[place][0])
        while place < len(coming) and coming[place][0] <= now:
            _, seconds, tail = coming[place]
            heapq.heappush(waiting, (-tail, seconds))
            place += 1
        tail, seconds = heapq.heappop(waiting)
        until = coming[place][0] if place < len(coming) else math.inf
        if now + seconds > until:
            heapq.heappush(waiting, (tail, now + seconds - until))
            now = until
        else:
            now += seconds
            most = max(most, now - tail)
    return float(most)
