"""PipeDream: asynchronous 1F1B, an update after every backward, weights stashed.

D=3, 6 micro-batches (digit = forward, letter = backward, B = 2F):

    P0  0 1 2 . . . . a a 3 b b 4 c c 5 d d . e e . f f
    P1  . 0 1 . . a a 2 b b 3 c c 4 d d 5 e e . f f . .
    P2  . . 0 a a 1 b b 2 c c 3 d d 4 e e 5 f f . . . .

A period is one micro-batch. Micro-batch m uses version max(0, m − (D − 1 − s)) of stage s in its forward
and in its backward; stage s therefore holds D − s versions.

Source: Harlap et al., PipeDream (2018); WPipe (ICLR 2022) section 2, Figure 2.
"""

from __future__ import annotations

from functools import partial

from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.one_forward_one_backward import one_forward_one_backward, steady_slices
from counterflow.schedule.placement import linear
from counterflow.schedule.scheme import PERIODS, Option, Scheme
from counterflow.schedule.workload import Workload, plain


def version(stages: int, stage: int, period: int) -> int:
    """The number of updates in the weights that period ``period`` (one micro-batch) uses on ``stage``."""
    return max(0, period - (stages - 1 - stage))


def pipedream(stages: int, periods: int = 8) -> Schedule:
    """Asynchronous 1F1B; every micro-batch is a period with its own update.

    Args:
        stages: depth D, the number of workers, 1 or more.
        periods: number of micro-batches, 1 or more. A steady part needs D + 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*pipedream(stages=2, periods=3).orders[0])
    F0.0 F1.0 B0.0 F2.0v1 B1.0 B2.0v1
    """
    workload = _workload(stages, periods)
    orders = tuple(
        one_forward_one_backward(s, periods, stages - s, partial(version, stages, s)) for s in range(stages)
    )
    steady = steady_slices([stages - s for s in range(stages)], 1, periods)
    options = (("stages", stages), ("periods", periods))
    return Schedule("pipedream", options, workload, orders, steady)


def _workload(stages: int, periods: int = 8) -> Workload:
    at_least("stages", stages, 1)
    at_least("periods", periods, 1)
    return plain(linear(stages), 1, periods=periods, version=partial(version, stages))


SCHEME = Scheme(
    name="pipedream",
    build=pipedream,
    workload=_workload,
    summary="asynchronous 1F1B, an update after every backward",
    source="Harlap et al. 2018",
    options=(
        Option("stages", "1 or more", "depth D: stages, one on each worker", letter="D"),
        PERIODS,
    ),
    version=version,
    needs="a micro-batch of a replica's whole share, or more updates",
)
