"""Rules of ops and messages in a program's lists: what is computed, sent and received, and that all lists
end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from operator import itemgetter

from counterflow.errors import DeadlockError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op

from ..action_lists import circle
from ..actions import Action, Compute, Matching, Message, Program, Receive, Send, named
from ..lists import earliest, ops_before
from ..pairs import paired_ops
from .subject import CheckSubject


def no_deadlock(subject: CheckSubject) -> Iterator[str]:
    """The circle in which workers wait for each other if sends are buffered."""
    graph = subject.needed_graph()
    try:
        earliest(graph, [1] * len(graph.ops))
    except DeadlockError as error:
        yield str(error)
        return
    if subject.program is not None:
        yield from _stuck(subject, subject.program, rendezvous=False)


def no_deadlock_rendezvous(subject: CheckSubject) -> Iterator[str]:
    """The circle in which workers wait for each other if a send waits until its receive is posted."""
    assert subject.program is not None
    yield from _stuck(subject, subject.program, rendezvous=True)


def no_deadlock_holding(subject: CheckSubject) -> Iterator[str]:
    """The circle in which workers wait for each other if receives block as well and messages match by
    order.
    """
    program = subject.program
    assert program is not None
    if program.matching is Matching.ORDER:  # matched by tag, messages block no device
        yield from _stuck(subject, program, rendezvous=True, holding=True)


def _stuck(
    subject: CheckSubject, program: Program, *, rendezvous: bool, holding: bool = False
) -> Iterator[str]:
    deadlock = circle(program, subject.needed_graph(), rendezvous=rendezvous, holding=holding)
    if deadlock is not None:
        yield deadlock


def posted(subject: CheckSubject) -> Iterator[str]:
    """Receives that are posted before an op of their own worker without which their message is never made."""
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


def messages(subject: CheckSubject) -> Iterator[str]:
    """Messages that the two workers have in different orders, or that are in an impossible place."""
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
    for low, high in sorted({(min(pair), max(pair)) for pair in traffic}):
        sent_low, sent_high = traffic[low, high], traffic[high, low]
        if program.matching is Matching.TAG:
            sent_low, sent_high = (sorted(messages, key=itemgetter(1)) for messages in (sent_low, sent_high))
        for number, (first, second) in enumerate(zip_longest(sent_low, sent_high)):
            if first is None or second is None or first[1] != second[1]:
                yield (
                    f"workers {low} and {high}: message {number} between them is "
                    f"{_message(first)} on worker {low}, but {_message(second)} on worker {high}"
                )
                break
    yield from _message_places(program, subject.needed_graph())


def _message(message: tuple[int, str] | None) -> str:
    return "none" if message is None else f"{message[1]} (action {message[0]})"


def _worker_traffic(actions: Iterable[Action]) -> Iterator[tuple[int, Message]]:
    for index, action in enumerate(actions):
        if isinstance(action, Send | Receive):
            yield index, action


def _message_places(program: Program, graph: OpGraph) -> Iterator[str]:
    expected: list[dict[Receive, Op]] = [{} for _ in program.actions]
    for source, target, skip in graph.messages:
        message = Receive(graph.ops[source], graph.worker[source], skip)
        expected[graph.worker[target]][message] = graph.ops[target]
    for worker, actions in enumerate(program.actions):
        yield from _worker_messages(worker, actions, expected[worker])


def _worker_messages(worker: int, actions: tuple[Action, ...], expected: dict[Receive, Op]) -> Iterator[str]:
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
            yield f"{place} exists more than once"
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


def computes(subject: CheckSubject) -> Iterator[str]:
    """Differences between the ops that a worker computes and its order."""
    program = subject.program
    assert program is not None
    for worker, (actions, order) in enumerate(zip(program.actions, subject.schedule.orders, strict=True)):
        computed = ((index, a.op) for index, a in enumerate(actions) if isinstance(a, Compute))
        for number, (action, op) in enumerate(zip_longest(computed, order)):
            if action is None:
                yield f"worker {worker}: op {number} of its order, {op}, is not computed"
                break
            if action[1] != op:
                expected = "nothing more" if op is None else str(op)
                yield f"worker {worker}, action {action[0]}: computes {action[1]}, its order has {expected}"
                break


def computes_pairs(subject: CheckSubject) -> Iterator[str]:
    """Actions within a pair of the schedule, and pairs that it does not have."""
    program = subject.program
    assert program is not None
    for worker, (actions, pairs) in enumerate(
        zip(program.actions, paired_ops(subject.schedule), strict=True)
    ):
        expected = {pair[0]: pair for pair in pairs}
        for index, action in enumerate(actions):
            if not isinstance(action, Compute) or not (action.pair or action.op in expected):
                continue
            place = f"worker {worker}, action {index}: {action}"
            pair = expected.get(action.op, ())
            if action.pair != pair:
                yield f"{place}, but the schedule runs {', '.join(map(str, pair or (action.op,)))} at once"
            followers = actions[index : index + len(pair)]
            if [a.op for a in followers if isinstance(a, Compute)] != [*pair]:
                yield f"{place}; another action is among the ops that run at once"
