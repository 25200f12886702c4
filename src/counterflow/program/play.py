"""Playing action lists without time: who gets how far, and who waits for whom when all are stuck.

Whether a play gets stuck does not depend on how long actions take: an action that can happen stays
possible until it happens. So one play, in any order, decides for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from counterflow.schedule.ir import Op
from counterflow.schedule.workload import SkipLink

from .actions import (
    Action,
    Compute,
    Program,
    Receive,
    Send,
    StartGather,
    StartSync,
    WaitGather,
    WaitSync,
)

Made = tuple[Op, SkipLink | None]
"""What an op makes: for the stage before or after, or for the other end of a skip."""

Event = tuple[str, Made | StartSync | StartGather, int]
"""What an action can wait for: (kind, message, sum or gather, worker that has to make it happen)."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that cannot go on: its action number ``index`` waits for something of ``waits_for``."""

    worker: int
    index: int
    reason: str
    waits_for: int


def play(
    program: Program, inputs: Mapping[Op, Sequence[Made]], *, rendezvous: bool, holding: bool = False
) -> list[Stuck]:
    """Run all workers as far as they get; the stuck ones, none if the program ends.

    Args:
        program: one action list a worker.
        inputs: for each op that takes something from other ops, what it takes.
        rendezvous: whether a send waits until its receive is posted; else sends are buffered.
        holding: whether a receive waits where it is posted until its message is sent; else the op waits that
            needs it.
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
            needed = _needed(
                action, worker, inputs, where, rendezvous=rendezvous, holding=holding, workers=len(lists)
            )
            event = next((event for event in needed if event not in happened), None)
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
        case Receive(output, _, skip):
            return (("posted", (output, skip), worker),)
        case _:
            return ()


def _makes(action: Action, worker: int) -> tuple[Event, ...]:
    """What has happened once ``action`` is done."""
    match action:
        case Compute(op):
            return (("computed", (op, None), worker),)
        case Send(output, _, skip):
            return (("sent", (output, skip), worker),)
        case StartSync() | StartGather():
            return (("started", action, worker),)
        case _:
            return ()


def _needed(
    action: Action,
    worker: int,
    inputs: Mapping[Op, Sequence[Made]],
    where: dict[Op, int],
    *,
    rendezvous: bool,
    holding: bool,
    workers: int,
) -> list[Event]:
    """What has to happen before ``action`` can go on."""
    needed: list[Event] = []
    match action:
        case Compute(op):
            for source, skip in inputs.get(op, ()):
                holder = where.get(source, worker)
                local = holder == worker
                needed.append(
                    ("computed", (source, None), holder) if local else ("sent", (source, skip), holder)
                )
        case Send(output, peer, skip):
            if rendezvous:
                needed.append(("posted", (output, skip), peer))
        case Receive(output, peer, skip):
            if holding:
                needed.append(("sent", (output, skip), peer))
        case WaitSync():
            needed += [("started", action.start, member) for member in action.workers]
        case WaitGather():
            needed += [("started", action.start, member) for member in range(workers)]
        case _:
            pass
    return needed


def _reason(event: Event) -> str:
    kind, what, worker = event
    if isinstance(what, tuple):
        op, skip = what
        made = str(op) if skip is None else f"{op} by the skip {skip}"
        does = {"posted": "post the receive of", "sent": "send", "computed": "compute"}[kind]
        return f"worker {worker} to {does} {made}"
    begun = (
        str(what).replace("StartSync", "start the sum of", 1).replace("StartGather", "start the gather of", 1)
    )
    return f"worker {worker} to {begun}"


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
