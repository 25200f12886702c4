"""The checker's rules: a table of named properties of a schedule and of the actions it is lowered to.

Each rule yields a line for each violation: the place, what was expected, what was found. Rules that read
the schedule alone come first; those that read the lowered program hold for what ``lowering.py`` makes
and are there to catch a pass, or a hand-made program, that breaks them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import itemgetter

from counterflow.errors import DeadlockError, ScheduleError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, OpKind, Product, Schedule
from counterflow.schedule.op import maker_of
from counterflow.schedule.residency import stash_change

from .action_lists import circle
from .actions import (
    Action,
    Clip,
    Compute,
    DropNonFinite,
    Matching,
    Message,
    Program,
    Receive,
    Send,
    StartGather,
    StartSync,
    Summed,
    Update,
    WaitGather,
    WaitSync,
    named,
)
from .lists import earliest, ops_before

MOST_SHOWN = 5
"""Violations of one rule that are shown; the rest are counted."""


@dataclass(slots=True)
class Subject:
    """What is checked: a schedule, its lowered program once there is one, and the user's limit.

    ``graph`` is that of the schedule, made when a rule first needs it.
    """

    schedule: Schedule
    program: Program | None = None
    peak_limit: float | None = None
    graph: OpGraph | None = None

    def needed_graph(self) -> OpGraph:
        """The graph of the schedule."""
        if self.graph is None:
            self.graph = OpGraph(self.schedule)
        return self.graph


@dataclass(frozen=True, slots=True)
class Rule:
    """One named property. ``after`` names the rules without which it cannot be looked at."""

    name: str
    violations: Callable[[Subject], Iterator[str]]
    after: tuple[str, ...] = ()
    lowered: bool = False
    error: type[ScheduleError] = ScheduleError


def _complete(subject: Subject) -> Iterator[str]:
    """Every product of the workload exactly once, by ops that share and split work as it says."""
    schedule = subject.schedule
    workload = schedule.workload
    yield from workload.faults()
    wanted = {_unversioned(op) for op in workload.ops()}
    found: Counter[Op] = Counter()
    makers: dict[tuple[Product, tuple[object, ...]], OpKind] = {}
    for worker, order in enumerate(schedule.orders):
        for index, versioned in enumerate(order):
            op = _unversioned(versioned)
            found[op] += 1
            place = f"worker {worker}, op {index}: {versioned}"
            if not _in_range(schedule, op):
                yield f"{place} is not one of {_extent(schedule)}"
            elif op not in wanted:
                yield f"{place} is none of the workload's ops, which share or split this work in another way"
            if found[op] == 2:
                yield f"{place} is there more than once"
            elif op.kind.gives is not None and found[op] == 1:
                first = makers.setdefault((op.kind.gives, op[1:]), op.kind)
                if first is not op.kind:
                    given = op.kind.gives.value
                    yield f"{place} makes an {given} that {op._replace(kind=first)} makes as well"
    for op in sorted(wanted - found.keys(), key=lambda op: (op.pipe, op.micro_batches, op.stage, op.part)):
        yield f"{op} is in no order, though other stages of pipe {op.pipe} have its micro-batch"


def _unversioned(op: Op) -> Op:
    return op._replace(version=0) if op.version else op


def _in_range(schedule: Schedule, op: Op) -> bool:
    return (
        0 <= op.pipe < schedule.pipes
        and 0 <= op.stage < schedule.stages
        and len(op.micro_batches) > 0
        and all(0 <= m < schedule.total_micro_batches for m in op.micro_batches)
        and len({m // schedule.micro_batches for m in op.micro_batches}) == 1
        and 0 <= op.part < op.parts
        and (op.parts == 1 or not op.kind.whole)
    )


def _extent(schedule: Schedule) -> str:
    return (
        f"{schedule.pipes} pipes, {schedule.stages} stages, "
        f"{schedule.total_micro_batches} micro-batches, groups within one update"
    )


def _placed(subject: Subject) -> Iterator[str]:
    schedule = subject.schedule
    for worker, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            holder = schedule.placement.worker(op.pipe, op.stage)
            if holder != worker:
                yield (
                    f"worker {worker}, op {index}: {op}, but worker {holder} holds stage {op.stage} "
                    f"of pipe {op.pipe}"
                )


def _own_first(product: Product, subject: Subject) -> Iterator[str]:
    """Ops that come before the op of their own stage whose product they need."""

    def keys(op: Op) -> list[tuple[object, ...]]:
        if product is Product.OUTPUT:  # of each micro-batch, however many were computed together
            return [(op.pipe, op.stage, m) for m in op.micro_batches]
        return [op[1:]]

    maker = maker_of(product)
    for worker, order in enumerate(subject.schedule.orders):
        done: set[tuple[object, ...]] = set()
        for index, op in enumerate(order):
            if op.kind is maker:
                done.update(keys(op))
            elif op.kind.first is product and not done.issuperset(keys(op)):
                yield f"worker {worker}, op {index}: {op} comes before its {maker.word}"


def _no_deadlock(subject: Subject) -> Iterator[str]:
    graph = subject.needed_graph()
    try:
        earliest(graph, [1] * len(graph.ops))
    except DeadlockError as error:
        yield str(error)
        return
    if subject.program is not None:
        yield from _stuck(subject, subject.program, rendezvous=False)


def _no_deadlock_rendezvous(subject: Subject) -> Iterator[str]:
    assert subject.program is not None
    yield from _stuck(subject, subject.program, rendezvous=True)


def _no_deadlock_holding(subject: Subject) -> Iterator[str]:
    program = subject.program
    assert program is not None
    if program.matching is Matching.ORDER:  # where tags match, messages wait on no device
        yield from _stuck(subject, program, rendezvous=True, holding=True)


def _stuck(subject: Subject, program: Program, *, rendezvous: bool, holding: bool = False) -> Iterator[str]:
    found = circle(program, subject.needed_graph(), rendezvous=rendezvous, holding=holding)
    if found is not None:
        yield found


def _posted(subject: Subject) -> Iterator[str]:
    """Receives that stand before an op of their worker without which their message is never made."""
    program, graph = subject.program, subject.needed_graph()
    assert program is not None
    if program.matching is not Matching.ORDER:
        return
    nodes = {op: node for node, op in enumerate(graph.ops)}
    before = ops_before(graph)
    for worker, actions in enumerate(program.actions):
        done = 0
        for index, action in enumerate(actions):
            if isinstance(action, Compute):
                done += 1
            elif isinstance(action, Receive):
                needed = before[nodes[action.output]][worker]
                if needed > done:
                    last = graph.ops[graph.first[worker] + needed - 1]
                    yield f"worker {worker}, action {index}: {action} is posted before {last}, which it needs"


def _messages(subject: Subject) -> Iterator[str]:
    program = subject.program
    assert program is not None
    traffic: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for worker, actions in enumerate(program.actions):
        for index, message in _worker_traffic(actions):
            match message:
                case Send(_, peer):
                    traffic[worker, peer].append((index, f"{named(message)} from {worker} to {peer}"))
                case Receive(_, peer):
                    traffic[worker, peer].append((index, f"{named(message)} from {peer} to {worker}"))
    for one, other in sorted({(min(pair), max(pair)) for pair in traffic}):
        ours, theirs = traffic[one, other], traffic[other, one]
        if program.matching is Matching.TAG:
            ours, theirs = (sorted(messages, key=itemgetter(1)) for messages in (ours, theirs))
        for number, (mine, yours) in enumerate(zip_longest(ours, theirs)):
            if mine is None or yours is None or mine[1] != yours[1]:
                yield (
                    f"workers {one} and {other}: message {number} between them is "
                    f"{_message(mine)} on worker {one}, but {_message(yours)} on worker {other}"
                )
                break
    yield from _message_places(program, subject.needed_graph())


def _message(message: tuple[int, str] | None) -> str:
    return "none" if message is None else f"{message[1]} (action {message[0]})"


def _worker_traffic(actions: Iterable[Action]) -> Iterator[tuple[int, Message]]:
    """The sends and receives of a list with their places."""
    for index, action in enumerate(actions):
        if isinstance(action, Send | Receive):
            yield index, action


def _message_places(program: Program, graph: OpGraph) -> Iterator[str]:
    """Sends that do not follow their op; ops whose message is not received before them."""
    expected: list[dict[Receive, Op]] = [{} for _ in program.actions]
    for source, target, skip in graph.messages:
        message = Receive(graph.ops[source], graph.worker[source], skip)
        expected[graph.worker[target]][message] = graph.ops[target]
    for worker, actions in enumerate(program.actions):
        yield from _worker_messages(worker, actions, expected[worker])


def _worker_messages(worker: int, actions: tuple[Action, ...], expected: dict[Receive, Op]) -> Iterator[str]:
    """The same for one worker; ``expected`` has the op that needs each message."""
    computed = {action.op: index for index, action in enumerate(actions) if isinstance(action, Compute)}
    never = len(actions)
    received: set[Receive] = set()
    for index, message in _worker_traffic(actions):
        place = f"worker {worker}, action {index}: {message}"
        if isinstance(message, Send):
            if computed.get(message.output, never) > index:
                yield f"{place} comes before {message.output} is computed"
            continue
        if message in received:
            yield f"{place} is there more than once"
        received.add(message)
        user = expected.get(message)
        if user is None:
            yield f"{place}, which no op here needs"
        elif computed.get(user, never) < index:
            yield f"{place} is after {user}, which needs it"
    for message, user in expected.items():
        if message not in received:
            yield (
                f"worker {worker}: no receive of {named(message)} from worker {message.peer}, "
                f"which {user} needs"
            )


def _computes(subject: Subject) -> Iterator[str]:
    """Each worker computes its order, op by op."""
    program = subject.program
    assert program is not None
    for worker, (actions, order) in enumerate(zip(program.actions, subject.schedule.orders, strict=True)):
        computed = ((index, a.op) for index, a in enumerate(actions) if isinstance(a, Compute))
        for number, (found, op) in enumerate(zip_longest(computed, order)):
            if found is None:
                yield f"worker {worker}: op {number} of its order, {op}, is not computed"
                break
            if found[1] != op:
                expected = "nothing more" if op is None else str(op)
                yield f"worker {worker}, action {found[0]}: computes {found[1]}, its order has {expected}"
                break


def _versions(subject: Subject) -> Iterator[str]:
    program = subject.program
    assert program is not None
    for worker, actions in enumerate(program.actions):
        yield from _held_versions(subject.schedule, worker, actions)


def _promised_versions(subject: Subject) -> Iterator[str]:
    schedule = subject.schedule
    forward: dict[tuple[int, int, int], int] = {}
    for worker, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            place = f"worker {worker}, op {index}: {op}"
            promised = schedule.workload.version(op.stage, schedule.period_of(op))
            if promised is not None and op.version != promised:
                yield f"{place} uses version {op.version}, {schedule.scheme} promises {promised}"
            for m in op.micro_batches:
                first = forward.setdefault((op.pipe, op.stage, m), op.version)
                if first != op.version:
                    yield f"{place} uses version {op.version}, its forward used {first}"


def _held_versions(schedule: Schedule, worker: int, actions: tuple[Action, ...]) -> Iterator[str]:
    """Versions used before they are made or after they are freed; updates before their gradients."""
    held: dict[int, set[int]] = {stage: {0} for _, stage in schedule.placement.held(worker)}
    updates = dict.fromkeys(held, 0)
    left = Counter(
        (op.stage, schedule.period_of(op))
        for op in schedule.orders[worker]
        if Product.WEIGHT_GRADIENTS in op.kind.makes
    )
    for index, action in enumerate(actions):
        place = f"worker {worker}, action {index}: {action}"
        match action:
            case Compute(op):
                if op.version not in held[op.stage]:
                    shown = ", ".join(map(str, sorted(held[op.stage])))
                    yield f"{place}: version {op.version} of stage {op.stage} is not there, only {shown}"
                if Product.WEIGHT_GRADIENTS in op.kind.makes:
                    left[op.stage, schedule.period_of(op)] -= 1
            case Update(stage, version, frees):
                if version - 1 not in held[stage] or version in held[stage]:
                    yield f"{place}: expected an update of version {max(held[stage])}"
                if left[stage, version - 1]:
                    yield f"{place}: {left[stage, version - 1]} backwards of its period are still to come"
                held[stage].add(version)
                if not held[stage].issuperset(frees):
                    yield f"{place}: frees {frees}, of which some are not there"
                held[stage] -= set(frees)
                updates[stage] += 1
    for stage, made in updates.items():
        if made != schedule.periods:
            yield f"worker {worker}: {made} updates of stage {stage}, expected {schedule.periods}"


def _syncs(subject: Subject) -> Iterator[str]:
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
        mine: list[tuple[int, int]] = []
        yield from _worker_syncs(schedule, worker, actions, mine, wanted)
        started.append(mine)
        for stage, period in (key for key, holders in wanted.items() if worker in holders):
            if (stage, period) not in mine:
                yield (
                    f"worker {worker}: no gradient sync of its copy of stage {stage}, period {period} "
                    f"(copies on workers {', '.join(map(str, wanted[stage, period]))})"
                )
    yield from _sync_orders(started)


def _worker_syncs(
    schedule: Schedule,
    worker: int,
    actions: tuple[Action, ...],
    mine: list[tuple[int, int]],
    wanted: dict[tuple[int, int], tuple[int, ...]],
) -> Iterator[str]:
    """One worker's syncs: after its backwards, over all holders, waited for before the update."""
    waited: set[tuple[int, int]] = set()
    for index, action in enumerate(actions):
        place = f"worker {worker}, action {index}: {action}"
        match action:
            case Compute(op) if Product.WEIGHT_GRADIENTS in op.kind.makes:
                period = schedule.period_of(op)
                if (op.stage, period) in mine:
                    yield f"{place} comes after the start of the gradient sync of its stage"
                elif (op.stage, period - 1) in mine and (op.stage, period - 1) not in waited:
                    yield f"{place} needs the gradients whose sync is still going on"
            case StartSync(stage, period, workers, Summed.GRADIENTS):
                if (stage, period) in mine:
                    yield f"{place} is there more than once"
                if wanted.get((stage, period)) != workers:
                    yield (
                        f"{place}: over workers {workers}, copies are on {wanted.get((stage, period), ())}"
                    )
                mine.append((stage, period))
            case WaitSync(stage, period, _, Summed.GRADIENTS):
                if (stage, period) not in mine:
                    yield f"{place} comes before its start"
                waited.add((stage, period))
            case Update(stage, version, _):
                if (stage, version - 1) in wanted and (stage, version - 1) not in waited:
                    yield f"{place} comes before the wait for its gradient sync"


