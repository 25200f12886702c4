"""Receive buffers by message: slots by liveness, as few as messages in use at once.

A message's buffer lives from the action that posts its receive to the end of the last op that uses it: of an
output all ops of its stage on its micro-batches, since graphs save inputs; of a gradient the ops that make
gradients of it. Lives are intervals of the worker's list, so colouring them in the order of their starts
needs as many slots as lives that overlap at one place (Golumbic, Algorithmic Graph Theory, chapter 8).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, Product
from counterflow.schedule.workload import SkipLink

from ..actions import Compute, Program, Receive


class Lifetime(NamedTuple):
    """Life of a message in its receiver's list.

    Attributes:
        receive: the receive that is posted.
        start: index of its action.
        needed: index of the action of the first op that uses the message.
        end: index of the action of the last one.
    """

    receive: Receive
    start: int
    needed: int
    end: int


@dataclass(frozen=True, slots=True)
class BufferTable:
    """Receive buffers of one worker, for messages of equal sizes.

    Attributes:
        lifetimes: its receives in the order of their starts.
        slots: the buffer of each.
        peak: index of the action at which most are in use; None: nothing is received.
        in_use: the messages in use there, which no table can go below.
    """

    lifetimes: tuple[Lifetime, ...]
    slots: tuple[int, ...]
    peak: int | None
    in_use: int

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len({*self.slots})


def lifetimes(program: Program, worker: int, graph: OpGraph | None = None) -> tuple[Lifetime, ...]:
    """Lives of the messages that a worker receives, in the order of its list.

    Args:
        program: one action list per worker.
        worker: the receiver.
        graph: graph of its schedule, if it was made already.

    >>> from counterflow.program.lowering import lower
    >>> from counterflow.schedule.schemes import dapple
    >>> for life in lifetimes(lower(dapple(stages=2, micro_batches=2)), 1):
    ...     print(life.receive, *life[1:])
    ReceiveActivation F0.0 from worker 0 0 1 3
    ReceiveActivation F1.0 from worker 0 2 5 6
    """
    graph = OpGraph(program.schedule) if graph is None else graph
    users = {
        (graph.ops[source], skip): graph.ops[target]
        for source, target, skip in graph.messages
        if graph.worker[target] == worker
    }
    actions = program.actions[worker]
    ops: defaultdict[tuple[int, int, int], list[tuple[int, Op]]] = defaultdict(list)
    last: dict[int, int] = {}
    computed: dict[Op, int] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Compute):
            computed[action.op] = index
            last[action.op.stage] = index
            for micro_batch in action.op.micro_batches:
                ops[action.op.pipe, action.op.stage, micro_batch].append((index, action.op))
    return tuple(
        Lifetime(
            action,
            index,
            computed[users[action.output, action.skip]],
            _end(action, users, ops, last, sliced=program.schedule.workload.slices > 1),
        )
        for index, action in enumerate(actions)
        if isinstance(action, Receive)
    )


def _end(
    receive: Receive,
    users: dict[tuple[Op, SkipLink | None], Op],
    ops: dict[tuple[int, int, int], list[tuple[int, Op]]],
    last: dict[int, int],
    *,
    sliced: bool,
) -> int:
    user = users[receive.output, receive.skip]
    if receive.skip is not None and receive.skip.once:  # all micro-batches use it
        return last[user.stage]
    forward = receive.output.kind.gives is Product.OUTPUT
    return max(
        index
        for micro_batch in user.micro_batches
        for index, op in ops[user.pipe, user.stage, micro_batch]
        if (forward or not op.kind.is_forward) and ((forward and not sliced) or op.part == user.part)
    )


def colour(lives: Sequence[Lifetime]) -> BufferTable:
    """Buffers for some lives: a buffer is added only where all are in use, so there are no fewer.

    Args:
        lives: lives in the order of their starts.
    """
    free: deque[int] = deque()
    used: list[tuple[int, int]] = []
    slots: list[int] = []
    for _, start, _, end in lives:
        while used and used[0][0] < start:
            free.append(heappop(used)[1])
        slots.append(free.popleft() if free else len(used))
        heappush(used, (end, slots[-1]))
    peak, in_use = most_in_use(lives, (1,) * len(lives))
    return BufferTable(tuple(lives), tuple(slots), peak, in_use)


def most_in_use(lives: Sequence[Lifetime], sizes: Sequence[int]) -> tuple[int | None, int]:
    """The action at which most is in use, and the size of all messages in use there."""
    used: list[tuple[int, int]] = []
    in_use = most = 0
    peak = None
    for (_, start, _, end), size in zip(lives, sizes, strict=True):
        while used and used[0][0] < start:
            in_use -= heappop(used)[1]
        heappush(used, (end, size))
        in_use += size
        if in_use > most:
            peak, most = start, in_use
    return peak, most
