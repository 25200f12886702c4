"""Playing action lists without time: who gets how far, and who waits for whom when all are stuck.

Whether a play gets stuck does not depend on how long actions take: an action that can happen stays
possible until it happens. So one play, in any order, decides for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .actions import (
    Action,
    Backward,
    Forward,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    StartGradientSync,
    WaitGradientSync,
)
from .ir import Op

Event = tuple[str, Op | tuple[int, int], int]
"""What an action can wait for: (kind, message or (stage, period), worker that has to make it happen)."""


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
        if isinstance(action, (Forward, Backward))
    }
    happened: set[Event] = set()
    waiting: dict[Event, list[int]] = defaultdict(list)
    position = [0] * len(lists)
    runnable = list(range(len(lists)))[::-1]
    while runnable:
        worker = runnable.pop()
        while position[worker] < len(lists[worker]):
            action = lists[worker][position[worker]]
            event = _blocker(action, worker, inputs, where, happened, rendezvous=rendezvous)
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


def _makes(action: Action, worker: int) -> tuple[Event, ...]:
    """What has happened once ``action`` is done."""
    match action:
        case Forward(op) | Backward(op):
            return (("computed", op, worker),)
        case ReceiveActivation(output, _) | ReceiveGradient(output, _):
            return (("posted", output, worker),)
        case SendActivation(output, _) | SendGradient(output, _):
            return (("sent", output, worker),)
        case StartGradientSync(stage, period, _):
            return (("started", (stage, period), worker),)
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
) -> Event | None:
    """The first thing that ``action`` waits for and that has not happened; None if it can go on."""
    needed: list[Event] = []
    match action:
        case Forward(op) | Backward(op):
            source = inputs.get(op)
            if source is not None:
                holder = where.get(source, worker)
                needed.append(("computed" if holder == worker else "sent", source, holder))
        case SendActivation(output, peer) | SendGradient(output, peer):
            if rendezvous:
                needed.append(("posted", output, peer))
        case WaitGradientSync(stage, period, workers):
            needed += [("started", (stage, period), member) for member in workers]
        case _:
            pass
    return next((event for event in needed if event not in happened), None)


def _reason(event: Event) -> str:
    kind, what, worker = event
    if kind == "started":
        assert isinstance(what, tuple)
        return f"worker {worker} to start the gradient sync of stage {what[0]}, period {what[1]}"
    if kind == "posted":
        return f"worker {worker} to post the receive of {what}"
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