def _sync_orders(started: list[list[tuple[int, int]]]) -> Iterator[str]:
    """Pairs of workers that start the syncs they share in different orders."""
    for one, ours in enumerate(started):
        for other in range(one):
            theirs = started[other]
            shared = set(ours) & set(theirs)
            a, b = ([s for s in syncs if s in shared] for syncs in (theirs, ours))
            if a != b:
                yield f"workers {other} and {one} start their gradient syncs in different orders: {a}, {b}"


def _sums_in_one_order(subject: Subject) -> Iterator[str]:
    """Sets of workers whose members start the sums of the set, which share a communicator, in two orders."""
    program = subject.program
    assert program is not None
    started: dict[tuple[int, ...], dict[int, list[StartSync]]] = defaultdict(lambda: defaultdict(list))
    for worker, actions in enumerate(program.actions):
        for action in actions:
            if isinstance(action, StartSync):
                started[action.workers][worker].append(action)
    for workers, rows in started.items():
        first, *others = workers
        for other in others:
            for number, pair in enumerate(zip_longest(rows[first], rows[other])):
                if pair[0] != pair[1]:
                    shown = " and ".join(
                        f"{'none' if start is None else start} on worker {worker}"
                        for start, worker in zip(pair, (first, other), strict=True)
                    )
                    yield f"workers {', '.join(map(str, workers))}: sum {number} among them is {shown}"
                    break


