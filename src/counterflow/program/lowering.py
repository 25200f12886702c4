"""Lowering: from a schedule to one action list per worker, as a chain of pure passes.

1. ``with_messages``: every op as a compute action, a send right after each op whose product another
   worker needs, and its receive early on the other side (Hanayo section 4.2).
2. ``with_syncs``: gradient syncs started as the mode says.
3. ``with_updates``: waits for the syncs, sums of tied weights, the gather of loss and norm, clipping, updates
   with the weight versions each one frees, averages of running statistics.
4. ``with_early_loss``, if updates shall not wait for the norm.

Steps with a barrier, steps without one, and asynchronous schemes are three lowerings to these actions (the
last is cut in ``segments.py``); the runtime does not distinguish them.

Lists are made and ordered only here: the result is proved, timed and run unchanged. After each pass the rules
of the checker that must already hold are checked again.

Messages between two workers, in either direction, have one order, the same on both: the order in which they
are sent if forwards take 1 and backwards 2. A receive is posted before the op during which its message is
sent, and at least one op before the op that needs it; but not before an earlier message of the same two
workers. That play of the schedule is then also a play with sends that block until their receive is posted, in
which no send has to wait; and since whether a play gets stuck does not depend on durations, no play with
blocking sends gets stuck. Nor does one in which receives block as well (``posting.py``). If messages are
matched by tag, an earlier receive makes nobody wait longer: each is posted ``AHEAD`` ops before it is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from counterflow.errors import ConfigError, ScheduleError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync, parse_mode

from .actions import (
    Action,
    CallHooks,
    Clip,
    ClipStage,
    Compute,
    DropNonFinite,
    Matching,
    Program,
    Receive,
    Send,
    StartGather,
    StartSync,
    Summed,
    SyncAction,
    Update,
    WaitGather,
    WaitSync,
)
from .early_loss import with_early_loss
from .lists import earliest
from .posting import Posting, settle
from .rules import (
    AGREED,
    COMPUTES,
    COMPUTES_PAIRS,
    DEADLOCK_HOLDING,
    DEADLOCK_RENDEZVOUS,
    MESSAGES,
    PLACED,
    POSTED,
    SUMS,
    SYNCS,
    VERSIONS,
    CheckSubject,
    Rule,
    require,
)
from .sync import by_last_backward, first_users, gradient_syncs, plan_syncs

AHEAD = 3
"""Number of ops by which a receive is posted before the op that needs it, if messages are matched by tag.

