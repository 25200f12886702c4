"""The order of the MixPipe scheme, worker by worker.

How the order is made
---------------------
*Folding.* Only orders that are symmetric for the two directions are built: what worker ``w`` does
with micro-batch ``m``, worker ``D-1-w`` does with ``m ^ 1``. So it is enough to plan one pipe, of
``D`` stages, on ``D/2`` workers, where worker ``w`` holds stages ``w`` and ``D-1-w`` (a V): its late
stage stands for the early stage that its mirror image runs for the other pipe. A pair of
micro-batches (``2j`` down, ``2j+1`` up) is one job of the folded plan.

*List scheduling.* Whenever a worker is free it starts, of the at most four ops that it could run
(the next forward and the next backward of each of its two stages, always in the order of the pairs),
the one with the earliest due time. Due times are linear, see `Rule`: pair ``j``'s forward goes down
the pipe one stage a unit of time, its backward comes up one stage every two, and each pair follows
the one before it at a fixed pace. A rule with ``lookahead`` also counts ops whose input is about to
arrive, and keeps the worker waiting when such an op is due first.

*Memory.* A forward starts only while fewer than K + Γ (`early_forwards`) are stashed on the worker;
that is all that Γ does: what fits is advanced. The first stage of a pipe runs exactly K/2 forwards before
its worker's first backward. One place is kept for a late stage: pairs that have done a worker's early
stage and not its late one never fill the worker. So the oldest unfinished pair can always go on, and
there is no deadlock, whatever the due times.

*Choice.* No single rule is best for every depth, K and Γ. `RULES` holds some thirty, found by
``benchmarks/mixpipe_search.py``; each is simulated, and the first with the smallest makespan is kept.
`NUDGES` lists the shapes for which the same search found something shorter by moving the due times of a few
single ops. At
depth 4 and N = 4, `PAPER_RULE` alone is used: it gives the three orders of the paper's Figure 3 (two of
which are one unit longer than they need be).

*K=max* is the same list with room for 3D/2 - 1, no count of first forwards, and `MAXIMAL_RULE`: forwards
run ahead as far as the room allows, and backwards go before forwards that are due later.

*Any N.* The list is made over all N micro-batches at once, with no units to be joined. An odd N is
planned with one micro-batch more, which is then left out: that cannot add memory or delay an op.

All is in units of a forward: F = 1, B = 2, messages 0. There is no randomness and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple, Self

__all__ = ["mixpipe_orders"]

Op = tuple[str, int]


class Rule(NamedTuple):
    """Due times of the folded plan, as `due_times` reads them."""

    forward_pace: int  # time from one pair's forwards to the next pair's
    backward_pace: int  # the same for backwards
    backward_start: int  # in eighths of the depth: backwards later (> 0) or more urgent (< 0)
    late_start: int  # in sixteenths of the depth: the same for forwards of the late stages
    lookahead: int  # how long a worker may wait for an op that is due before what it could start


class Nudge(NamedTuple):
    """Move the due time of one op."""

    kind: str
    pair: int
    stage: int
    by: int


PAPER_RULE = Rule(7, 7, 24, 8, 0)

MAXIMAL_RULE = Rule(2, 2, -2, -2, 0)  # for K=max

RULES: tuple[Rule, ...] = (
    Rule(4, 4, -1, -4, 2),
    Rule(2, 2, -3, -4, 0),
    Rule(7, 6, 0, -5, 1),
    Rule(2, 2, -12, -6, 0),
    Rule(2, 3, -6, -5, 1),
    Rule(3, 4, -11, -6, 0),
    Rule(7, 2, 6, -6, 0),
    Rule(3, 4, -6, -5, 1),
    Rule(6, 5, -6, -6, 1),
    Rule(3, 0, 1, 0, 0),
    Rule(7, 6, 1, -3, 0),
    Rule(4, 4, -3, -4, 1),
    Rule(4, 4, -4, -5, 0),
    Rule(3, 3, -4, -3, 0),
    Rule(4, 7, -16, -5, 1),
    Rule(7, 7, 0, -6, 2),
    Rule(3, 4, -3, -2, 2),
    Rule(6, 7, -16, 5, 1),
    Rule(4, 6, -5, -6, 0),
    Rule(3, 0, 0, -3, 0),
    Rule(5, 1, 5, -2, 0),
    Rule(4, 4, -3, -5, 2),
    Rule(3, 4, -8, -6, 0),
    Rule(6, 5, -5, -6, 1),
    Rule(1, 0, -5, -4, 0),
    Rule(7, 6, 2, -6, 1),
    Rule(7, 6, 0, 5, 2),
    Rule(6, 4, 1, -5, 0),
    Rule(7, 7, -3, -2, 0),
    Rule(7, 7, -6, -6, 1),
    Rule(6, 4, 4, -6, 2),
    Rule(1, 0, -4, -4, 0),
)

# By depth, K and early forwards, for N = depth.
NUDGES: dict[tuple[int, int, int], tuple[Rule, tuple[Nudge, ...]]] = {
    (10, 6, 0): (Rule(4, 4, -3, -4, 1), (Nudge("F", 2, 4, -12),)),
    (10, 6, 2): (Rule(2, 3, -6, -5, 1), (Nudge("B", 0, 4, -3),)),
    (10, 8, 0): (
        Rule(2, 3, -6, -5, 1),
        (
            Nudge("F", 1, 5, 13),
            Nudge("B", 0, 2, 10),
            Nudge("B", 0, 3, 7),
            Nudge("B", 4, 6, -6),
        ),
    ),
    (12, 6, 1): (
        Rule(4, 4, -3, -4, 1),
        (
            Nudge("F", 4, 0, 16),
            Nudge("F", 5, 3, 6),
            Nudge("F", 3, 4, 6),
            Nudge("F", 3, 5, 4),
            Nudge("B", 0, 5, 1),
            Nudge("B", 1, 10, 1),
            Nudge("B", 2, 10, -3),
        ),
    ),
    (12, 8, 0): (Rule(4, 4, -3, -4, 1), (Nudge("F", 2, 5, -42),)),
    (12, 8, 1): (
        Rule(2, 3, -6, -5, 1),
        (
            Nudge("F", 5, 0, 5),
            Nudge("F", 4, 1, -8),
            Nudge("F", 5, 1, 26),
            Nudge("F", 2, 10, -9),
            Nudge("B", 0, 6, -4),
            Nudge("B", 0, 10, -5),
        ),
    ),
    (14, 8, 0): (
        Rule(4, 4, -1, -4, 2),
        (
            Nudge("F", 6, 4, 6),
            Nudge("F", 3, 12, -18),
            Nudge("B", 0, 11, 6),
            Nudge("B", 0, 12, -11),
        ),
    ),
    (14, 8, 1): (Rule(3, 4, -6, -5, 1), (Nudge("B", 4, 12, 6),)),
    (14, 8, 2): (Rule(2, 3, -6, -5, 1), (Nudge("F", 5, 2, 8),)),
    (14, 10, 0): (Rule(2, 2, -3, -4, 0), (Nudge("F", 3, 12, -2),)),
    (14, 10, 1): (
        Rule(2, 3, -6, -5, 1),
        (
            Nudge("F", 6, 0, 20),
            Nudge("F", 6, 1, 8),
            Nudge("B", 0, 7, -3),
            Nudge("B", 1, 12, 8),
        ),
    ),
    (16, 8, 0): (
        Rule(7, 6, 1, -3, 0),
        (
            Nudge("F", 7, 13, -3),
            Nudge("B", 1, 14, 18),
            Nudge("B", 3, 15, -2),
        ),
    ),
    (16, 8, 2): (
        Rule(4, 4, -3, -5, 2),
        (
            Nudge("F", 5, 4, -11),
            Nudge("F", 3, 13, -16),
            Nudge("B", 1, 12, 3),
            Nudge("B", 0, 14, 2),
        ),
    ),
    (16, 8, 3): (
        Rule(3, 0, 0, -3, 0),
        (
            Nudge("F", 7, 6, 8),
            Nudge("F", 2, 15, -6),
            Nudge("F", 3, 15, -1),
            Nudge("B", 1, 11, -8),
            Nudge("B", 1, 15, -11),
        ),
    ),
    (16, 8, 4): (
        Rule(3, 0, 0, -3, 0),
        (
            Nudge("F", 7, 1, 4),
            Nudge("F", 5, 12, -2),
            Nudge("F", 3, 15, -2),
            Nudge("B", 2, 11, -4),
        ),
    ),
    (16, 10, 0): (
        Rule(4, 4, -3, -4, 1),
        (
            Nudge("F", 5, 6, 2),
            Nudge("F", 3, 13, 27),
            Nudge("F", 6, 14, -3),
        ),
    ),
    (16, 10, 1): (
        Rule(5, 1, 5, -2, 0),
        (
            Nudge("F", 3, 14, 6),
            Nudge("F", 3, 15, 10),
            Nudge("B", 0, 14, -7),
            Nudge("B", 2, 14, 3),
        ),
    ),
    (16, 10, 2): (
        Rule(2, 3, -6, -5, 1),
        (
            Nudge("F", 6, 2, 3),
            Nudge("F", 6, 5, 2),
            Nudge("F", 6, 6, -7),
            Nudge("B", 0, 6, -7),
            Nudge("B", 3, 9, -2),
        ),
    ),
    (16, 12, 0): (
        Rule(1, 0, -5, -4, 0),
        (
            Nudge("F", 3, 14, -5),
            Nudge("B", 5, 13, 7),
        ),
    ),
}

# At most this many ops are planned in one call, so that a very large shape tries fewer rules.
OPS_BUDGET = 500_000


def mixpipe_orders(
    depth: int,
    micro_batches: int,
    injected: int | None,
    early_forwards: int,
    *,
    exact_injection: bool = True,
) -> list[list[Op]]:
    """One list a worker of ("F"|"B", micro_batch), in execution order.

    Micro-batch m is on pipe m % 2: even ones go down (stage s on worker s), odd ones up (stage s on
    worker depth-1-s). `injected` is K, even, 2..depth; None means K=max: the memory of 3*depth/2-1
    micro-batches, forwards as early as that allows, backwards first otherwise (`early_forwards`
    must then be 0). `early_forwards` is the paper's capital gamma, 0..(depth-K)/2.

    With `exact_injection` false, the first stage of a pipe may run up to `early_forwards` more than K/2
    forwards before its worker's first backward, in the same memory, and depth 4 is not held to the
    paper's orders. Some shapes get a shorter order that way, never a longer one at N = depth > 4.
    """
    _check(depth, micro_batches, injected, early_forwards)
    pairs = (micro_batches + 1) // 2
    if injected is None:
        plan = Plan(depth, pairs, None, 3 * depth // 2 - 1).run(MAXIMAL_RULE)
    else:
        plan = _best_plan(depth, pairs, injected, early_forwards, exact_injection)
    return _unfold(plan.done, micro_batches)


def _check(depth: int, micro_batches: int, injected: int | None, early_forwards: int) -> None:
    if depth < 2 or depth % 2:
        raise ValueError(f"mixpipe needs an even depth, got {depth}")
    if micro_batches < 1:
        raise ValueError(f"mixpipe needs at least one micro-batch, got {micro_batches}")
    if injected is None:
        if early_forwards:
            raise ValueError("mixpipe with K=max takes no early forwards")
        return
    if injected % 2 or not 2 <= injected <= depth:
        raise ValueError(f"mixpipe needs an even K in 2..{depth}, got {injected}")
    if not 0 <= early_forwards <= (depth - injected) // 2:
        raise ValueError(f"mixpipe needs 0..{(depth - injected) // 2} early forwards, got {early_forwards}")


def _best_plan(depth: int, pairs: int, injected: int, early_forwards: int, exact_injection: bool) -> Plan:
    """Simulate the choices for this shape and keep the first shortest plan."""
    choices = _choices(depth, pairs, injected, early_forwards, exact_injection)
    room = injected + early_forwards
    plans = (Plan(depth, pairs, warm_up, room).run(rule, nudges) for warm_up, rule, nudges in choices)
    return min(plans, key=attrgetter("makespan"))


def _choices(
    depth: int, pairs: int, injected: int, early_forwards: int, exact_injection: bool
) -> Iterator[tuple[int, Rule, tuple[Nudge, ...]]]:
    """What to simulate: forwards of the first stage before its worker's first backward, and due times."""
    first = injected // 2
    if depth == 4 and pairs == 2 and exact_injection:
        yield first, PAPER_RULE, ()
        return
    nudged = NUDGES.get((depth, injected, early_forwards))
    if nudged is not None and 2 * pairs == depth:
        yield first, *nudged
    warm_ups = range(first, first + 1 + (0 if exact_injection else early_forwards))
    for warm_up in warm_ups:
        shares = 1 if warm_up == first else len(warm_ups)
        tries = max(2, OPS_BUDGET // (2 * depth * pairs * shares))
        for rule in RULES[:tries]:
            yield warm_up, rule, ()


def due_times(
    depth: int, pairs: int, rule: Rule, nudges: tuple[Nudge, ...]
) -> tuple[list[list[int]], list[list[int]]]:
    """When each op is due: forwards and backwards, each by stage, then by pair."""
    half = depth // 2
    late = int(rule.late_start * depth / 16)
    back = depth + int(rule.backward_start * depth / 8)
    forwards = [
        [s + (late if s >= half else 0) + rule.forward_pace * j for j in range(pairs)] for s in range(depth)
    ]
    backwards = [
        [back + 2 * (depth - 1 - s) + rule.backward_pace * j for j in range(pairs)] for s in range(depth)
    ]
    for kind, pair, stage, by in nudges:
        (forwards if kind == "F" else backwards)[stage][pair] += by
    return forwards, backwards


class Plan:
    """A list schedule of one pipe folded onto depth/2 workers."""

    def __init__(self, depth: int, pairs: int, warm_up: int | None, room: int) -> None:
        self.depth = depth
        self.half = depth // 2
        self.pairs = pairs
        # Forwards of stage 0 before worker 0's first backward; None for no rule.
        self.warm_up = None if warm_up is None else min(warm_up, pairs)
        self.room = room  # most forwards stashed on a worker
        self.makespan = 0
        # By stage: when the forward and the backward of each pair end, for the pairs started so far.
        self.forward_ends: list[list[int]] = [[] for _ in range(depth)]
        self.backward_ends: list[list[int]] = [[] for _ in range(depth)]
        self.free_at = [0] * self.half
        # By worker: (kind, stage, pair) in the order of execution.
        self.done: list[list[tuple[str, int, int]]] = [[] for _ in range(self.half)]

    def run(self, rule: Rule, nudges: tuple[Nudge, ...] = ()) -> Self:
        """Make the plan, and return it."""
        due = due_times(self.depth, self.pairs, rule, nudges)
        now = 0
        # Workers to look at now, one and two units from now: no op takes longer.
        wake: list[set[int]] = [set(range(self.half)), set(), set()]
        while wake[0] or wake[1] or wake[2]:
            for worker in sorted(wake[0]):
                if self.free_at[worker] > now:
                    continue
                started = self._choose(worker, now, due, rule.lookahead)
                if started is not None:
                    kind, stage = started
                    took = self._start(kind, stage, worker, now)
                    wake[took].add(worker)
                    neighbour = stage + 1 if kind == "F" else stage - 1
                    if 0 <= neighbour < self.depth:
                        wake[took].add(min(neighbour, self.depth - 1 - neighbour))
            wake = [wake[1], wake[2], set()]
            now += 1
        self.makespan = max(self.free_at)
        return self

    def _start(self, kind: str, stage: int, worker: int, now: int) -> int:
        """Run one op, and say how long it takes."""
        took = 1 if kind == "F" else 2
        ends = (self.forward_ends if kind == "F" else self.backward_ends)[stage]
        self.done[worker].append((kind, stage, len(ends)))
        ends.append(now + took)
        self.free_at[worker] = now + took
        return took

    def _choose(
        self,
        worker: int,
        now: int,
        due: tuple[list[list[int]], list[list[int]]],
        lookahead: int,
    ) -> tuple[str, int] | None:
        """The op that this worker, free now, starts; None if it had better wait."""
        horizon = now + lookahead
        best: tuple[str, int] | None = None
        best_due = best_input = 0
        stages = (worker, self.depth - 1 - worker)
        for stage in stages:
            arrives = self._forward_input(stage)
            if arrives is None or arrives > horizon or not self._may_forward(stage, stages):
                continue
            when = due[0][stage][len(self.forward_ends[stage])]
            if best is None or when < best_due:
                best, best_due, best_input = ("F", stage), when, arrives
        for stage in stages:
            arrives = self._backward_input(stage, now)
            if arrives is None or arrives > horizon:
                continue
            if worker == 0 and len(self.forward_ends[0]) < (self.warm_up or 0):
                continue
            when = due[1][stage][len(self.backward_ends[stage])]
            if best is None or when < best_due:
                best, best_due, best_input = ("B", stage), when, arrives
        return best if best_input <= now else None

    def _forward_input(self, stage: int) -> int | None:
        """When the input of this stage's next forward arrives; None if not known, or none is left."""
        pair = len(self.forward_ends[stage])
        if pair == self.pairs:
            return None
        if stage == 0:
            return 0
        before = self.forward_ends[stage - 1]
        return before[pair] if pair < len(before) else None

    def _backward_input(self, stage: int, now: int) -> int | None:
        """The same for its next backward. The worker is free now, so its own forwards are over."""
        pair = len(self.backward_ends[stage])
        if pair >= len(self.forward_ends[stage]):
            return None
        if stage == self.depth - 1:
            return now
        after = self.backward_ends[stage + 1]
        return after[pair] if pair < len(after) else None

    def _may_forward(self, stage: int, stages: tuple[int, int]) -> bool:
        """Whether memory, and the warm-up of the first stage, let the next forward start."""
        early, late = stages
        early_forwards, late_forwards = len(self.forward_ends[early]), len(self.forward_ends[late])
        backwards = len(self.backward_ends[early]) + len(self.backward_ends[late])
        left = self.room - (early_forwards + late_forwards - backwards)
        if early == 0 and backwards == 0 and self.warm_up is not None:
            if stage == early and early_forwards == self.warm_up:
                return False
            if stage == late:
                left -= self.warm_up - early_forwards  # keep room for the rest of the warm-up
        if stage == early and early_forwards - late_forwards == self.room - 1:
            return False
        return left > 0


def _unfold(done: list[list[tuple[str, int, int]]], micro_batches: int) -> list[list[Op]]:
    """The workers' orders: the folded plan's workers, then their mirror images."""
    near = [
        [(kind, 2 * pair + (0 if stage == worker else 1)) for kind, stage, pair in ops]
        for worker, ops in enumerate(done)
    ]
    far = [[(kind, micro_batch ^ 1) for kind, micro_batch in ops] for ops in reversed(near)]
    return [[op for op in ops if op[1] < micro_batches] for ops in near + far]
