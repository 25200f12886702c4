"""Seconds of ops that run at once: the all-to-all of one on a lane beside the compute of the other.

An op with n all-to-alls is n + 1 equal parts of its compute with an all-to-all between each two. Both ops of
a pair share the lane of compute: one computes until it begins an all-to-all, then it is the other's turn
(``api/turns.py`` runs them so).

Invariant: without all-to-all a pair takes the seconds of its ops one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from counterflow.program.pairs import ops_by_stage
from counterflow.program.player import Floats
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.modes import Recompute

from .costs import Costs
from .op_costs import Piece, per_stage


def pair_nodes(schedule: Schedule, first: Sequence[int], ops: Sequence[Op]) -> list[list[list[int]]]:
    """Nodes of both sides of each pair.

    Args:
        schedule: schedule with pairs.
        first: first node of each worker.
        ops: op of each node.
    """
    pairs = []
    for start, places in zip(first, schedule.pairs, strict=False):
        for begin, stop in places:
            nodes = iter(range(start + begin, start + stop))
            sides = ops_by_stage(tuple(ops[start + begin : start + stop]))
            pairs.append([[next(nodes) for _ in side] for side in sides])
    return pairs


class Exchanging(NamedTuple):
    """An op that waits for all-to-alls.

    Attributes:
        seconds: all seconds of the op.
        all_to_all: the part of them that is all-to-all.
        exchanges: number of its all-to-alls.
    """

    seconds: float
    all_to_all: float
    exchanges: int


@cache
def pair_seconds(first: tuple[Exchanging, ...], second: tuple[Exchanging, ...]) -> float:
    """Seconds from the start of a pair to the end of both sides.

    Args:
        first: ops of the side that begins, in their order.
        second: ops of the other side.

    >>> forward, backward = Exchanging(3.0, 1.0, 1), Exchanging(5.0, 1.0, 1)
    >>> pair_seconds((forward,), (backward,))
    6.0
    >>> pair_seconds((forward,), (Exchanging(5.0, 0.0, 0),))
    7.0
    """
    turns = [list(_turns(first)), list(_turns(second))]
    ready = [0.0, 0.0]
    now = lane = 0.0
    side = 0
    while turns[0] or turns[1]:
        if not turns[side]:
            side = 1 - side
        compute, all_to_all = turns[side].pop(0)
        now = max(now, ready[side]) + compute
        if all_to_all is not None:
            lane = ready[side] = max(lane, now) + all_to_all
            side = 1 - side
    return now


def _turns(ops: Sequence[Exchanging]) -> Iterator[tuple[float, float | None]]:
    """Compute, and the all-to-all after it; None: the side goes on."""
    for op in ops:
        compute = max(0.0, op.seconds - op.all_to_all) / (op.exchanges + 1)
        for _ in range(op.exchanges):
            yield compute, op.all_to_all / op.exchanges
        yield compute, None


def exchanging(piece: Piece, seconds: float, costs: Costs, stages: int) -> Exchanging:
    """The all-to-alls of a piece of work.

    Tokens of a micro-batch are exchanged in each forward, in each recomputation, and in the op that makes the
    input gradient; weights have no part in it, so the ops of their gradients exchange nothing.

    Args:
        piece: the piece of work.
        seconds: seconds that it takes.
        costs: costs of the simulation.
        stages: number of stages.
    """
    times = int(piece.kind.is_forward or piece.kind.carries < 0 or piece.kind.restores is not None)
    if piece.repeats is not None and Recompute(costs.recompute).recomputes:
        times += 1
    of_forward = per_stage("all_to_all", costs.all_to_all, stages)[piece.stage]
    return Exchanging(seconds, min(times * piece.work * of_forward, seconds), times * costs.exchanges)


def with_pairs_at_once(
    seconds: Floats, pairs: Sequence[Sequence[Sequence[int]]], ops: Sequence[Exchanging], which: Sequence[int]
) -> Floats:
    """Seconds of each op if pairs run at once: those of a pair are divided among its ops in proportion.

    Args:
        seconds: seconds of each op on its own.
        pairs: for each pair the nodes of both of its sides.
        ops: the distinct pieces of work.
        which: number of the piece of each op.
    """
    result = seconds.copy()
    for sides in pairs:
        first, second = (tuple(ops[which[node]] for node in nodes) for nodes in sides)
        alone = sum(op.seconds for op in (*first, *second))
        if alone:
            nodes = [node for side in sides for node in side]
            result[nodes] *= pair_seconds(first, second) / alone
    return result


__all__ = ["Exchanging", "exchanging", "pair_seconds", "with_pairs_at_once"]