Over Gloo a message is not sent before its receiver has reported that it is ready, and over slow links this
report has to be sent early: with 5 ms, 100 Mbit/s and ops of 5 ms, zb-v's steps are 1.4 times as long with 1
as with 3.
"""

Gaps = list[dict[int, list[Action]]]
"""For each worker, the actions before its op number i (i = number of ops: at the end)."""


OpTimes = tuple[Sequence[float], Sequence[float]]
"""Start and end of every op, worker by worker in order, in any unit."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Values of a model that are summed in addition to the gradients of a stage's replicas.

    Attributes:
        ties: groups of stages that share weights, each ascending.
        statistics: stages whose running statistics (batch norms) are averaged over their replicas.
    """

    ties: tuple[tuple[int, ...], ...] = ()
    statistics: tuple[int, ...] = ()


NOTHING_SHARED = Shared()


@dataclass(frozen=True, slots=True)
class Ends:
    """End of steps.

    Attributes:
        barrier: whether all workers end a synchronous step before one begins the next; otherwise the next
            step gathers its remaining results.
        norm: whether updates wait for the gradient norm of all workers without a barrier too; otherwise they
            wait for the loss.
        hooks: whether hooks see gradients before they are clipped.
    """

    barrier: bool = True
    norm: bool = False
    hooks: bool = False

    @property
    def wait_for_norm(self) -> bool:
        """True if updates of a synchronous schedule wait for the gradient norm of all workers."""
        return self.barrier or self.norm


WITH_A_BARRIER = Ends()


def lower(
    schedule: Schedule,
    *,
    replicas: int = 1,
    sync: Sync | str = Sync.EAGER_OPT,
    times: OpTimes | None = None,
    matching: Matching = Matching.ORDER,
    shared: Shared = NOTHING_SHARED,
    ends: Ends = WITH_A_BARRIER,
    recheck: bool = True,
) -> Program:
    """The action lists of a schedule.

    Args:
        schedule: a schedule that the checker accepts.
        replicas: number of pipeline groups that sum each stage's gradients, 1 or more.
        sync: when gradients are summed.
        times: start and end of every op, worker by worker in order, in any unit, by which ``eager-opt``
            decides (``counterflow.lower`` takes them from costs); default: forwards take 1 and backwards 2.
        matching: how the transport matches messages.
        shared: values summed in addition to the gradients of a stage's replicas.
        ends: how its steps end.
        recheck: whether the checker's rules are checked after each pass.

    Raises:
        DeadlockError: the schedule's workers wait for each other in a circle.
        ScheduleError: an op has no input, or a pass broke a rule (a bug, or a hand-made placement that
            cannot be lowered).
        ConfigError: replicas below 1, an unknown sync mode.
    """
    if replicas < 1:
        raise ConfigError(f"replicas={replicas}: must be 1 or more")
    mode = parse_mode(Sync, "sync", sync)
    graph = OpGraph(schedule)
    if recheck:
        require(CheckSubject(schedule, graph=graph), (PLACED,))
    unit = unit_times(graph)
    traffic = COMPUTES, COMPUTES_PAIRS, MESSAGES, DEADLOCK_RENDEZVOUS, POSTED, DEADLOCK_HOLDING
    passes: list[tuple[Callable[[Program], Program], tuple[Rule, ...]]] = [
        (partial(with_messages, graph=graph, times=unit), traffic),
        (partial(with_syncs, times=times or unit), traffic),
        (partial(with_updates, shared=shared, ends=ends), (*traffic, VERSIONS, SYNCS, SUMS, AGREED)),
    ]
    if not ends.wait_for_norm and schedule.synchronous:
        passes.append((with_early_loss, (*traffic, AGREED)))
    program = Program(schedule, (), replicas, mode, matching)
    for lowering_pass, rules in passes:
        program = lowering_pass(program)
        if recheck:
            require(CheckSubject(schedule, program, graph=graph), rules)
    return program


def lower_evaluation(schedule: Schedule, *, matching: Matching = Matching.ORDER) -> Program:
    """The action lists of an evaluation of one mini-batch, without gradients: the forwards of one period.

    Micro-batches go whole: nothing is saved of them, so that slices would save no memory.

    Raises:
        ScheduleError: a pass broke a rule.
    """
    orders = tuple(
        tuple(
            op._replace(version=0, part=0, parts=1)
            for op in order
            if op.kind.is_forward and op.part == 0 and schedule.period_of(op) == 0
        )
        for order in schedule.orders
    )
    forwards = replace(
        schedule, workload=schedule.workload.evaluation(), orders=orders, steady=None, pairs=()
    )
    graph = OpGraph(forwards)
    program = with_messages(Program(forwards, (), matching=matching), graph, unit_times(graph))
    require(
        CheckSubject(forwards, program, graph=graph),
        (MESSAGES, DEADLOCK_RENDEZVOUS, POSTED, DEADLOCK_HOLDING),
    )
    return program


def unit_times(graph: OpGraph) -> tuple[list[int], list[int]]:
    """Start and end of every node with F = R = I = W = 1 and B = 2, in units of stage and micro-batch /
    parts.
    """
    scale = max((op.parts for op in graph.ops), default=1)
    return earliest(graph, [(len(op.kind.makes) or 1) * round(scale * op.work) or 1 for op in graph.ops])


def with_messages(program: Program, graph: OpGraph, times: tuple[list[int], list[int]]) -> Program:
    """Compute actions, each send right after its op, each receive early (see the module docstring)."""
    orders = program.schedule.orders
    gaps: Gaps = [defaultdict(list) for _ in orders]
    bounds = [(0, len(order)) for order in orders]
    for worker, index, _, action in messages(graph, times[1], bounds, program.matching):
        gaps[worker][index].append(action)
    return _woven(program, compute_actions(program.schedule), gaps)


def messages(
    graph: OpGraph, ends: Sequence[int], bounds: Sequence[Sequence[int]], matching: Matching
) -> Iterator[tuple[int, int, int, Action]]:
    """Sends and receives, as (worker, op before which it stands, segment, action).

    Messages of two workers are in the order of sending, segment by segment; values for skip connections are
    sent last. A receive is posted before the op during which its message is sent and at least one op before
    it is needed, but in the same segment as the send. A pair of ops counts as one op: its inputs are needed
    when it begins, its products are sent when it has ended, and nothing stands within it.

    Args:
        graph: the ops.
        ends: end of every op, in any unit.
        bounds: for each worker, the first op of each segment, then the number of its ops.
        matching: by order, no receive is posted before an earlier message of the two workers, nor so early
            that workers blocked by messages would wait in a circle; by tag, every receive is posted at least
            ``AHEAD`` ops before it is needed. Receives that are moved for this are yielded last.

    Raises:
        ScheduleError: a message is needed in an earlier segment than the one it is sent in.
    """
    latest: dict[tuple[int, int], int] = defaultdict(int)
    firsts, lasts = graph.pair_ends
    if graph.schedule.pairs:
        ends = [ends[last] for last in lasts]
    by_worker = [ends[graph.first[w] : graph.first[w + 1]] for w in range(len(bounds))]
    placed = []
    for index, (source, target, skip) in enumerate(graph.messages):
        sender = graph.worker[source]
        number = bisect_right(bounds[sender], source - graph.first[sender]) - 1
        placed.append((number, ends[source], sender, source, target, index, skip))
    placed.sort(key=itemgetter(0, 1, 2, 3, 5))

    def unpaired(worker: int, place: int) -> int:
        node = graph.first[worker] + place
        return place if node >= graph.first[worker + 1] else firsts[node] - graph.first[worker]

    postings = []
    wanted = []
    for number, end, sender, source, target, _, _ in placed:
        receiver = graph.worker[target]
        sent = lasts[source] - graph.first[sender] + 1
        needed = firsts[target] - graph.first[receiver]
        start, stop = bounds[receiver][number : number + 2]
        if needed < start:
            raise ScheduleError(
                f"{graph.place(target)} comes before the mini-batch that {graph.place(source)} needs; "
                "the schedule cannot be run mini-batch by mini-batch"
            )
        turn = max(min(bisect_right(by_worker[receiver], end), stop), start)
        posted = max(min(turn, unpaired(receiver, max(needed - 1, 0))), start, latest[receiver, sender])
        latest[receiver, sender], latest[sender, receiver] = posted, sent
        postings.append(Posting(sender, receiver, sent, posted, turn))
        wanted.append(unpaired(receiver, max(needed - AHEAD, start)))
    if matching is Matching.ORDER:
        settle(postings, len(bounds))
    moved: list[tuple[int, int, int, Action]] = []
    for (number, _, _, source, _, _, skip), message, ahead in zip(placed, postings, wanted, strict=True):
        output = graph.ops[source]
        yield message.sender, message.sent, number, Send(output, message.receiver, skip)
        receive = Receive(output, message.sender, skip)
        if matching is Matching.TAG and message.posted > ahead:
            moved.append((message.receiver, ahead, number, receive))
        else:
            yield message.receiver, message.posted, number, receive
    yield from moved


def with_syncs(program: Program, times: OpTimes) -> Program:
    """Start each stage's gradient sync after its last backward and the sends of that."""
    schedule = program.schedule
    gaps: Gaps = [defaultdict(list) for _ in schedule.orders]
    if schedule.synchronous:
        for item in plan_syncs(schedule, program.sync, *times):
            stage, workers = item.sync.stage, item.sync.workers
            if program.needs_sync:
                for worker, before in item.starts:
                    gaps[worker][before].append(StartSync(stage, item.sync.period, workers))
    else:
        for sync in gradient_syncs(schedule):
            if program.needs_sync:
                for worker, last in sync.last:
                    before = len(schedule.orders[worker]) if last is None else last + 1
                    gaps[worker][before].append(StartSync(sync.stage, sync.period, sync.workers))
    return _woven(program, program.actions, gaps)


