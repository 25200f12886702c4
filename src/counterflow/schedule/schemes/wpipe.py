"""WPipe: two groups of stages on the same workers take turns, so only one group has late gradients.

Two workers, M=2, 4 partitions (stages 0, 1 are group G0, stages 2, 3 are G1), each worker's first ops:

    P0: F.0 F.0 F.2 F.2 B.2 F.0 B.2 F.0 B.0 F.2 B.0 F.2 …
    P1: F.1 F.1 F.3 B.3 F.3 B.3 F.1 B.1 F.1 B.1 F.3 B.3 …

A V is a forward going down workers 0..N−1 joined to a backward coming up: V number v has its forward on
worker w in slot 2v + w and its backward in slot 2v + 2N − 1 − w. The stream of V's is, for t = 0, 1, …:
M V's of G0, whose forward belongs to period t and whose backward belongs to period t − 1; then M V's of
G1, forward and backward both of period t. G0 uses version max(0, t − 1), G1 version t: none late.

Source: Yang et al., WPipe (ICLR 2022) section 3.2, Figures 4 and 5, equation 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.slots import Placed, orders_by_slot
from counterflow.schedule.placement import looped
from counterflow.schedule.scheme import PERIODS, Option, Scheme
from counterflow.schedule.workload import Workload, plain


def version(stages: int, stage: int, period: int) -> int:
    """The number of updates in the weights that period ``period`` uses on ``stage``."""
    return max(0, period - 1) if stage < stages // 2 else period


def wpipe(workers: int, micro_batches: int, periods: int = 8) -> Schedule:
    """Two groups of ``workers`` partitions each, updated in turn, asynchronously.

    Args:
        workers: N, 1 or more; the model is cut into ``2 * workers`` stages.
        micro_batches: M, number of micro-batches between updates, N or more.
        periods: number of updates of each group, 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*wpipe(workers=1, micro_batches=1, periods=2).orders[0])
    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1v1 B1.1v1 B1.0
    """
    workload = _workload(workers, micro_batches, periods)
    orders = orders_by_slot(workers, _placed(workers, micro_batches, periods))
    options = (("workers", workers), ("micro_batches", micro_batches), ("periods", periods))
    return Schedule("wpipe", options, workload, orders, _steady(orders, micro_batches))


def _workload(workers: int, micro_batches: int, periods: int = 8) -> Workload:
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 1)
    at_least("periods", periods, 1)
    if micro_batches < workers:
        raise ConfigError(
            f"micro_batches={micro_batches}: wpipe needs at least as many micro-batches between updates "
            f"as workers; use {workers} or more, or at most {micro_batches} workers"
        )
    placement = looped(workers, chunks=2)
    return plain(placement, micro_batches, periods=periods, version=partial(version, placement.stages))


def _placed(workers: int, micro_batches: int, periods: int) -> Iterator[Placed]:
    def op(kind: OpKind, stage: int, period: int, j: int) -> Op:
        used = version(2 * workers, stage, period)
        return Op(kind, stage, (period * micro_batches + j,), version=used)

    v = 0
    for t in range(periods + 1):
        for group in range(2):
            backward_period = t - 1 if group == 0 else t
            for j in range(micro_batches):
                for w in range(workers):
                    stage = group * workers + w
                    if t < periods:
                        yield 2 * v + w, w, op(F, stage, t, j)
                    if 0 <= backward_period < periods:
                        backward = op(B, stage, backward_period, j)
                        yield 2 * v + 2 * workers - 1 - w, w, backward
                v += 1


def _steady(orders: tuple[tuple[Op, ...], ...], micro_batches: int) -> tuple[tuple[int, int], ...] | None:
    """Whole periods on each worker, from its first backward of G0 to its last forward of G1."""
    slices = []
    for worker, order in enumerate(orders):
        first = next(i for i, op in enumerate(order) if op.kind is B and op.stage == worker)
        last = max(i for i, op in enumerate(order) if op.kind is F)
        whole = (last + 1 - first) // (4 * micro_batches)
        if whole < 1:
            return None
        slices.append((first, first + whole * 4 * micro_batches))
    return tuple(slices)


SCHEME = Scheme(
    name="wpipe",
    build=wpipe,
    workload=_workload,
    summary="two groups of stages updated in turn, asynchronously",
    source="Yang et al. 2022",
    options=(
        Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
        Option("micro_batches", "workers or more", "M: micro-batches between updates", letter="N"),
        PERIODS,
    ),
    version=version,
    needs="two layers for each worker, and as many micro-batches as workers",
    chunk="group",
)
