"""Rules of actions after gradients: sums over replicas, gathers of loss and norm, versions of the weights."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from counterflow.common.plurals import plural
from counterflow.schedule.ir import Op, Product, Schedule

from ..actions import (
    Action,
    Clip,
    Compute,
    DropNonFinite,
    StartGather,
    StartSync,
    Summed,
    Update,
    WaitGather,
    WaitSync,
)
from .subject import CheckSubject


def held_versions(subject: CheckSubject) -> Iterator[str]:
    """Weight versions that are used while they are not held, or made too early."""
    program = subject.program
    assert program is not None
    for worker, actions in enumerate(program.actions):
        yield from _worker_versions(subject.schedule, worker, actions)


def _worker_versions(schedule: Schedule, worker: int, actions: tuple[Action, ...]) -> Iterator[str]:
    versions: dict[int, set[int]] = {stage: {0} for _, stage in schedule.placement.stages_on(worker)}
    updates = dict.fromkeys(versions, 0)
    backwards = Counter(
        (op.stage, schedule.period_of(op))
        for op in schedule.orders[worker]
        if Product.WEIGHT_GRADIENTS in op.kind.makes
    )
    for index, action in enumerate(actions):
        place = f"worker {worker}, action {index}: {action}"
        match action:
            case Compute(op):
                if op.version not in versions[op.stage]:
                    shown = ", ".join(map(str, sorted(versions[op.stage])))
                    yield f"{place}: version {op.version} of stage {op.stage} is not held, only {shown}"
                if Product.WEIGHT_GRADIENTS in op.kind.makes:
                    backwards[op.stage, schedule.period_of(op)] -= 1
            case Update(stage, version, frees):
                if version - 1 not in versions[stage] or version in versions[stage]:
                    yield f"{place}: expected an update of version {max(versions[stage])}"
                if backwards[stage, version - 1]:
                    yield f"{place}: {backwards[stage, version - 1]} backwards of its period follow later"
                versions[stage].add(version)
                if not versions[stage].issuperset(frees):
                    yield f"{place}: frees {frees}, of which some are not held"
                versions[stage] -= set(frees)
                updates[stage] += 1
    for stage, count in updates.items():
        if count != schedule.periods:
            yield f"worker {worker}: {plural(count, 'update')} of stage {stage}, expected {schedule.periods}"


def syncs(subject: CheckSubject) -> Iterator[str]:
    """Gradient syncs that are missing, duplicate, over other workers than the replicas, or out of order."""
    program = subject.program
    assert program is not None
    schedule = program.schedule
    wanted = {
        (stage, period): program.holders(stage)
        for stage in range(schedule.stages)
        for period in range(schedule.periods)
        if program.needs_sync
    }
    started: list[list[tuple[int, int]]] = []
    for worker, actions in enumerate(program.actions):
        starts: list[tuple[int, int]] = []
        yield from _worker_syncs(schedule, worker, actions, starts, wanted)
        started.append(starts)
        for stage, period in (key for key, holders in wanted.items() if worker in holders):
            if (stage, period) not in starts:
                yield (
                    f"worker {worker}: no gradient sync of its copy of stage {stage}, period {period} "
                    f"(copies on workers {', '.join(map(str, wanted[stage, period]))})"
                )
    yield from _sync_orders(started)


def _worker_syncs(
    schedule: Schedule,
    worker: int,
    actions: tuple[Action, ...],
    starts: list[tuple[int, int]],
    wanted: dict[tuple[int, int], tuple[int, ...]],
) -> Iterator[str]:
    waited: set[tuple[int, int]] = set()
    for index, action in enumerate(actions):
        place = f"worker {worker}, action {index}: {action}"
        match action:
            case Compute(op) if Product.WEIGHT_GRADIENTS in op.kind.makes:
                period = schedule.period_of(op)
                if (op.stage, period) in starts:
                    yield f"{place} comes after the start of the gradient sync of its stage"
                elif (op.stage, period - 1) in starts and (op.stage, period - 1) not in waited:
                    yield f"{place} needs gradients whose sync is still in flight"
            case StartSync(stage, period, workers, Summed.GRADIENTS):
                if (stage, period) in starts:
                    yield f"{place} exists more than once"
                if wanted.get((stage, period)) != workers:
                    yield (
                        f"{place}: over workers {workers}, copies are on {wanted.get((stage, period), ())}"
                    )
                starts.append((stage, period))
            case WaitSync(stage, period, _, Summed.GRADIENTS):
                if (stage, period) not in starts:
                    yield f"{place} comes before its start"
                waited.add((stage, period))
            case Update(stage, version, _):
                if (stage, version - 1) in wanted and (stage, version - 1) not in waited:
                    yield f"{place} comes before the wait for its gradient sync"


def _sync_orders(started: list[list[tuple[int, int]]]) -> Iterator[str]:
    for high, syncs_high in enumerate(started):
        for low in range(high):
            syncs_low = started[low]
            shared = set(syncs_high) & set(syncs_low)
            a, b = ([s for s in syncs if s in shared] for syncs in (syncs_low, syncs_high))
            if a != b:
                yield f"workers {low} and {high} start their gradient syncs in different orders: {a}, {b}"


def sums_in_one_order(subject: CheckSubject) -> Iterator[str]:
    """Sets of workers that start the sums of the set, which share a communicator, in different orders."""
    program = subject.program
    assert program is not None
    started: dict[tuple[int, ...], dict[int, list[StartSync]]] = defaultdict(lambda: defaultdict(list))
    for worker, actions in enumerate(program.actions):
        for action in actions:
            if isinstance(action, StartSync):
                started[action.workers][worker].append(action)
    for workers, rows in started.items():
        first, *rest = workers
        for member in rest:
            for number, pair in enumerate(zip_longest(rows[first], rows[member])):
                if pair[0] != pair[1]:
                    shown = " and ".join(
                        f"{'none' if start is None else start} on worker {worker}"
                        for start, worker in zip(pair, (first, member), strict=True)
                    )
                    yield f"workers {', '.join(map(str, workers))}: sum {number} among them is {shown}"
                    break


def agreed(subject: CheckSubject) -> Iterator[str]:
    """Faults unless all workers gather in one order, if synchronous between the sums of gradients and the
    updates.
    """
    program = subject.program
    assert program is not None
    wanted = [action for action in program.actions[0] if isinstance(action, StartGather)]
    for worker, actions in enumerate(program.actions):
        gathers = [action for action in actions if isinstance(action, StartGather)]
        for number, (gather, first) in enumerate(zip_longest(gathers, wanted)):
            if gather != first:
                faulty = f"gather {number} is {gather or 'none'} on worker {worker}"
                yield f"{faulty}, {first or 'none'} on worker 0"
                break
        yield from _waited(worker, actions)
        if program.schedule.synchronous:
            yield from _flushed(program.schedule, worker, actions)


def _waited(worker: int, actions: Sequence[Action]) -> Iterator[str]:
    going: deque[StartGather] = deque()
    started = {action for action in actions if isinstance(action, StartSync)}
    for index, action in enumerate(actions):
        if isinstance(action, StartGather):
            going.append(action)
        elif isinstance(action, WaitGather):
            if not going or going.popleft() != action.start:
                yield f"worker {worker}, action {index}: {action} is not for the gather that is next"
        elif isinstance(action, WaitSync) and action.start not in started:
            yield f"worker {worker}, action {index}: {action} waits for a sum that it never starts"
    for start in going:
        yield f"worker {worker}: {start} is never waited for"


def _flushed(schedule: Schedule, worker: int, actions: Sequence[Action]) -> Iterator[str]:
    gathers = [(index, action) for index, action in enumerate(actions) if isinstance(action, WaitGather)]
    clips = [index for index, action in enumerate(actions) if isinstance(action, Clip | DropNonFinite)]
    losses, norms = (
        sum(gather.loss == 0 for _, gather in gathers),
        sum(gather.norm == 0 for _, gather in gathers),
    )
    expected = sum(isinstance(actions[index], Clip) for index in clips)
    if losses != 1 or norms != expected or len(clips) != 1:
        yield (
            f"worker {worker}: gathers the loss {losses} times, the norm {norms} times and clips "
            f"{len(clips)} times, expected 1, {expected} and 1"
        )
        return
    loss = norm = False
    for index, action in enumerate(actions):
        place = f"worker {worker}, action {index}: {action}"
        if isinstance(action, StartGather):
            loss, norm = loss or action.loss == 0, norm or action.norm == 0
        elif _makes_gradients(action) and norm:
            yield f"{place} comes after the worker reported its norm"
        elif _makes_gradients(action) and index > gathers[0][0]:
            yield f"{place} comes after the gather of the loss"
        elif isinstance(action, Compute) and loss and _gives_loss(schedule, action.op):
            yield f"{place} comes after the worker reported its loss"
        elif isinstance(action, Update) and index < clips[0]:
            yield f"{place} comes before the gradients are clipped"
        elif isinstance(action, WaitGather) and index > clips[0]:
            yield f"{place} comes after the gradients are clipped"


def _makes_gradients(action: Action) -> bool:
    if isinstance(action, StartSync | WaitSync):
        return action.what is not Summed.STATISTICS
    return isinstance(action, Compute)


def _gives_loss(schedule: Schedule, op: Op) -> bool:
    return op.kind.gives is Product.OUTPUT and op.stage == schedule.stages - 1
