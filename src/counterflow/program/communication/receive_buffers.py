"""Receive buffers by message: slots by liveness, as few as messages in use at once.

A message's buffer lives from the action that posts its receive to the end of the last op that uses it: of an
output all ops of its stage on its micro-batches, since graphs save inputs; of a gradient the ops that make
gradients of it. Lives are intervals of the worker's list, so colouring them in the order of their starts
needs as many slots as lives that overlap at one place (Golumbic, Algorithmic Graph Theory, chapter 8).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
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
    """Receive buffers of one worker.

    Attributes:
        lifetimes: its receives in the order of their starts.
        slots: the buffer of each.
        sizes: size of each buffer: that of its largest message.
        peak: index of the action at which most is in use; None: nothing is received.
        in_use: the size of all messages in use there, which no table can go below.
    """

    lifetimes: tuple[Lifetime, ...]
    slots: tuple[int, ...]
    sizes: tuple[float, ...]
    peak: int | None
    in_use: float

    @property
    def size(self) -> float:
        """Size of all buffers."""
        return sum(self.sizes)


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


def colour(
    lives: Sequence[Lifetime], sizes: Sequence[float] = (), kinds: Sequence[Hashable] = ()
) -> BufferTable:
    """Buffers for some lives.

    Larger messages are assigned first, those of one size in the order of their starts, each to the smallest
    buffer that is free while it lives. If all sizes and kinds are equal, a buffer is added only where all are
    in use, so there are no fewer. Of equal buffers the one that is free for the longest time is taken, or the
    one for the shortest, whichever way needs less memory: with unequal sizes this is a heuristic.

    Args:
        lives: lives in the order of their starts.
        sizes: size of each message; default: 1 each.
        kinds: kind of each message: only those of equal kinds share buffers; default: all are equal.
    """
    sizes = sizes or (1.0,) * len(lives)
    kinds = kinds or (None,) * len(lives)
    if len({*zip(sizes, kinds, strict=True)}) <= 1:
        slots = _equal_size_slots(lives)
        buffer_sizes = tuple(sizes[:1]) * len({*slots})
    else:
        tables = (_assigned(lives, sizes, kinds, prefer) for prefer in (1, -1))
        slots, buffers = min(tables, key=lambda table: sum(buffer.size for buffer in table[1]))
        buffer_sizes = tuple(buffer.size for buffer in buffers)
    return BufferTable(tuple(lives), tuple(slots), buffer_sizes, *_peak_action_and_size(lives, sizes))


def _equal_size_slots(lives: Sequence[Lifetime]) -> list[int]:
    free: deque[int] = deque()
    used: list[tuple[int, int]] = []
    slots: list[int] = []
    for _, start, _, end in lives:
        while used and used[0][0] < start:
            free.append(heappop(used)[1])
        slots.append(free.popleft() if free else len(used))
        heappush(used, (end, slots[-1]))
    return slots


def _assigned(
    lives: Sequence[Lifetime], sizes: Sequence[float], kinds: Sequence[Hashable], prefer: int
) -> tuple[list[int], list[_Buffer]]:
    # prefer: 1, the buffer that is free for the longest time; -1, for the shortest
    slots = [0] * len(lives)
    buffers: list[_Buffer] = []
    for number in sorted(range(len(lives)), key=lambda number: -sizes[number]):
        life, kind = lives[number], kinds[number]
        fitting = [
            (buffer.size, prefer * before, slot)
            for slot, buffer in enumerate(buffers)
            if buffer.kind == kind and (before := buffer.free_since(life)) is not None
        ]
        if fitting:
            _, _, slots[number] = min(fitting)
        else:
            slots[number] = len(buffers)
            buffers.append(_Buffer(sizes[number], kind))
        buffers[slots[number]].add(life)
    return slots, buffers


class _Buffer:
    def __init__(self, size: float, kind: Hashable) -> None:
        self.size, self.kind = size, kind
        self._starts: list[int] = []
        self._ends: list[int] = []

    def free_since(self, life: Lifetime) -> int | None:
        """End of the life before a further one; None: it overlaps another."""
        place = bisect_left(self._starts, life.start)
        if place < len(self._starts) and self._starts[place] <= life.end:
            return None
        before = self._ends[place - 1] if place else -1
        return before if before < life.start else None

    def add(self, life: Lifetime) -> None:
        place = bisect_left(self._starts, life.start)
        self._starts.insert(place, life.start)
        self._ends.insert(place, life.end)


def _peak_action_and_size(lives: Sequence[Lifetime], sizes: Sequence[float]) -> tuple[int | None, float]:
    used: list[tuple[int, float]] = []
    in_use = most = 0.0
    peak = None
    for (_, start, _, end), size in zip(lives, sizes, strict=True):
        while used and used[0][0] < start:
            in_use -= heappop(used)[1]
        heappush(used, (end, size))
        in_use += size
        if in_use > most:
            peak, most = start, in_use
    return peak, most
