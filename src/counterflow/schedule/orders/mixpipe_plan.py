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
shortest is kept. For N = D up to 12 the shortest symmetric orders are known (``mixpipe_optima.py``). They are
taken if all plans are longer. For N > D the order of N = D is concatenated, and taken if that is shorter.
``benchmarks/results/mixpipe_sweep.txt`` shows what each part gains,
``benchmarks/results/mixpipe_optima.txt`` what the best orders are at the same memory: those need no K/2
forwards first, but computing one takes up to a minute instead of milliseconds.

All is in units of a forward: F = 1, B = 2, messages 0. There is no randomness and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from ..scheme import NumberLoop
from .mixpipe_asymmetric import ASYMMETRIC
from .mixpipe_optima import OPTIMA

__all__ = ["asymmetric_orders", "mixpipe_orders", "played"]

STARTS = (2, 1, 0, -1)
"""Times at which the first backward of the last stage is due, in halves of the depth."""
WAITS = (0, 1, 2)
"""Times that a worker may wait for the op that is due first."""

OPS_BUDGET = 500_000
"""Maximum ops planned in one call: a very large shape tries fewer of the twelve plans, at least one."""

Times = list[int]
"""When each op is due or, in a plan, when it ends: forwards, then backwards, by stage and pair."""


ANY = -1
"""In place of a number of forwards: any."""


class PlanConstraints(NamedTuple):
    """Constraints of a plan."""

    depth: int
    pairs: int
    room: int  # maximum forwards stashed on a worker
    first: int  # forwards of stage 0 before its worker's first backward, or ANY


def played(  # noqa: C901, PLR0912, PLR0915, PLR0917 - one loop without calls
    depth: int, pairs: int, room: int, first: int, due: Sequence[int], wait: int, forward: int, backward: int
) -> list[int]:
    """End of each op, by list scheduling.

    It is one loop without calls on numbers alone, because it takes nearly all the time of a build; numba
    compiles it as it is.

    Args:
        depth: as of ``PlanConstraints``, like the three that follow.
        pairs: see above.
        room: see above.
        first: see above.
        due: time at which each op is due, as ``Times``.
        wait: time that a worker may wait for the op that is due first.
        forward: time that a forward takes.
        backward: time that a backward takes.
    """
    half, last, size = depth // 2, depth - 1, depth * pairs
    ends = [0] * (2 * size)
    done = [0] * (2 * depth)  # ops started, by kind and stage
    free_at = [0] * half
    agenda = list(range(half))  # times at which to look at a worker, as time · half + worker
    before = -1
    while len(agenda) > 0:
        at = heappop(agenda)
        if at == before:
            continue
        before = at
        now, worker = at // half, at % half
        if free_at[worker] > now:
            continue
        far = last - worker
        early, late, early_back, late_back = done[worker], done[far], done[depth + worker], done[depth + far]
        places = room - (early + late - early_back - late_back)
        # Of the first forwards, how many are to come; they matter until the worker's first backward.
        counts = worker == 0 and early_back == 0 and late_back == 0 and first >= 0
        to_come = first - early if counts else 0
        best, best_due, arrives, until = -1, 1 << 60, 0, now + wait
        if places > 0 and early - late < room - 1 and not (counts and to_come == 0) and early < pairs:
            sent = worker == 0 or done[worker - 1] > early
            arrival = ends[(worker - 1) * pairs + early] if worker > 0 and sent else 0
            if sent and arrival <= until:
                best, best_due, arrives = 0, due[worker * pairs + early], arrival
        if places > to_come and late < done[far - 1]:
            arrival, due_at = ends[(far - 1) * pairs + late], due[far * pairs + late]
            if arrival <= until and due_at < best_due:
                best, best_due, arrives = 1, due_at, arrival
        if to_come == 0:
            if early_back < done[depth + worker + 1]:
                arrival, due_at = (
                    ends[size + (worker + 1) * pairs + early_back],
                    due[size + worker * pairs + early_back],
                )
                if arrival <= until and due_at < best_due:
                    best, best_due, arrives = 2, due_at, arrival
            # The last stage's backward needs its own forward.
            source = last if far == last else depth + far + 1
            if late_back < done[source]:
                arrival, due_at = ends[source * pairs + late_back], due[size + far * pairs + late_back]
                if arrival <= until and due_at < best_due:
                    best, best_due, arrives = 3, due_at, arrival
        if best < 0 or arrives > now:
            continue  # the worker should wait
        stage = worker if best % 2 == 0 else far
        lane = stage if best < 2 else depth + stage
        end = now + (forward if best < 2 else backward)
        free_at[worker] = end
        ends[lane * pairs + done[lane]] = end
        done[lane] += 1
        heappush(agenda, end * half + worker)
        step = 1 if best < 2 else -1
        needs = max(0, min(stage + step, last - stage - step))  # the worker that needs its output
        if needs != worker and free_at[needs] <= end:  # otherwise it looks again when it is free
            heappush(agenda, end * half + needs)
    return ends


