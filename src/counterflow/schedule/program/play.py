"""Playing action lists without time: who gets how far, and who waits for whom when all are stuck.

Whether a play gets stuck does not depend on how long actions take: an action that can happen stays
possible until it happens. So one play, in any order, decides for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..ir import Op
from .actions import Action, Agree, Compute, Exchange, Program, Receive, Send, StartSync, WaitSync

Event = tuple[str, Op | StartSync | int, int]
"""What an action can wait for: (kind, message, sum or period, worker that has to make it happen)."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that cannot go on: its action number ``index`` waits for something of ``waits_for``."""

    worker: int
    index: int
    reason: str
    waits_for: int


def play(program: Program, inputs: dict[Op, Op], *, rendezvous: bool) -> list[Stuck]:
    """Run all workers as far as they get; the stuck ones, none if the program ends.

    Args:
        program: one action list a worker.
        inputs: for each op that takes another op's output, that op.
        rendezvous: whether a send waits until its receive is posted; else sends are buffered.
    """
    lists = program.actions
    where = {
        action.op: worker
        for worker, actions in enumerate(lists)
        for action in actions
        if isinstance(action, Compute)
    }
    happened: set[Event] = set()
    waiting: dict[Event, list[int]] = defaultdict(list)
    position = [0] * len(lists)
    runnable = list(range(len(lists)))[::-1]
    while runnable:
        worker = runnable.pop()
        while position[worker] < len(lists[worker]):
            action = lists[worker][position[worker]]
            for made in _announces(action, worker):
                happened.add(made)
                runnable += waiting.pop(made, ())
            event = _blocker(
                action, worker, inputs, where, happened, rendezvous=rendezvous, workers=len(lists)
            )
            if event is not None:
                waiting[event].append(worker)
                break
            position[worker] += 1
            for made in _makes(action, worker):
                happened.add(made)
                runnable += waiting.pop(made, ())
    return [
        Stuck(workers, position[workers], _reason(event), event[2])
        for event, stuck in waiting.items()
        for workers in stuck
    ]


def _announces(action: Action, worker: int) -> tuple[Event, ...]:
    """What has happened once a worker comes to ``action``, even if it has to wait there."""
    match action:
        case Agree(period):
            return (("agreed", period, worker),)
        case Exchange(first, second):
            receive = first if isinstance(first, Receive) else second
            return (("posted", receive.output, worker),)
        case _:
            return ()


def _makes(action: Action, worker: int) -> tuple[Event, ...]:
    """What has happened once ``action`` is done."""
    match action:
        case Compute(op):
            return (("computed", op, worker),)
        case Receive(output, _):
            return (("posted", output, worker),)
        case Send(output, _):
            return (("sent", output, worker),)
        case Exchange(first, second):
            return (*_makes(first, worker), *_makes(second, worker))
        case StartSync():
            return (("started", action, worker),)
        case _:
            return ()


def _blocker(
    action: Action,
    worker: int,
    inputs: dict[Op, Op],
    where: dict[Op, int],
    happened: set[Event],
    *,
    rendezvous: bool,
    workers: int,
) -> Event | None:
    """The first thing that ``action`` waits for and that has not happened; None if it can go on."""
    needed: list[Event] = []
    match action:
        case Compute(op):
            source = inputs.get(op)
            if source is not None:
                holder = where.get(source, worker)
                needed.append(("computed" if holder == worker else "sent", source, holder))
        case Send(output, peer):
            if rendezvous:
                needed.append(("posted", output, peer))
        case Exchange(first, second):
            send = first if isinstance(first, Send) else second
            if rendezvous:
                needed.append(("posted", send.output, send.peer))
        case WaitSync():
            needed += [("started", action.start, member) for member in action.workers]
        case Agree(period):
            needed += [("agreed", period, member) for member in range(workers)]
        case _:
            pass
    return next((event for event in needed if event not in happened), None)


def _reason(event: Event) -> str:
    kind, what, worker = event
    match kind:
        case "started":
            return f"worker {worker} to {str(what).replace('StartSync', 'start the sum of', 1)}"
        case "agreed":
            return f"worker {worker} to come to the agreement of period {what}"
        case "posted":
            return f"worker {worker} to post the receive of {what}"
        case _:
            return f"worker {worker} to {'send' if kind == 'sent' else 'compute'} {what}"


def describe_circle(program: Program, stuck: list[Stuck]) -> str:
    """Who waits for whom, one line a worker, ending where it began."""
    by_worker = {s.worker: s for s in stuck}
    path: list[int] = []
    worker = stuck[0].worker
    while worker in by_worker and worker not in path:
        path.append(worker)
        worker = by_worker[worker].waits_for
    circle = path[path.index(worker) :] if worker in path else path
    lines = [
        f"  worker {s.worker}, action {s.index}: {program.actions[s.worker][s.index]} waits for {s.reason}"
        for s in (by_worker[w] for w in circle)
    ]
    if worker not in by_worker:
        lines.append(f"  worker {worker} has come to the end of its list")
    return "deadlock, the workers wait in a circle:\n" + "\n".join(lines)
