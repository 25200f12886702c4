"""What no order can beat: lower bounds with their reasons.

Each bound holds for every schedule of the problem within its limits, for any placement, number of pipes and
unequal workers. They are proved where they stand:

* *path*: one micro-batch through all stages, and what precedes and follows it on its workers;
* *work*: of one worker, or link, whose ops have heads and tails (Jackson's preemptive one-machine bound);
* *memory*: before its first backward a worker can run only the forwards that its limit holds, while the
  micro-batch makes its round trip through the other workers; likewise after its last forward only the
  backwards of what it held then (Qi et al., arXiv 2401.10241, appendix B, is the first half of it);
* *room*: each micro-batch holds memory for a least time, and only so many fit beside each other.

Invariant: sums of floats round, so a bound may exceed the truth by 1e-9 of it, and by no more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from counterflow.schedule.ir import OpKind

from .problem import Problem, Store
from .windows import CLOSE, Windows, count_within, is_steady, windows_of


@dataclass(frozen=True, slots=True)
class Bound:
    """What is not beaten, and why.

    Attributes:
        seconds: of the objective.
        reason: why it holds, in a sentence.
    """

    seconds: float
    reason: str


def lower_bound(problem: Problem) -> Bound:
    """The best bound of all; of equal ones the first, which is the simplest.

    >>> from counterflow.schedule.placement import linear
    >>> from counterflow.schedule.workload import plain
    >>> from counterflow.synthesize.problem import problem_of
    >>> print(lower_bound(problem_of(plain(linear(4), 8))))
    Bound(seconds=33.0, reason='worker 3 has 24 to do, with 9 before or after it that it cannot use')
    """
    best = Bound(0.0, "time does not run backwards")
    for bound in bounds(problem):
        if bound.seconds > best.seconds * (1 + 1e-12):
            best = bound
    return best


def bounds(problem: Problem) -> Iterator[Bound]:
    """All bounds of a problem, simple ones first."""
    windows = windows_of(problem)
    if is_steady(problem):
        yield from _steady(windows)
    else:
        yield from _makespan(windows)


# The makespan


def _makespan(windows: Windows) -> Iterator[Bound]:
    problem, heads, tails = windows.problem, windows.heads, windows.tails
    letters = problem.letters
    path, at = max(
        (heads[n][k] + x.seconds + tails[n][k], n) for n, x in enumerate(letters) for k in range(x.count)
    )
    yield Bound(
        path, f"a micro-batch needs so long on its way by {letters[at]} of worker {letters[at].worker}"
    )
    for worker in range(problem.workers):
        side = _Side(windows, worker)
        if not side.own:
            continue
        jobs = [
            (heads[n][k], letters[n].seconds + windows.busy[n], tails[n][k] - windows.busy[n])
            for n in side.own
            for k in range(letters[n].count)
        ]
        most = one_machine(jobs)
        lost = most - side.work
        yield Bound(
            most,
            f"worker {worker} has {side.work:,.6g} to do, with {lost:,.6g} before or after it that it cannot "
            "use",
        )
        first = min(heads[n][0] for n in side.own)
        last = min(tails[n][-1] - windows.busy[n] for n in side.own)
        before = max(min(heads[b][0] for b in side.first_backwards) - side.forwards_within, first)
        after = min(letters[f].seconds + tails[f][-1] for f in side.last_forwards) - side.after_last_forward
        after = max(after, last)
        yield _memory(side, before, after, first, last)
        for area, store in side.areas:
            yield Bound(
                first + area + last,
                f"worker {worker} holds {store.name} of each micro-batch too long for its limit, "
                f"{store.most[worker]:,.10g}",
            )
    yield from _links(windows)
    for worker in range(problem.workers):
        summing = [
            (max(heads[n][-1] + letters[n].seconds for n in one.letters), one.seconds, problem.tail)
            for one in problem.sums
            if worker in one.workers
        ]
        if summing:
            yield Bound(one_machine(summing), f"the gradient syncs of worker {worker} go one after another")


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
            made = letters[need.letter].seconds
            jobs.setdefault(need.link, []).extend(
                (heads[need.letter][k] + made, need.seconds, x.seconds + tails[n][k]) for k in range(x.count)
            )
    for link, own in jobs.items():
        sender, receiver = ends[link]
        work = sum(p for _, p, _ in own)
        seconds = work if is_steady(problem) else one_machine(own)
        yield Bound(seconds, f"the messages from worker {sender} to {receiver} take {work:,.6g}")


def _memory(side: _Side, before: float, after: float, first: float, last: float) -> Bound:
    """A worker's work, and what it idles before its first backward and after its last forward.

    Where its forwards do not all fit into its memory, the last one starts after a backward, so it idles for
    both reasons; else one of them and what it idles before its first op or after its last.
    """
    name = f"worker {side.worker} has {side.work:,.6g} to do"
    if side.full:
        return Bound(
            before + side.work + after,
            f"{name}, idles {before:,.6g} until its first backward can start and {after:,.6g} after its last "
            f"forward: its limit holds so few",
        )
    if before + last >= first + after:
        return Bound(
            before + side.work + last,
            f"{name}, idles {before:,.6g} until its first backward can start and {last:,.6g} at the end",
        )
    return Bound(
        first + side.work + after,
        f"{name}, idles {first:,.6g} at the start and {after:,.6g} after its last forward",
    )


# The steady step


def _steady(windows: Windows) -> Iterator[Bound]:
    """What a step takes of a worker is its span, from its first start until it has its gradients.

    In the steady state the mean span of a worker is no more than the step time, and each step alone keeps all
    rules.
    """
    problem, letters = windows.problem, windows.problem.letters
    for worker in range(problem.workers):
        side = _Side(windows, worker)
        if not side.own:
            continue
        makers = [n for n in side.own if letters[n].kind.makes_weight_gradients]
        last = max(min(windows.summed[n] - windows.busy[n] for n in makers), 0.0)
        yield Bound(
            side.work + last,
            f"worker {worker} has {side.work:,.6g} to do in a step"
            + (f" and sums gradients for {last:,.6g} after it" if last else ""),
        )
        before = min(side.round_trips) - side.forwards_within
        after = min(side.drains) - side.after_last_forward
        yield _memory(side, max(before, 0.0), max(after, last), 0.0, last)
        for area, store in side.areas:
            yield Bound(
                area,
                f"worker {worker} holds {store.name} of each micro-batch too long for its limit, "
                f"{store.most[worker]:,.10g}",
            )
        summing = sum(one.seconds for one in problem.sums if worker in one.workers)
        yield Bound(summing, f"the gradient syncs of worker {worker} go one after another")
    yield from _links(windows)


# One worker


class _Side:
    """What limits one worker.

    Attributes:
        worker: its number.
        own: its letters.
        work: seconds of compute, with messages where it is busy with them.
        first_backwards: the letters one of which is its first backward. Those of the highest stage of each
            pipe, since the others need them.
        last_forwards: likewise one of these is its last forward.
        round_trips: for each pipe, the least from its first forward's start to its first backward's.
        drains: for each pipe, the least from its last forward's start to the end of that micro-batch.
        forwards_within: seconds of compute that it can do at most before its first backward.
        after_last_forward: seconds of compute that it can do at most from the start of its last forward on.
        full: whether its forwards do not all fit into its memory.
        areas: how long it takes to hold all that micro-batches hold, by store.
    """

    def __init__(self, windows: Windows, worker: int) -> None:
        problem = windows.problem
        self._problem, self._windows = problem, windows
        self.worker = worker
        self.own = problem.of_worker(worker)
        letters = problem.letters
        self._takes = [x.seconds + busy for x, busy in zip(letters, windows.busy, strict=True)]
        self.work = math.fsum(letters[n].count * self._takes[n] for n in self.own)
        of_pipe: dict[int, list[int]] = {}
        for n in self.own:
            of_pipe.setdefault(letters[n].pipe, []).append(n)
        self._forwards = [n for n in self.own if letters[n].kind is OpKind.FORWARD]
        self.first_backwards, self.last_forwards = [], []
        self.round_trips, self.drains = [], []
        for own in of_pipe.values():
            lowest = min(own, key=lambda n: (letters[n].kind is not OpKind.FORWARD, letters[n].stage))
            highest = max(letters[n].stage for n in own)
            last = next(n for n in own if letters[n].stage == highest and n in self._forwards)
            backward = next(
                n for n in own if letters[n].stage == highest and letters[n].kind.makes_input_gradient
            )
            self.last_forwards.append(last)
            self.first_backwards.append(backward)
            self.round_trips.append(windows.later(lowest)[backward])
            follow = windows.later(last)
            self.drains.append(
                max(
                    follow[n] + max(self._takes[n], letters[n].seconds + windows.summed[n])
                    for n in own
                    if n in follow
                )
            )
        self.forwards_within = math.fsum(letters[n].count * self._takes[n] for n in self._forwards)
        self.after_last_forward = self._rest()
        self.full = False
        self.areas: list[tuple[float, Store]] = []
        for store in problem.stores:
            if math.isinf(store.most[worker]) or not all(self._states(store, n) for n in self._forwards):
                continue
            self._limit(store)

    def _of_stage(self, forward: int) -> list[int]:
        """The backwards of a forward's stage, in their order."""
        letters = self._problem.letters
        x = letters[forward]
        own = [n for n in self.own if (letters[n].pipe, letters[n].stage) == (x.pipe, x.stage)]
        return sorted(
            (n for n in own if n != forward), key=lambda n: letters[n].kind is OpKind.WEIGHT_GRADIENTS
        )

    def _states(self, store: Store, forward: int) -> list[tuple[float, float]]:
        """What a micro-batch holds after its forward and after its input gradient; what is then still to do.

        Empty where it holds less than nothing at some time, which no bound here covers.
        """
        held = store.at_start[forward] + store.at_end[forward]
        rest = self._of_stage(forward)
        found = []
        for place, n in enumerate(rest):
            if held < 0 or held + store.at_start[n] < 0:
                return []
            found.append((held, math.fsum(self._takes[m] for m in rest[place:])))
            held += store.at_start[n] + store.at_end[n]
        return found if store.at_start[forward] >= 0 else []

    def _limit(self, store: Store) -> None:
        letters, most = self._problem.letters, store.most[self.worker]
        held = {n: self._states(store, n) for n in self._forwards}
        # Before the first backward nothing is freed.
        goods = [(self._takes[n], held[n][0][0], letters[n].count) for n in self._forwards]
        self.forwards_within = min(self.forwards_within, most_within(most, goods))
        if math.fsum(letters[n].count * held[n][0][0] for n in self._forwards) > most * (1 + CLOSE):
            self.full = True
        # When the last forward starts, what is still to do is held, and room is left for that forward.
        goods = [(rest, size, letters[n].count) for n in self._forwards for size, rest in held[n]]
        rests = []
        for last in self.last_forwards:
            itself = self._takes[last] + held[last][0][1]
            rests.append(itself + most_within(most - store.at_start[last], goods))
        self.after_last_forward = min(self.after_last_forward, max(rests))
        area = math.fsum(letters[n].count * self._area(store, n, held[n]) for n in self._forwards)
        sizes = {size for n in self._forwards for size, _ in held[n]}
        if len(sizes) == 1 and (size := sizes.pop()) > 0:
            most = min(most, size * count_within(most, size))
        self.areas.append((area / most, store))

    def _area(self, store: Store, forward: int, held: list[tuple[float, float]]) -> float:
        """What one micro-batch holds of a store, times how long, at least."""
        letters, rest = self._problem.letters, self._of_stage(forward)
        own = letters[forward].seconds
        started = self._windows.later(forward)
        ended = [own, *(started[n] + letters[n].seconds for n in rest)]
        area = min(store.at_start[forward], held[0][0]) * own
        for (size, _), begin, end in zip(held, ended, ended[1:], strict=False):
            area += size * (end - begin)
        return area

    def _rest(self) -> float:
        letters = self._problem.letters
        forwards = max(self._takes[n] for n in self.last_forwards)
        return forwards + math.fsum(
            letters[n].count * self._takes[n] for n in self.own if n not in self._forwards
        )


def most_within(most: float, goods: Iterable[tuple[float, float, int]]) -> float:
    """At most so much value of (value, size, count) goods fits into a limit; parts of goods count.

    Whole ones where all have one size.

    >>> most_within(2.5, [(3, 1, 1), (2, 1, 4)]), round(most_within(2.5, [(3, 1, 1), (2, 2, 4)]), 6)
    (5.0, 4.5)
    """
    found = [(value, size, count) for value, size, count in goods if count and value > 0]
    sizes = {size for _, size, _ in found}
    total, left = 0.0, max(most, 0.0) * (1 + CLOSE)
    if len(sizes) == 1 and (size := sizes.pop()) > 0:
        left, found = float(count_within(max(most, 0.0), size)), [(value, 1.0, n) for value, _, n in found]
    for value, size, count in sorted(found, key=lambda good: -good[0] / good[1] if good[1] else -math.inf):
        taken = min(count, left / size) if size else count
        total += value * taken
        left -= size * taken
    return total


def one_machine(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The least makespan of (head, seconds, tail) jobs on one machine that may interrupt them.

    At every moment it runs, of the jobs whose head has passed, that with the longest tail (Jackson's rule).

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
