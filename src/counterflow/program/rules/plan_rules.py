"""Rules of the communication plan, which read the lists and the plan, not the code that makes plans.

Only where a plan claims that all colourings were searched, the search runs again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from counterflow.schedule.graph import OpGraph

from ..actions import Compute, Receive, Send, named
from ..communication.link_rounds import search
from .subject import CheckSubject


def buffers(subject: CheckSubject) -> Iterator[str]:
    """Receives into a buffer that is in use, and workers with more buffers than messages in use at once."""
    program, plan = subject.program, subject.needed_plan()
    assert program is not None
    graph = subject.needed_graph()
    users = _users_by_receive(graph)
    for worker, (actions, table) in enumerate(zip(program.actions, plan.buffers, strict=True)):
        slots = iter(table.slots)
        remaining: dict[Receive, int] = {}
        """Number of ops that use each message in use and have not run."""
        used_by: defaultdict[int, list[Receive]] = defaultdict(list)
        contents: defaultdict[int, list[Receive]] = defaultdict(list)
        most, node = 0, graph.first[worker]
        for index, action in enumerate(actions):
            if isinstance(action, Compute):
                for receive in used_by[node]:
                    remaining[receive] -= 1
                    if not remaining[receive]:
                        del remaining[receive]
                node += 1
            elif isinstance(action, Receive):
                place, slot = f"worker {worker}, action {index}: {action}", next(slots, None)
                if slot is None:
                    yield f"{place} has no buffer"
                    break
                contents[slot] = [receive for receive in contents[slot] if receive in remaining]
                for receive in contents[slot]:
                    yield f"{place} uses buffer {slot}, which still contains {named(receive)}"
                contents[slot].append(action)
                for user in users[worker, action]:
                    used_by[user].append(action)
                remaining[action] = len(users[worker, action])
                most = max(most, len(remaining))
        count = len({*table.slots})
        if count > most:
            yield f"worker {worker}: {count} receive buffers, but at most {most} messages are in use at once"


def communicators(subject: CheckSubject) -> Iterator[str]:
    """Links without a communicator, workers twice in a round, and more rounds than the plan proves."""
    program, plan = subject.program, subject.needed_plan().communicators
    assert program is not None
    sends = enumerate(program.actions)
    links = {(worker, a.peer) for worker, actions in sends for a in actions if isinstance(a, Send)}
    round_of: dict[tuple[int, int], int] = {}
    for number, row in enumerate(plan.rounds):
        busy: dict[int, tuple[int, int]] = {}
        for link in row:
            place = f"round {number}: the communicator from worker {link[0]} to {link[1]}"
            if link not in links:
                yield f"{place}, which no message uses"
            if link in round_of:
                yield f"{place} exists since round {round_of[link]}"
            round_of.setdefault(link, number)
            for worker in link:
                if worker in busy:
                    yield f"{place} is made with worker {worker} at the same time as that of {busy[worker]}"
                busy[worker] = link
    for link in sorted(links - {*round_of}):
        yield f"no round makes the communicator from worker {link[0]} to {link[1]}"
    if plan.proof:
        if not {*plan.proof} <= links or len({*plan.proof}) < len(plan.proof):
            yield "the proof counts links that do not exist, or one twice"
        elif plan.bound < len(plan.rounds):
            yield f"{len(plan.rounds)} rounds, but the proof shows that only {plan.bound} are necessary"
    elif plan.proved and len(plan.rounds) > 1 and search(sorted(links), len(plan.rounds) - 1)[0]:
        yield f"{len(plan.rounds)} rounds, but {len(plan.rounds) - 1} suffice"


def _users_by_receive(graph: OpGraph) -> dict[tuple[int, Receive], set[int]]:
    further: defaultdict[int, list[int]] = defaultdict(list)
    """For each node, the nodes of its stage that need it, except those of other slices."""
    sliced = graph.schedule.workload.slices > 1
    for node, needed in enumerate(graph.needs):
        op = graph.ops[node]
        for source in needed:
            before = graph.ops[source]
            if (
                before.stage == op.stage
                and before.kind is not op.kind
                and (before.part == op.part or not sliced)
            ):
                further[source].append(node)
    users: dict[tuple[int, Receive], set[int]] = {}
    for source, target, skip in graph.messages:
        reached, queue = set[int](), [target]
        if skip is not None and skip.once:
            pipe = graph.ops[target].pipe
            queue = [n for n, op in enumerate(graph.ops) if (op.pipe, op.stage) == (pipe, skip.target)]
        while queue:
            node = queue.pop()
            if node not in reached:
                reached.add(node)
                queue += further[node]
        users[graph.worker[target], Receive(graph.ops[source], graph.worker[source], skip)] = reached
    return users