def mixpipe_orders(
    depth: int, micro_batches: int, injected: int | None, early_forwards: int, play: NumberLoop = played
) -> list[list[tuple[str, int]]]:
    """One list per worker of ("F"|"B", micro_batch), in execution order.

    Even micro-batches go down (stage s on worker s), odd ones up. ``injected`` is K; None is K=max: room for
    3D/2-1 forwards, as early as that allows. An odd number of micro-batches is planned with one more, which
    is then left out: that adds no memory and delays no op. ``play`` is ``played``, or the same compiled.
    """
    pairs = (micro_batches + 1) // 2
    if injected is None:
        shape = PlanConstraints(depth, pairs, max(2, 3 * depth // 2 - 1), ANY)
        plans = _there_and_back(shape, _linear(shape, pace=2, start=depth), wait=0, known=[], play=play)
        return _mirrored(_shortest(plans, shape), micro_batches)
    words = OPTIMA.get((depth, injected, early_forwards))
    near = [_order(word) for word in words or ()]
    if not near or 2 * pairs != depth:
        near = _listed(
            PlanConstraints(depth, pairs, injected + early_forwards, min(injected // 2, pairs)), play
        )
    if 2 * pairs > depth:
        unit = mixpipe_orders(depth, depth, injected, early_forwards, play)[: depth // 2]
        units = [_repeated(order, depth, 2 * pairs) for order in unit]
        near = min(near, units, key=lambda orders: _makespan(orders, depth))
    return _mirrored(near, micro_batches)


def _listed(shape: PlanConstraints, play: NumberLoop) -> list[list[tuple[str, int]]]:
    plans = _tries(shape, play)
    if (
        shape.depth == 4 and shape.pairs == 2
    ):  # the paper's Figure 3, where two orders could be a unit shorter
        plans = iter([next(plans)])
    return _shortest(plans, shape)


def _shortest(plans: Iterator[Times], shape: PlanConstraints) -> list[list[tuple[str, int]]]:
    last = (shape.depth + 1) * shape.pairs - 1  # of stage 0 the last backward
    return list(_unfold(min(plans, key=lambda ends: ends[last]), shape.depth, shape.pairs))


def _repeated(order: list[tuple[str, int]], depth: int, micro_batches: int) -> list[tuple[str, int]]:
    return [
        (kind, first + micro_batch)
        for first in range(0, micro_batches, depth)
        for kind, micro_batch in order
        if first + micro_batch < micro_batches
    ]


def asymmetric_orders(depth: int, micro_batches: int, peak: int) -> list[list[tuple[str, int]]]:
    """The same of the stored asymmetric order with this peak, one after another for multiples of D."""
    return [_order(word * (micro_batches // depth)) for word in ASYMMETRIC[depth, peak]]


def _tries(shape: PlanConstraints, play: NumberLoop = played) -> Iterator[Times]:
    most = max(1, OPS_BUDGET // (3 * 2 * shape.depth * shape.pairs))
    known: list[tuple[int, Times]] = []
    for wait, start in list(product(WAITS, STARTS))[:most]:
        yield from _there_and_back(
            shape, _linear(shape, pace=4, start=start * shape.depth // 2), wait, known, play
        )


def _linear(shape: PlanConstraints, pace: int, start: int) -> Times:
    """Due times: forwards go down one stage per unit of time, backwards come up one stage in two, and pairs
    follow at the pace.

    A forward of a late stage is as urgent as the one D/2 stages before it.
    """
    stages, pairs, half = range(shape.depth), range(shape.pairs), shape.depth // 2
    forwards = [stage % half + pace * pair for stage in stages for pair in pairs]
    return forwards + [
        start + 2 * (shape.depth - 1 - stage) + pace * pair for stage in stages for pair in pairs
    ]


def _there_and_back(
    shape: PlanConstraints, due: Times, wait: int, known: list[tuple[int, Times]], play: NumberLoop = played
) -> Iterator[Times]:
    """Plan for these due times, and the one for those that planning it again from its end gives.

    If there is little room, other due times make a plan that is ``known``, and so is the plan that follows
    from it.
    """
    forth = play(*shape, due, wait, 1, 2)
    if (wait, forth) in known:
        return
    known.append((wait, forth))
    yield forth
    back = play(*shape._replace(first=ANY), _time_reversed(forth, shape), wait, 2, 1)
    yield play(*shape, _time_reversed(back, shape), wait, 1, 2)


def _time_reversed(plan: Times, shape: PlanConstraints) -> Times:
    depth, pairs, _, _ = shape
    starts = range(0, depth * pairs, pairs)
    return [
        -plan[kind + start + pair]
        for kind in (depth * pairs, 0)
        for start in starts
        for pair in range(pairs - 1, -1, -1)
    ]


def _unfold(plan: Times, depth: int, pairs: int) -> Iterator[list[tuple[str, int]]]:
    for worker in range(depth // 2):
        ended = [
            (plan[start + stage * pairs + pair], kind, 2 * pair + up)
            for kind, start in (("F", 0), ("B", depth * pairs))
            for up, stage in enumerate((worker, depth - 1 - worker))
            for pair in range(pairs)
        ]
        yield [(kind, micro_batch) for _, kind, micro_batch in sorted(ended)]


def _order(word: str) -> list[tuple[str, int]]:
    """The order of a worker, as ``mixpipe_optima.py`` writes it.

    >>> _order("FfbB")
    [('F', 0), ('F', 1), ('B', 1), ('B', 0)]
    """
    return [
        (letter.upper(), 2 * word[:place].count(letter) + letter.islower())
        for place, letter in enumerate(word)
    ]


def _makespan(near: list[list[tuple[str, int]]], depth: int) -> int:
    ends: dict[tuple[str, int, int], int] = {}
    free_at, orders = [0] * len(near), [order[::-1] for order in near]
    while any(orders):
        for worker, ops in enumerate(orders):
            while ops:
                kind, micro_batch = ops[-1]
                pair, late = divmod(micro_batch, 2)
                stage = depth - 1 - worker if late else worker
                source = (kind, stage - 1, pair) if kind == "F" else (kind, stage + 1, pair)
                source = ("F", stage, pair) if source == ("B", depth, pair) else source
                if stage + (kind == "B") > 0 and source not in ends:
                    break
                begin = max(free_at[worker], ends.get(source, 0))
                ends[kind, stage, pair] = free_at[worker] = begin + (1 if kind == "F" else 2)
                ops.pop()
    return max(free_at)


def _mirrored(near: list[list[tuple[str, int]]], micro_batches: int) -> list[list[tuple[str, int]]]:
    far = [[(kind, micro_batch ^ 1) for kind, micro_batch in order] for order in reversed(near)]
    return [[op for op in order if op[1] < micro_batches] for order in near + far]
