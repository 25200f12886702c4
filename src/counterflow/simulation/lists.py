"""A schedule's lists as arrays: its ops by column, what each takes, and the messages between workers.

A worker sends right behind the op that makes a message, so a link's order is known without any times; this is
what lowering writes into a program (``program/lowering.py``), and ``tests/simulation/test_program.py`` plays
programs to see that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter

import numpy as np

from counterflow.program.sync import GradientSync
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, OpKind, Product, Schedule

from .player import Floats, Ints, Lists, Sums

_KINDS = {kind: number for number, kind in enumerate(OpKind)}
_PRODUCTS = {product: number for number, product in enumerate(Product)}
_MAKES = np.array([[product in kind.makes for product in Product] for kind in OpKind])
_TAKES = np.array([-1 if kind.takes is None else _PRODUCTS[kind.takes] for kind in OpKind])
_GOES = np.array([0 if kind.takes is None else kind.takes.goes for kind in OpKind])
WHOLE = np.array([kind.whole for kind in OpKind])
BEFORE = np.array([int(kind.gives is not Product.OUTPUT) for kind in OpKind])
"""By kind of op: what it makes, what it takes of another stage, how far that goes, whether it is whole, and
whether what it gives is about the output of the stage before (``Op.boundary``)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A schedule's ops, worker by worker in order, a column for each of their fields.

    Attributes:
        worker: on which worker.
        kind: which of ``OpKind``.
        stage: of which stage.
        pipe: on which pipe.
        unit: a number for its micro-batches and part, the same where these are the same.
        size: how many micro-batches are computed together.
        batch: the first of them.
        parts: into how many they are divided.
    """

    worker: Ints
    kind: Ints
    stage: Ints
    pipe: Ints
    unit: Ints
    size: Ints
    batch: Ints
    parts: Ints


def columns_of(ops: Sequence[Op], lengths: Sequence[int]) -> Columns:
    """The columns of some ops, of which so many are on each worker."""
    worker = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    if not ops:
        none = np.empty(0, dtype=np.int64)
        return Columns(worker, *(none,) * 7)
    kinds, stages, batches, pipes, shares, divided, _ = zip(*ops, strict=True)

    def column(values: Iterable[int]) -> Ints:
        return np.fromiter(values, dtype=np.int64, count=len(ops))

    size, batch = column(map(len, batches)), column(map(itemgetter(0), batches))
    part, parts = column(shares), column(divided)
    if (size == 1).all() and min(batch.min(), part.min(), parts.min()) >= 0:
        base = max(part.max(), parts.max()) + 1
        unit = (batch * base + parts) * base + part
    else:
        numbers: dict[tuple[tuple[int, ...], int, int], int] = {}
        number = numbers.setdefault
        unit = column([number(key, len(numbers)) for key in zip(batches, shares, divided, strict=True)])
    kind = column(map(_KINDS.__getitem__, kinds))
    return Columns(worker, kind, column(stages), column(pipes), unit, size, batch, parts)


def sources_of(schedule: Schedule, ops: Columns) -> Ints | None:
    """The op whose product each op takes of another stage; -1: it takes none.

    Returns:
        None: the schedule is wrong, and ``OpGraph`` says how.
    """
    stages, pipes = schedule.stages, schedule.pipes
    inside = (ops.stage >= 0) & (ops.stage < stages) & (ops.pipe >= 0) & (ops.pipe < pipes)
    if not inside.all():
        return None
    source = np.full(len(ops.kind), -1, dtype=np.int64)
    if not len(source):
        return source
    units = int(ops.unit.max()) + 1
    place = (ops.pipe * stages + ops.stage) * units + ops.unit
    product_of = pipes * stages * units
    makers, products = np.nonzero(_MAKES[ops.kind])
    made = products * product_of + place[makers]
    order = np.argsort(made)
    made, makers = made[order], makers[order]
    if (made[1:] == made[:-1]).any():
        return None
    takes, goes = _TAKES[ops.kind], _GOES[ops.kind]
    before = ops.stage - goes
    takers = np.flatnonzero((takes >= 0) & (before >= 0) & (before < stages))
    taken = takes[takers] * product_of + place[takers] - goes[takers] * units
    at = np.minimum(np.searchsorted(made, taken), len(made) - 1)
    if (made[at] != taken).any():
        return None
    source[takers] = makers[at]
    return source


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a schedule, in the order of the ops that make them; of one op as they are sent.

    Attributes:
        makers: the op that made each.
        takers: the op that takes it.
        senders: the worker that sends it.
        receivers: the worker that receives it.
        skips: which of the workload's skips it goes by; -1: none.
    """

    makers: Ints
    takers: Ints
    senders: Ints
    receivers: Ints
    skips: Ints

    def before_of_op(self, seconds: Floats) -> Floats:
        """For each message, how long the earlier ones of the same op travel together."""
        if not len(seconds):
            return seconds
        before = np.cumsum(seconds) - seconds
        first = np.concatenate(([True], self.makers[1:] != self.makers[:-1]))
        found: Floats = before - before[first][np.cumsum(first) - 1]
        return found


def messages_of(source: Ints, worker: Ints, graph: OpGraph | None) -> Messages:
    """The messages between workers.

    Args:
        source: the op whose product each op takes.
        worker: the worker of each op.
        graph: of a schedule with skips, whose messages it knows.
    """
    takers = np.flatnonzero((source >= 0) & (worker[source] != worker))
    makers, skips = source[takers], np.full(len(takers), -1, dtype=np.int64)
    if graph is not None:
        numbers = {skip: number for number, skip in enumerate(graph.schedule.workload.skips)}
        rows = [(s, t, numbers[skip]) for s, t, skip in graph.messages if skip is not None]
        more = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        makers, takers, skips = (
            np.concatenate(both) for both in zip((makers, takers, skips), more, strict=True)
        )
    order = np.lexsort((takers, skips, makers))
    makers, takers = makers[order], takers[order]
    return Messages(makers, takers, worker[makers], worker[takers], skips[order])


def lists_of(first: Sequence[int], messages: Messages) -> Lists:
    """What is played."""
    ops = np.arange(first[-1] + 1)
    taken = np.argsort(messages.takers, kind="stable")
    return Lists(
        first=np.array(first, dtype=np.int64),
        takes=np.searchsorted(messages.takers[taken], ops),
        taken=taken,
        made=np.searchsorted(messages.makers, ops),
        receivers=messages.receivers,
    )


def sums_of(first: Sequence[int], syncs: Sequence[GradientSync]) -> Sums:
    """Syncs for the player, in the order in which they run on each worker's lane; no op waits for one yet."""
    starts, awaits = (np.full(first[-1], -1, dtype=np.int64) for _ in range(2))
    parts = []
    for number, sync in enumerate(syncs):
        ends = [first[worker] + last for worker, last in sync.last if last is not None]
        starts[ends] = number
        parts.append(len(ends))
    members = [sync.workers for sync in syncs]
    return Sums(
        starts,
        awaits,
        np.array(parts, dtype=np.int64),
        np.array([0, *accumulate(map(len, members))], dtype=np.int64),
        np.array(list(chain.from_iterable(members)), dtype=np.int64),
    )