def with_updates(program: Program, shared: Shared = NOTHING_SHARED, ends: Ends = WITH_A_BARRIER) -> Program:
    """Waits and updates: at the end of a synchronous schedule; otherwise before the first op that needs them.

    If nothing has to be summed, an asynchronous update follows the last backward of its period at once.
    """
    schedule = program.schedule
    gaps: Gaps = [defaultdict(list) for _ in schedule.orders]
    users = first_users(schedule)
    for sync in by_last_backward(schedule):
        for worker, last in sync.last:
            order = schedule.orders[worker]
            if program.needs_sync or last is None or schedule.synchronous:
                before = users.get((worker, sync.stage, sync.period), len(order))
            else:
                before = last + 1
            if program.needs_sync:
                wait = WaitSync(sync.stage, sync.period, sync.workers)
                gaps[worker][before].append(wait)
            if not schedule.synchronous:
                gaps[worker][before].append(ClipStage(sync.stage, sync.period))
            gaps[worker][before].append(Update(sync.stage, sync.period + 1, frees=()))
    if schedule.synchronous:
        for worker, gap in enumerate(gaps):
            end = len(schedule.orders[worker])
            gap[end] = _at_the_end(program, worker, gap[end], shared, ends)
    woven = _woven(program, program.actions, gaps)
    return replace(woven, actions=tuple(tuple(freeing((), row)) for row in woven.actions))