def _agreed(subject: Subject) -> Iterator[str]:
    """Gathers of all workers in one order; if synchronous, sums of gradients before and updates after."""
    program = subject.program
    assert program is not None
    wanted = [action for action in program.actions[0] if isinstance(action, StartGather)]
    for worker, actions in enumerate(program.actions):
        found = [action for action in actions if isinstance(action, StartGather)]
        for number, (mine, first) in enumerate(zip_longest(found, wanted)):
            if mine != first:
                yield f"gather {number} is {mine or 'none'} on worker {worker}, {first or 'none'} on worker 0"
                break
        yield from _waited(worker, actions)
        if program.schedule.synchronous:
            yield from _flushed(program.schedule, worker, actions)


def _waited(worker: int, actions: Sequence[Action]) -> Iterator[str]:
    """Gathers are waited for in their order, sums at all only if they were started."""
    going: deque[StartGather] = deque()
    started = {action for action in actions if isinstance(action, StartSync)}
    for index, action in enumerate(actions):
        if isinstance(action, StartGather):
            going.append(action)
        elif isinstance(action, WaitGather):
            if not going or going.popleft() != action.start:
                yield f"worker {worker}, action {index}: {action} is not for the gather that is next"
        elif isinstance(action, WaitSync) and action.start not in started:
            yield f"worker {worker}, action {index}: {action} waits for what it never starts"
    for start in going:
        yield f"worker {worker}: {start} is never waited for"


