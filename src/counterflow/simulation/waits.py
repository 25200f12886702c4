"""What waits for what in a play, as pairs of nodes: for who asks which waits matter, not when things happen.

Nodes are the ops, the messages behind them where links carry one at a time, and behind these the gradient
syncs that ops wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .player import Floats, Ints

if TYPE_CHECKING:
    from .timed_schedule import Ready, TimedSchedule


class Waits(NamedTuple):
    """Every wait: ``taker`` begins when ``source`` has ended and ``delay`` seconds have passed.

    Attributes:
        source: node.
        taker: node.
        delay: in seconds.
        lasts: seconds of each node.
    """

    source: Ints
    taker: Ints
    delay: Floats
    lasts: Floats


def waits_of(model: TimedSchedule, ready: Ready) -> Waits:
    """What ops and messages wait for."""
    lasting, messages = ready.lasting, model.messages
    ops = np.arange(len(lasting.ops))
    follows = np.setdiff1d(ops, model.first[:-1])
    here = np.flatnonzero((model.source >= 0) & (model.worker[model.source] == model.worker))
    nothing = np.zeros(len(here))
    rows = [
        (follows - 1, follows, lasting.busy[follows - 1]),
        (model.source[here], here, nothing),
    ]
    if not ready.links:
        rows.append((messages.makers, messages.takers, lasting.late))
        return _waits(rows, lasting.ops)
    nodes = len(ops) + np.arange(len(messages.makers))
    order = np.lexsort((messages.makers, lasting.lanes))
    same = lasting.lanes[order][1:] == lasting.lanes[order][:-1]
    before, behind = nodes[order[:-1][same]], nodes[order[1:][same]]
    rows += [
        (messages.makers, nodes, lasting.late),
        (before, behind, np.zeros(len(behind))),
        (nodes, messages.takers, np.zeros(len(nodes))),
    ]
    return _waits(rows, np.concatenate((lasting.ops, lasting.travel)))


def with_syncs(model: TimedSchedule, ready: Ready, waits: Waits, seconds: list[float]) -> Waits:
    """The same with the syncs that ops wait for as further nodes; ``seconds`` has those of each stage."""
    nodes, lane = len(waits.lasts), dict[int, int]()
    rows: list[tuple[int, int, float]] = []
    for node, sync in enumerate(model.awaited.syncs, nodes):
        ends = [model.first[worker] + last for worker, last in sync.last if last is not None]
        rows += [(end, node, float(ready.lasting.busy[end])) for end in ends]
        rows += [(lane[worker], node, 0.0) for worker in sync.workers if worker in lane]
        lane |= dict.fromkeys(sync.workers, node)
    rows += [(nodes + number, op, 0.0) for number, op in model.awaited.users]
    source, taker, delay = zip(*rows, strict=True)
    more = np.array(source, dtype=np.int64), np.array(taker, dtype=np.int64), np.array(delay)
    lasts = np.concatenate((waits.lasts, [seconds[sync.stage] for sync in model.awaited.syncs]))
    return _waits([waits[:3], more], lasts)


def _waits(rows: list[tuple[Ints, Ints, Floats]], lasts: Floats) -> Waits:
    source, taker, delay = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Waits(source, taker, delay, lasts)
