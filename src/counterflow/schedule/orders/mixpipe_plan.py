"""The order of the MixPipe scheme, worker by worker.

*Folding.* Only orders that are symmetric for the two directions are built: what worker ``w`` does with
micro-batch ``m``, worker ``D-1-w`` does with ``m ^ 1``. So one pipe is planned, of ``D`` stages on ``D/2``
workers: worker ``w`` holds its early stage ``w`` and its late stage ``D-1-w``, which stands for the early
stage of the other pipe. Micro-batches ``2j`` and ``2j+1`` are pair ``j`` of this plan.

*List scheduling.* A free worker looks at the next forward and the next backward of each of its two stages,
and starts the one that is due first, or waits for it if its input arrives within ``wait``.

*Memory.* A forward starts only while fewer than K + Γ are stashed on the worker; that is all that Γ does.
Pairs that are between a worker's early and its late stage leave one place free, so the oldest pair can always
continue: no plan can deadlock, whatever the due times. Stage 0 runs exactly K/2 forwards before its worker's
first backward.

*There and back.* The first due times are linear (`_linear`). Played backwards in time, a plan is a plan of
the same kind, with F and B exchanged. So the plan is made again from its end, where the op that ended last
is due first. That determines how late each op may start: the due times of another plan from the beginning.

*Choice.* No due times are best everywhere. Twelve plans, `WAITS` × `STARTS`, go there and back, and the
shortest is kept. ``benchmarks/results/mixpipe_sweep.txt`` shows what each part gains,
``benchmarks/results/mixpipe_optima.txt`` what the best orders are at the same memory: those need no K/2
forwards first, but computing one takes up to a minute instead of milliseconds.

All is in units of a forward: F = 1, B = 2, messages 0. There is no randomness and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

__all__ = ["mixpipe_orders"]

STARTS = (2, 1, 0, -1)
"""Times at which the first backward of the last stage is due, in halves of the depth."""
WAITS = (0, 1, 2)
"""Times that a worker may wait for the op that is due first."""

OPS_BUDGET = 500_000
"""Maximum ops planned in one call: a very large shape tries fewer of the twelve plans, at least one."""

Times = dict[str, list[list[int]]]
"""For each kind of op ("F" or "B"), stage and pair: when it is due or, in a plan, when it ends."""


class Shape(NamedTuple):
    """Constraints of a plan."""

    depth: int
    pairs: int
    room: int  # maximum forwards stashed on a worker
    first: int | None  # forwards of stage 0 before its worker's first backward; None: any number


def mixpipe_orders(
    depth: int, micro_batches: int, injected: int | None, early_forwards: int
) -> list[list[tuple[str, int]]]:
    """One list per worker of ("F"|"B", micro_batch), in execution order.

    Even micro-batches go down (stage s on worker s), odd ones up. ``injected`` is K; None is K=max: room for
    3D/2-1 forwards, as early as that allows. An odd number of micro-batches is planned with one more, which
    is then left out: that adds no memory and delays no op.
    """
    pairs = (micro_batches + 1) // 2
    if injected is None:
        shape = Shape(depth, pairs, max(2, 3 * depth // 2 - 1), None)
        plans = _there_and_back(shape, _linear(shape, pace=2, start=depth), wait=0, known=[])
    else:
        shape = Shape(depth, pairs, injected + early_forwards, min(injected // 2, pairs))
        plans = _tries(shape)
        if depth == 4 and pairs == 2:  # the paper's Figure 3, in which two orders could be one unit shorter
            plans = iter([next(plans)])
    return _unfold(min(plans, key=lambda ends: ends["B"][0][-1]), micro_batches)


def _tries(shape: Shape) -> Iterator[Times]:
    most = max(1, OPS_BUDGET // (3 * 2 * shape.depth * shape.pairs))
    known: list[tuple[int, Times]] = []
    for wait, start in list(product(WAITS, STARTS))[:most]:
        yield from _there_and_back(shape, _linear(shape, pace=4, start=start * shape.depth // 2), wait, known)


def _linear(shape: Shape, pace: int, start: int) -> Times:
    """Forwards go down one stage per unit of time, backwards come up one stage in two, pairs follow at the
    pace.

    A forward of a late stage is as urgent as the one D/2 stages before it.
    """
    stages, pairs, half = range(shape.depth), range(shape.pairs), shape.depth // 2
    return {
        "F": [[stage % half + pace * pair for pair in pairs] for stage in stages],
        "B": [[start + 2 * (shape.depth - 1 - stage) + pace * pair for pair in pairs] for stage in stages],
    }


def _there_and_back(shape: Shape, due: Times, wait: int, known: list[tuple[int, Times]]) -> Iterator[Times]:
    """The plan for these due times, and the one for those found by planning it again from its end.

    If there is little room, other due times make a plan that is ``known``, and so is the plan that follows
    from it.
    """
    there = _plan(shape, due, wait, {"F": 1, "B": 2})
    if (wait, there) in known:
        return
    known.append((wait, there))
    yield there
    back = _plan(shape._replace(first=None), _turned(there), wait, {"F": 2, "B": 1})
    yield _plan(shape, _turned(back), wait, {"F": 1, "B": 2})


def _turned(plan: Times) -> Times:
    """Due times reversed in time: F and B change places, the last pair is the first."""
    return {kind: [[-end for end in ends[::-1]] for ends in plan["FB".replace(kind, "")]] for kind in "FB"}


def _plan(shape: Shape, due: Times, wait: int, takes: dict[str, int]) -> Times:
    """List scheduling: when each op ends. It is one loop without calls, because it takes nearly all the time
    of a build.
    """
    depth, pairs, room, first = shape
    half, last = depth // 2, depth - 1
    ends: Times = {kind: [[] for _ in range(depth)] for kind in "FB"}
    inputs: Times = {"F": [[0] * pairs, *ends["F"][:-1]], "B": [*ends["B"][1:], ends["F"][-1]]}
    # For each worker, the forwards of its early and late stage, and their backwards: when inputs arrive,
    # for those known; when each is due; when each ends, for those started; who needs their outputs.
    lanes = [
        [
            (
                *(inputs[kind][s], due[kind][s], ends[kind][s]),
                *(max(0, min(s + step, last - s - step)), takes[kind]),
            )
            for kind, step in (("F", 1), ("B", -1))
            for s in (worker, last - worker)
        ]
        for worker in range(half)
    ]
    free_at = [0] * half
    agenda = list(range(half))  # times at which to look at a worker, as time · half + worker
    before = -1
    while agenda:
        at = heappop(agenda)
        if at == before:
            continue
        before = at
        now, worker = divmod(at, half)
        if free_at[worker] > now:
            continue
        of_worker = lanes[worker]
        (in0, due0, ends0, _, _), (in1, due1, ends1, _, _), (in2, due2, ends2, _, _), lane3 = of_worker
        early, late, early_back, late_back = len(ends0), len(ends1), len(ends2), len(lane3[2])
        left = room - (early + late - early_back - late_back)
        to_come = None  # for the first forwards, as long as they matter
        if worker == early_back == late_back == 0 and first is not None:
            to_come = first - early
        best, best_due, arrives, until = -1, inf, 0, now + wait
        if left > 0 and early - late < room - 1 and to_come != 0 and early < len(in0) and in0[early] <= until:
            best, best_due, arrives = 0, due0[early], in0[early]
        if left > (to_come or 0) and late < len(in1) and in1[late] <= until and due1[late] < best_due:
            best, best_due, arrives = 1, due1[late], in1[late]
        if not to_come:
            if early_back < len(in2) and in2[early_back] <= until and due2[early_back] < best_due:
                best, best_due, arrives = 2, due2[early_back], in2[early_back]
            in3, due3, _, _, _ = lane3
            if late_back < len(in3) and in3[late_back] <= until and due3[late_back] < best_due:
                best, arrives = 3, in3[late_back]
        if best < 0 or arrives > now:
            continue  # the worker should wait
        _, _, its, next_worker, lasts = of_worker[best]
        free_at[worker] = end = now + lasts
        its.append(end)
        heappush(agenda, end * half + worker)
        if next_worker != worker and free_at[next_worker] <= end:  # otherwise it looks again when it is free
            heappush(agenda, end * half + next_worker)
    return ends


def _unfold(plan: Times, micro_batches: int) -> list[list[tuple[str, int]]]:
    """The workers' orders: those of the plan, then their mirror images."""
    near: list[list[tuple[str, int]]] = []
    for worker in range(len(plan["F"]) // 2):
        ended = [
            (end, kind, 2 * pair + up)
            for kind in "FB"
            for up, stage in enumerate((worker, -1 - worker))
            for pair, end in enumerate(plan[kind][stage])
        ]
        near.append([(kind, micro_batch) for _, kind, micro_batch in sorted(ended)])
    far = [[(kind, micro_batch ^ 1) for kind, micro_batch in order] for order in reversed(near)]
    return [[op for op in order if op[1] < micro_batches] for order in near + far]