def _flushed(schedule: Schedule, worker: int, actions: Sequence[Action]) -> Iterator[str]:
    """Loss and norm are reported once they are there; gradients are clipped after that, then updated with."""
    gathers = [(index, action) for index, action in enumerate(actions) if isinstance(action, WaitGather)]
    clips = [index for index, action in enumerate(actions) if isinstance(action, Clip | DropNonFinite)]
    losses, norms = sum(its.loss == 0 for _, its in gathers), sum(its.norm == 0 for _, its in gathers)
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
    """Whether gradients may not be all there before it."""
    if isinstance(action, StartSync | WaitSync):
        return action.what is not Summed.STATISTICS
    return isinstance(action, Compute)


def _gives_loss(schedule: Schedule, op: Op) -> bool:
    return op.kind.gives is Product.OUTPUT and op.stage == schedule.stages - 1


def _peak(subject: Subject) -> Iterator[str]:
    if subject.peak_limit is None:
        return
    for worker, order in enumerate(subject.schedule.orders):
        stashed = 0.0
        for index, op in enumerate(order):
            stashed += stash_change(op)
            if stashed > subject.peak_limit:
                yield (
                    f"worker {worker}, op {index}: {op} makes {stashed:g} stashed forwards, "
                    f"the limit is {subject.peak_limit:g}"
                )
                break


