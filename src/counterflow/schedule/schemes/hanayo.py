"""Hanayo: one pipe that runs down and up the workers in waves, so no second copy of the weights.

P=4, waves=1, N=4 (8 stages; micro-batch.stage; B = 2F), makespan 36:

    P0: F0.0 F1.0 F2.0 F3.0 F0.7 B0.7 F1.7 B1.7 F2.7 B2.7 F3.7 B3.7 B0.0 B1.0 B2.0 B3.0
    P1: F0.1 F1.1 F2.1 F0.6 F3.1 F1.6 B0.6 F2.6 B1.6 F3.6 B2.6 B0.1 B3.6 B1.1 B2.1 B3.1
    P2: F0.2 F1.2 F0.5 F2.2 F1.5 F3.2 F2.5 B0.5 F3.5 B1.5 B0.2 B2.5 B1.2 B3.5 B2.2 B3.2
    P3: F0.3 F0.4 F1.3 F1.4 F2.3 F2.4 F3.3 F3.4 B0.4 B0.3 B1.4 B1.3 B2.4 B2.3 B3.4 B3.3

In slots, with S = 2·P·waves stages: micro-batch j of a unit of P has its forward of stage s in slot
2j + s and its backward in slot 2j + 2S − 1 − s; units are shifted by 2S slots. No slot is shared.

Source: Liu et al., Hanayo (SC'23) sections 3.2 and 3.3, Figures 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.slots import Placed, orders_by_slot
from counterflow.schedule.orders.split import split_backwards, split_workload
from counterflow.schedule.placement import Placement, wave
from counterflow.schedule.scheme import MICRO_BATCHES, SPLIT, Directions, Option, Scheme, counts
from counterflow.schedule.workload import Workload, plain


def hanayo(workers: int, micro_batches: int, waves: int = 1, split: bool = False) -> Schedule:
    """Wave-like pipeline of ``2 * workers * waves`` stages.

    Args:
        workers: P, 1 or more.
        micro_batches: N, 1 or more; units of P, the last one may be smaller.
        waves: number of times that a forward runs down and up, 1 or more.
        split: whether backwards are split (``split_backwards``).

    Raises:
        ConfigError: an option is out of range.

    >>> print(*hanayo(workers=2, micro_batches=1).orders[0])
    F0.0 F0.3 B0.3 B0.0
    """
    workload = _workload(workers, micro_batches, waves)
    orders = orders_by_slot(workers, _placed(workload.placement, micro_batches))
    options = (("workers", workers), ("micro_batches", micro_batches), ("waves", waves))
    return split_backwards(Schedule("hanayo", options, workload, orders), split)


def _workload(workers: int, micro_batches: int, waves: int = 1, split: bool = False) -> Workload:
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 1)
    at_least("waves", waves, 1)
    return split_workload(plain(wave(workers, waves), micro_batches), split)


def _placed(placement: Placement, micro_batches: int) -> Iterator[Placed]:
    (holders,) = placement.pipes_stages
    last = 2 * len(holders) - 1
    for m in range(micro_batches):
        unit, j = divmod(m, placement.workers)
        start = unit * (last + 1) + 2 * j
        for s, worker in enumerate(holders):
            yield start + s, worker, Op(F, s, (m,))
            yield start + last - s, worker, Op(B, s, (m,))


def _planned(workers: int, _micro_batches: int, layers: int) -> Iterator[Mapping[str, OptionValue]]:
    for waves in counts(1, layers // (2 * workers)):
        yield {"waves": waves}


def _most_stashed(workers: int, waves: int = 1, split: bool = False, **_: OptionValue) -> int | None:
    return None if split else 2 * waves * workers


def _most_in_flight(workers: int, **_: OptionValue) -> int | None:
    return workers


SCHEME = Scheme(
    name="hanayo",
    build=hanayo,
    workload=_workload,
    summary="waves: one pipe that turns around at both ends",
    source="Liu et al. 2023",
    options=(
        Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
        MICRO_BATCHES,
        Option(
            "waves",
            "1 or more",
            "down-and-up passes of one forward",
            default=1,
            noun="wave",
            multiplies=True,
        ),
        SPLIT,
    ),
    directions=Directions.WAVES,
    planner=_planned,
    needs="two layers or more for each worker",
    chunk="leg",
    most_stashed=_most_stashed,
    most_in_flight=_most_in_flight,
)
