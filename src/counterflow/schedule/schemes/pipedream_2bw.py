"""PipeDream-2BW: asynchronous 1F1B, an update every N micro-batches, two weight versions.

D=2, N=2, 3 periods (digit = forward, letter = backward, B = 2F):

    P0  0 1 . . a a 2 b b 3 c c 4 d d 5 e e . f f
    P1  . 0 a a 1 b b 2 c c 3 d d 4 e e 5 f f . .

Period t uses version max(0, t − 1) on every stage: the gradient is taken one update late,
w(t+1) = w(t) − ν∇f(w(t−1)).

Source: Narayanan et al., PipeDream-2BW (ICML 2021); WPipe (ICLR 2022) section 2, Figure 2.
"""

from __future__ import annotations

from functools import partial

from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.one_forward_one_backward import one_forward_one_backward, steady_slices
from counterflow.schedule.placement import linear
from counterflow.schedule.scheme import PERIODS, Option, Scheme
from counterflow.schedule.workload import Workload, plain


def version(_stages: int, _stage: int, period: int) -> int:
    """The number of updates in the weights that period ``period`` uses; the same on every stage."""
    return max(0, period - 1)


def pipedream_2bw(stages: int, micro_batches: int, periods: int = 8) -> Schedule:
    """Asynchronous 1F1B, weights double-buffered.

    Args:
        stages: depth D, the number of workers, 1 or more.
        micro_batches: N, number of micro-batches between updates, D or more.
        periods: number of updates, 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*pipedream_2bw(stages=1, micro_batches=1, periods=3).orders[0])
    F0.0 B0.0 F1.0 B1.0 F2.0v1 B2.0v1
    """
    workload = _workload(stages, micro_batches, periods)
    orders = tuple(
        one_forward_one_backward(
            s,
            micro_batches * periods,
            stages - s,
            lambda m, s=s: version(stages, s, m // micro_batches),  # type: ignore[misc]
        )
        for s in range(stages)
    )
    steady = steady_slices([stages - s for s in range(stages)], micro_batches, periods)
    options = (("stages", stages), ("micro_batches", micro_batches), ("periods", periods))
    return Schedule("pipedream-2bw", options, workload, orders, steady)


def _workload(stages: int, micro_batches: int, periods: int = 8) -> Workload:
    at_least("stages", stages, 1)
    at_least("micro_batches", micro_batches, stages, why=f" (the depth {stages})")
    at_least("periods", periods, 1)
    return plain(linear(stages), micro_batches, periods=periods, version=partial(version, stages))


SCHEME = Scheme(
    name="pipedream-2bw",
    build=pipedream_2bw,
    workload=_workload,
    summary="asynchronous 1F1B, two weight versions",
    source="Narayanan et al. 2021 (PipeDream-2BW)",
    options=(
        Option("stages", "1 or more", "depth D: stages, one on each worker", letter="D"),
        Option("micro_batches", "stages or more", "N: micro-batches between updates", letter="N"),
        PERIODS,
    ),
    version=version,
    needs="as many micro-batches as workers",
)
