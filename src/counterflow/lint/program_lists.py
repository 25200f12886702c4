"""Programs of this library as lists of calls."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.program.actions import Compute, Program, Receive, Send, named
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op
from counterflow.schedule.op import OpKind

from .calls import CallLists, CallSide, CallStep, CommunicatorScope, Part

FORM = "a program of Counterflow"

_SECONDS = {OpKind.BACKWARD: 2.0}
"""Duration of ops that do not last a forward's time."""


def program_lists(
    program: Program, graph: OpGraph, communicators: CommunicatorScope = CommunicatorScope.EDGE
) -> CallLists:
    """The computes, sends and receives of a program, as its workers execute them.

    Args:
        program: one action list per worker.
        graph: graph of its schedule.
        communicators: the communicators; the engine has one for a sender and a receiver.
    """
    inputs: dict[Op, list[str]] = {}
    for source, target, skip in graph.messages:
        message = named(Receive(graph.ops[source], graph.worker[source], skip))
        inputs.setdefault(graph.ops[target], []).append(message)
    rows = (_steps(program, worker, inputs, communicators) for worker in range(len(program.actions)))
    return CallLists(tuple(map(tuple, rows)), FORM)


def _steps(
    program: Program, worker: int, inputs: dict[Op, list[str]], communicators: CommunicatorScope
) -> Iterator[CallStep]:
    steps = [a for a in program.actions[worker] if isinstance(a, Compute | Send | Receive)]
    receives = {named(action): number for number, action in enumerate(steps) if isinstance(action, Receive)}
    computes = {action.op: number for number, action in enumerate(steps) if isinstance(action, Compute)}
    number = 0
    for index, action in enumerate(program.actions[worker]):
        place = f"worker {worker}, action {index}"
        if isinstance(action, Compute):
            ops = action.pair or (action.op,)
            needs = [receives[name] for op in ops for name in inputs.get(op, ()) if name in receives]
            seconds = _SECONDS.get(action.op.kind, 1.0)
            yield CallStep(number, str(action.op), needs=tuple(sorted(needs)), seconds=seconds, place=place)
        elif isinstance(action, Send):
            part = Part(
                CallSide.SEND, action.peer, named(action), communicators.of_message(worker, action.peer)
            )
            yield CallStep(number, f"send {named(action)}", (part,), (computes[action.output],), place=place)
        elif isinstance(action, Receive):
            name = communicators.of_message(action.peer, worker)
            part = Part(CallSide.RECEIVE, action.peer, named(action), name)
            yield CallStep(number, f"receive {named(action)}", (part,), place=place)
        else:
            continue
        number += 1