def freeing(before: Iterable[Action], row: Sequence[Action]) -> Iterator[Action]:
    """A list whose updates free the held weight versions that nothing later uses.

    Args:
        before: actions that the worker executed before.
        row: the list of actions.
    """
    versions: dict[int, set[int]] = defaultdict(lambda: {0})
    for action in before:
        if isinstance(action, Update):
            versions[action.stage] |= {action.version}
            versions[action.stage] -= set(action.frees)
    for index, action in enumerate(row):
        if not isinstance(action, Update):
            yield action
            continue
        after = (later.op for later in row[index:] if isinstance(later, Compute))
        used = {op.version for op in after if op.stage == action.stage}
        existing = versions[action.stage]
        frees = tuple(sorted(v for v in existing if v < min(used, default=action.version)))
        versions[action.stage] = (existing | {action.version}) - set(frees)
        yield replace(action, frees=frees)


def _at_the_end(
    program: Program, worker: int, actions: Sequence[Action], shared: Shared, ends: Ends
) -> list[Action]:
    updates = [action for action in actions if isinstance(action, Update)]
    waits = [action for action in actions if not isinstance(action, Update)]
    tied = _sums(program, worker, ((Summed.TIED, stages) for stages in shared.ties))
    statistics = statistics_sums(program, worker, shared, period=0)
    return [*waits, *tied, *_gathers(ends), *updates, *statistics]


def _gathers(ends: Ends) -> Iterator[Action]:
    late = (
        ends.wait_for_norm and ends.hooks
    )  # the norm is that of the hooks' gradients, after the division by the loss's weight
    norm = None if late else 0 if ends.wait_for_norm else -1
    first = StartGather(0, norm, None if ends.barrier else -1)
    yield from (first, WaitGather(*first.periods))
    if ends.hooks:
        yield CallHooks(0)
    if late:
        yield from (StartGather(norm=0), WaitGather(norm=0))
    yield Clip(0) if ends.wait_for_norm else DropNonFinite(0)


def statistics_sums(program: Program, worker: int, shared: Shared, period: int) -> list[SyncAction]:
    """The averages of running statistics that a worker takes part in."""
    stages = ((Summed.STATISTICS, (stage,)) for stage in shared.statistics)
    return _sums(program, worker, stages, period)


def _sums(
    program: Program, worker: int, wanted: Iterable[tuple[Summed, tuple[int, ...]]], period: int = 0
) -> list[SyncAction]:
    starts = []
    for what, (stage, *stages) in wanted:
        workers = program.holders(stage, *stages)
        if worker in workers and len(workers) * program.replicas > 1:
            starts.append(StartSync(stage, period, workers, what, tuple(stages)))
    return [*starts, *(WaitSync(s.stage, s.period, s.workers, s.what, s.tied) for s in starts)]


def compute_actions(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Only the ops, as actions."""
    rows = [[*map(Compute, order)] for order in schedule.orders]
    for row, order, pairs in zip(rows, schedule.orders, schedule.pairs, strict=False):
        for begin, stop in pairs:
            row[begin] = Compute(order[begin], order[begin:stop])
    return tuple(map(tuple, rows))


def _woven(program: Program, actions: tuple[tuple[Action, ...], ...], gaps: Gaps) -> Program:
    """``actions`` with those of ``gaps`` inserted before each compute action.

    In one gap the existing actions come first, then the added ones, so sends stay right after their op. Those
    of gaps within a pair follow it.
    """
    woven = []
    for worker, old in enumerate(actions):
        new: list[Action] = []
        index = inside = 0
        late: list[Action] = []
        for action in old:
            if isinstance(action, Compute):
                late += gaps[worker].get(index, ())
                if not inside:
                    new += late
                    late = []
                inside = len(action.pair) - 1 if action.pair else max(inside - 1, 0)
                index += 1
            new.append(action)
        new += late
        new += gaps[worker].get(index, ())
        woven.append(tuple(new))
    return replace(program, actions=tuple(woven))