COMPLETE = Rule("every product exactly once", _complete)
PLACED = Rule("every op on the worker that holds its stage", _placed, (COMPLETE.name,))
FORWARD_FIRST = Rule(
    "forward before its backward", partial(_own_first, Product.OUTPUT), (COMPLETE.name, PLACED.name)
)
INPUT_GRADIENT_FIRST = Rule(
    "input gradient before its weight gradients",
    partial(_own_first, Product.INPUT_GRADIENT),
    (COMPLETE.name, PLACED.name),
)
DEADLOCK = Rule(
    "no deadlock with buffered sends", _no_deadlock, (COMPLETE.name, PLACED.name), error=DeadlockError
)
PROMISED = Rule("weight versions as promised", _promised_versions, (COMPLETE.name, PLACED.name))
_LOWERABLE = (
    COMPLETE.name,
    PLACED.name,
    FORWARD_FIRST.name,
    INPUT_GRADIENT_FIRST.name,
    PROMISED.name,
    DEADLOCK.name,
)
DEADLOCK_RENDEZVOUS = Rule(
    "no deadlock with rendezvous sends",
    _no_deadlock_rendezvous,
    _LOWERABLE,
    lowered=True,
    error=DeadlockError,
)
MESSAGES = Rule("every send has its receive, in one order", _messages, _LOWERABLE, lowered=True)
COMPUTES = Rule("each worker computes its order", _computes, _LOWERABLE, lowered=True)
POSTED = Rule(
    "no receive is posted before an op of its own worker that the message needs",
    _posted,
    (*_LOWERABLE, COMPUTES.name, MESSAGES.name),
    lowered=True,
)
DEADLOCK_HOLDING = Rule(
    "no deadlock with sends and receives that hold their worker",
    _no_deadlock_holding,
    (*_LOWERABLE, COMPUTES.name, DEADLOCK_RENDEZVOUS.name, MESSAGES.name, POSTED.name),
    lowered=True,
    error=DeadlockError,
)
VERSIONS = Rule(
    "weight versions made once, and held while needed", _versions, (*_LOWERABLE, COMPUTES.name), lowered=True
)
SYNCS = Rule("gradient sync covers every copy", _syncs, _LOWERABLE, lowered=True)
SUMS = Rule(
    "sums of the same workers start in one order",
    _sums_in_one_order,
    (*_LOWERABLE, SYNCS.name),
    lowered=True,
)
AGREED = Rule("loss and norm agreed on before any update", _agreed, _LOWERABLE, lowered=True)
PEAK = Rule("peak within the limit", _peak)

RULES = (
    COMPLETE,
    PLACED,
    FORWARD_FIRST,
    INPUT_GRADIENT_FIRST,
    PROMISED,
    DEADLOCK,
    COMPUTES,
    DEADLOCK_RENDEZVOUS,
    MESSAGES,
    POSTED,
    DEADLOCK_HOLDING,
    VERSIONS,
    SYNCS,
    SUMS,
    AGREED,
    PEAK,
)


def details(rule: Rule, subject: Subject) -> str:
    """The rule's violations as lines, the first few of them; empty if it holds."""
    lines: list[str] = []
    more = 0
    for violation in rule.violations(subject):
        if len(lines) < MOST_SHOWN:
            lines.append(violation)
        else:
            more += 1
    if more:
        lines.append(f"… and {more} more")
    return "\n".join(lines)


def require(subject: Subject, rules: Iterable[Rule]) -> None:
    """Raise the error of the first of ``rules`` that ``subject`` breaks.

    Raises:
        ScheduleError: or ``DeadlockError``, with the rule's name and its violations.
    """
    for rule in rules:
        detail = details(rule, subject)
        if detail:
            raise rule.error(f"{subject.schedule} breaks the rule '{rule.name}':\n{detail}")
