"""WPipe: groups of stages on the same workers take turns, so only one group has late gradients.

Two workers, M=2, 4 partitions (stages 0, 1 are group G0, stages 2, 3 are G1), each worker's first ops:

    P0: F.0 F.0 F.2 F.2 B.2 F.0 B.2 F.0 B.0 F.2 B.0 F.2 …
    P1: F.1 F.1 F.3 B.3 F.3 B.3 F.1 B.1 F.1 B.1 F.3 B.3 …

A V is a forward going down workers 0..N−1 joined to a backward coming up: V number v has its forward on
worker w in slot 2v + w and its backward in slot 2v + 2N − 1 − w. The stream of V's is, for t = 0, 1, …:
M V's of G0, whose forward belongs to period t and whose backward belongs to period t − 1; then M V's of
G1, forward and backward both of period t. G0 uses version max(0, t − 1), G1 version t: none late.

With ``groups=G`` there are G groups instead of two, and still only G0 is late: workers hold (G+1)/G of the
model's weights, and 1/G of them is updated one period late. In period t the stream has the M forwards of
G0, then those of the other groups, N micro-batches at a time through G1, G2, …, G(G−1). Backwards follow in
the same order of micro-batches, from G(G−1) to G1, (G−2)·N V's later; and those of G0 in the V's that are
left. Every V has a forward and a backward, so no worker idles in the steady state, whatever their times.
That needs M to be a multiple of N and M ≥ (G−1)·N: the last backward of G1 ends N V's or more before its
first forward of the next period, which needs the update. No stream of V's makes G0's gradients current,
because the forwards of one period alone fill its V's.

Source: Yang et al., WPipe (ICLR 2022) section 3.2, Figures 4 and 5, equation 1; Counterflow for G > 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.slots import Placed, orders_by_slot
from counterflow.schedule.placement import looped
from counterflow.schedule.scheme import PERIODS, Option, Scheme, counts
from counterflow.schedule.workload import Workload, plain


def version(stages: int, stage: int, period: int, groups: int = 2) -> int:
    """The number of updates in the weights that period ``period`` uses on ``stage``."""
    return max(0, period - 1) if stage < stages // groups else period


def wpipe(workers: int, micro_batches: int, periods: int = 8, groups: int = 2) -> Schedule:
    """Groups of ``workers`` partitions each, updated in turn, asynchronously; the first one is late.

    Args:
        workers: N, 1 or more; the model is cut into ``groups * workers`` stages.
        micro_batches: M, number of micro-batches between updates, N or more; with more than two groups a
            multiple of N, ``(groups - 1) * workers`` or more.
        periods: number of updates of each group, 1 or more.
        groups: G, 2 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*wpipe(workers=1, micro_batches=1, periods=2).orders[0])
    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1v1 B1.1v1 B1.0
    """
    workload = _workload(workers, micro_batches, periods, groups)
    orders = orders_by_slot(workers, _placed(workers, micro_batches, periods, groups))
    options = (
        ("workers", workers),
        ("micro_batches", micro_batches),
        ("periods", periods),
        ("groups", groups),
    )
    return Schedule("wpipe", options, workload, orders, _steady(orders, micro_batches, groups))


def _workload(workers: int, micro_batches: int, periods: int = 8, groups: int = 2) -> Workload:
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 1)
    at_least("periods", periods, 1)
    at_least("groups", groups, 2)
    if micro_batches < workers:
        raise ConfigError(
            f"micro_batches={micro_batches}: wpipe needs at least as many micro-batches between updates "
            f"as workers; use {workers} or more, or at most {micro_batches} workers"
        )
    if groups > 2 and (micro_batches % workers or micro_batches < (groups - 1) * workers):
        legal = max(groups - 1, -(-micro_batches // workers)) * workers
        raise ConfigError(
            f"micro_batches={micro_batches}: wpipe with groups={groups} needs a multiple of its {workers} "
            f"workers, {(groups - 1) * workers} or more, so that every group but the first is updated before "
            f"its next forward; use {legal}, or groups=2"
        )
    placement = looped(workers, chunks=groups)
    rule = partial(version, placement.stages, groups=groups)
    return plain(placement, micro_batches, periods=periods, version=rule)


def _stream(workers: int, micro_batches: int, groups: int) -> Iterator[tuple[int, int, int, int]]:
    m, size = micro_batches, workers if groups > 2 else micro_batches
    late = (groups - 2) * size
    for j in range(m):
        yield 0, j, j, groups * m + late + j
    for first in range(0, m, size):
        start = m + (groups - 1) * first
        for group, j in product(range(1, groups), range(size)):
            down, up = start + (group - 1) * size + j, start + late + (groups - 1 - group) * size + j
            yield group, first + j, down, up


def _placed(workers: int, micro_batches: int, periods: int, groups: int) -> Iterator[Placed]:
    for period in range(periods):
        for group, j, down, up in _stream(workers, micro_batches, groups):
            for w in range(workers):
                stage, batch = group * workers + w, (period * micro_batches + j,)
                used = version(groups * workers, stage, period, groups)
                before = period * groups * micro_batches
                yield 2 * (before + down) + w, w, Op(F, stage, batch, version=used)
                yield 2 * (before + up) + 2 * workers - 1 - w, w, Op(B, stage, batch, version=used)


def _steady(
    orders: tuple[tuple[Op, ...], ...], micro_batches: int, groups: int
) -> tuple[tuple[int, int], ...] | None:
    slices = []
    period = 2 * groups * micro_batches
    for worker, order in enumerate(orders):
        first = next(i for i, op in enumerate(order) if op.kind is B and op.stage == worker)
        last = max(i for i, op in enumerate(order) if op.kind is F)
        periods = (last + 1 - first) // period
        if periods < 1:
            return None
        slices.append((first, first + periods * period))
    return tuple(slices)


def _planned(workers: int, micro_batches: int, layers: int) -> Iterator[Mapping[str, OptionValue]]:
    yield {"groups": 2}
    if micro_batches % workers == 0:
        for groups in counts(3, min(layers // workers, micro_batches // workers + 1)):
            yield {"groups": groups}


SCHEME = Scheme(
    name="wpipe",
    build=wpipe,
    workload=_workload,
    summary="groups of stages updated in turn, asynchronously",
    source="Yang et al. 2022",
    options=(
        Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
        Option("micro_batches", "workers or more", "M: micro-batches between updates", letter="N"),
        PERIODS,
        Option(
            "groups",
            "2 or more",
            "groups of stages, of which the first is updated late",
            default=2,
            noun="group",
            unsaid=2,
            multiplies=True,
        ),
    ),
    planner=_planned,
    version=version,
    needs="two layers for each worker, and as many micro-batches as workers",
    chunk="group",
)
