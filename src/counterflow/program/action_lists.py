"""A program's lists for the player: actions, the messages between them, and sums and gathers that overlap.

Each worker's list has a node where it computes, and one where it waits: for a sum or a gather, and on request
for the other side of a message. A sum or gather is a list of its own with one node, which begins when all its
members have started their parts. Whether a play gets stuck does not depend on how long actions take: one that
can happen stays possible until it happens. So one play, in any order, decides for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from counterflow.schedule.graph import OpGraph
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
from .lists import instant, played
from .player import ListArrays

Start = StartSync | StartGather
Output = tuple[Op, SkipLink | None]
"""What an op makes: a value for the stage before or after, or for the other end of a skip connection."""

Event = tuple[str, Output | Start, int]
"""An event that an action can wait for: what happens, to what, and the worker that makes it happen."""


@dataclass(frozen=True, slots=True)
class ActionLists:
    """The lists of a program.

    Attributes:
        program: the program.
        lists: the lists to play: one per worker, then one per sum or gather.
        actions: for each node, the number of its action in its worker's list.
        events: the event of each message.
        starts: the action that starts each sum and gather, in the order of their lists.
    """

    program: Program
    lists: ListArrays
    actions: list[int]
    events: list[Event]
    starts: list[Start]


@dataclass(slots=True)
class _List:
    actions: list[int] = field(default_factory=list)
    takes: list[list[Event]] = field(default_factory=list)
    makes: list[list[Event]] = field(default_factory=list)

    def node(self, action: int, takes: Iterable[Event]) -> None:
        self.actions.append(action)
        self.takes.append(list(takes))
        self.makes.append([])

    def make(self, event: Event, action: int) -> None:
        """Let an event happen as soon as all nodes before it have ended."""
        if not self.actions:
            self.node(action, ())
        self.makes[-1].append(event)


class _ListWriter:
    def __init__(self, program: Program, graph: OpGraph, *, rendezvous: bool, holding: bool) -> None:
        self.rendezvous, self.holding = rendezvous, holding
        self.inputs = _inputs_by_op(graph)
        self.holders = {
            action.op: worker
            for worker, actions in enumerate(program.actions)
            for action in actions
            if isinstance(action, Compute)
        }
        self.waiting: dict[Start, list[int]] = {}
        """For each sum and gather, the workers that wait for it."""
        self.rows = [self._worker(worker, actions) for worker, actions in enumerate(program.actions)]

    def _worker(self, worker: int, actions: Sequence[Action]) -> _List:
        row = _List()
        computed: set[Op] = set()
        paired: set[Op] = set()
        """Ops of pairs, of which the first one takes the inputs of all."""
        for index, action in enumerate(actions):
            match action:
                case Compute(op, pair):
                    ops = () if op in paired else pair or (op,)
                    paired.update(pair)
                    row.node(index, [event for o in ops for event in self._takes(o, worker, computed)])
                    row.make(("computed", (op, None), worker), index)
                    computed.add(op)
                case Send(output, peer, skip):
                    if self.rendezvous:
                        row.node(index, [("posted", (output, skip), peer)])
                    row.make(("sent", (output, skip), worker), index)
                case Receive(output, peer, skip):
                    row.make(("posted", (output, skip), worker), index)
                    if self.holding:
                        row.node(index, [("sent", (output, skip), peer)])
                case StartSync() | StartGather():
                    row.make(("started", action, worker), index)
                    self.waiting.setdefault(action, [])
                case WaitSync() | WaitGather():
                    row.node(index, [("ended", action.start, worker)])
                    self.waiting.setdefault(action.start, []).append(worker)
                case _:
                    pass
        return row

    def _takes(self, op: Op, worker: int, computed: set[Op]) -> Iterator[Event]:
        for source, skip in self.inputs.get(op, ()):
            holder = self.holders.get(source, worker)
            if holder != worker:
                yield "sent", (source, skip), holder
            elif source not in computed:
                yield "computed", (source, None), worker


def action_lists(
    program: Program,
    graph: OpGraph,
    *,
    rendezvous: bool = False,
    holding: bool = False,
    one_at_a_time: bool = False,
) -> ActionLists:
    """The lists of a program.

    Args:
        program: one action list per worker.
        graph: graph of its schedule.
        rendezvous: whether a send waits until its receive is posted; otherwise sends are buffered.
        holding: whether a posted receive waits until its message is sent; otherwise the op that needs the
            message waits.
        one_at_a_time: whether a worker's sums run one after another, in the order in which it starts them.
    """
    written = _ListWriter(program, graph, rendezvous=rendezvous, holding=holding)
    starts = list(written.waiting)
    follow: list[tuple[Start, Start]] = []
    if one_at_a_time:
        for actions in program.actions:
            follow += pairwise(action for action in actions if isinstance(action, StartSync))
    number = {start: number for number, start in enumerate(starts)}
    follow = list(dict.fromkeys(follow))
    for start, workers in written.waiting.items():
        members = start.workers if isinstance(start, StartSync) else range(len(program.actions))
        takes: list[Event] = [("started", start, member) for member in members]
        takes += [
            ("followed", start_before, number[start]) for start_before, after in follow if after == start
        ]
        row = _List()
        row.node(0, takes)
        row.makes[0] += [("ended", start, worker) for worker in workers]
        row.makes[0] += [
            ("followed", start, number[after]) for start_before, after in follow if start_before == start
        ]
        written.rows.append(row)
    return _numbered(program, written.rows, starts)


def _inputs_by_op(graph: OpGraph) -> dict[Op, list[Output]]:
    inputs: dict[Op, list[Output]] = {
        graph.ops[node]: [(graph.ops[source], None)]
        for node, source in enumerate(graph.source)
        if source is not None
    }
    for source, node, skip in graph.messages:
        if skip is not None:
            inputs[graph.ops[node]].append((graph.ops[source], skip))
    return inputs


def _numbered(program: Program, rows: Sequence[_List], starts: list[Start]) -> ActionLists:
    first = np.cumsum([0, *(len(row.actions) for row in rows)])
    takers: dict[Event, int] = {}
    for number, row in enumerate(rows):
        takers |= {event: number for takes in row.takes for event in takes}
    makers: dict[Event, int] = {}
    node = 0
    for row in rows:
        for makes in row.makes:
            for event in makes:
                if event in takers:  # an event that nobody waits for is not a message
                    makers.setdefault(event, node)
            node += 1
    events = [*makers, *(event for event in takers if event not in makers)]
    message = {event: number for number, event in enumerate(events)}
    inputs = [[message[event] for event in takes] for row in rows for takes in row.takes]
    lists = ListArrays(
        first=first,
        takes=np.cumsum([0, *map(len, inputs)]),
        inputs=np.array([number for takes in inputs for number in takes], dtype=np.int64),
        outputs=np.searchsorted(np.array(list(makers.values()), dtype=np.int64), np.arange(node + 1)),
        receivers=np.array([takers[event] for event in events], dtype=np.int64),
    )
    return ActionLists(program, lists, [index for row in rows for index in row.actions], events, starts)


def circle(program: Program, graph: OpGraph, *, rendezvous: bool, holding: bool = False) -> str | None:
    """The workers that wait for each other, one line per worker, if the lists do not end; None if they do.

    Args:
        program: one action list per worker.
        graph: graph of its schedule.
        rendezvous: as in ``action_lists``.
        holding: as in ``action_lists``.
    """
    written = action_lists(program, graph, rendezvous=rendezvous, holding=holding)
    times = played(written.lists, instant(written.lists))
    workers = len(program.actions)
    heads: dict[int, tuple[int, Event]] = {}
    for waiting in times.stuck(written.lists):
        if waiting < workers:
            what, about, _ = event = written.events[times.waits[waiting]]
            if what == "ended":  # the list waits for a member that does not start its part
                event = written.events[times.waits[workers + written.starts.index(about)]]
            heads[waiting] = written.actions[times.head[waiting]], event
    return _described(program, heads) if heads else None


def _described(program: Program, heads: dict[int, tuple[int, Event]]) -> str:
    path: list[int] = []
    worker = min(heads)
    while worker in heads and worker not in path:
        path.append(worker)
        worker = heads[worker][1][2]
    lines = []
    for w in path[path.index(worker) :] if worker in path else path:
        index, event = heads[w]
        lines.append(f"  worker {w}, action {index}: {program.actions[w][index]} waits for {_reason(event)}")
    if worker not in heads:
        lines.append(f"  worker {worker} has reached the end of its list")
    return "deadlock, the workers wait in a circle:\n" + "\n".join(lines)


def _reason(event: Event) -> str:
    what, about, worker = event
    if isinstance(about, tuple):
        op, skip = about
        product = str(op) if skip is None else f"{op} by the skip connection {skip}"
        does = {"posted": "post the receive of", "sent": "send", "computed": "compute"}[what]
        return f"worker {worker} to {does} {product}"
    begun = str(about)
    for kind, said in (("StartSync", "start the sum of"), ("StartGather", "start the gather of")):
        begun = begun.replace(kind, said, 1)
    return f"worker {worker} to {begun}"
