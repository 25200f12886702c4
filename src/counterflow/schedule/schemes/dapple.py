"""DAPPLE: one forward, one backward (1F1B), and a flush at the end of the mini-batch.

D=4, N=4 (digit = forward, letter = backward of the same micro-batch, B = 2F):

    P0  0 1 2 3 . . . . . . a a . b b . c c . d d
    P1  . 0 1 2 . . . . a a 3 b b . c c . d d . .
    P2  . . 0 1 . . a a 2 b b 3 c c . d d . . . .
    P3  . . . 0 a a 1 b b 2 c c 3 d d . . . . . .

Source: Fan et al., DAPPLE (PPoPP 2021); Chimera (SC'21) section 2, Figure 2.
"""

from __future__ import annotations

from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.one_forward_one_backward import one_forward_one_backward
from counterflow.schedule.orders.split import split_backwards, split_workload
from counterflow.schedule.placement import linear
from counterflow.schedule.scheme import MICRO_BATCHES, SPLIT, Option, Scheme
from counterflow.schedule.workload import Workload, plain


def dapple(stages: int, micro_batches: int, split: bool = False) -> Schedule:
    """Synchronous 1F1B; stage s stashes at most min(D - s, N) forwards.

    Args:
        stages: depth D, the number of workers, 1 or more.
        micro_batches: N, 1 or more.
        split: whether backwards are split (``split_backwards``).

    Raises:
        ConfigError: an option is out of range.

    >>> print(*dapple(stages=2, micro_batches=3).orders[0])
    F0.0 F1.0 B0.0 F2.0 B1.0 B2.0
    """
    workload = _workload(stages, micro_batches)
    orders = tuple(one_forward_one_backward(s, micro_batches, in_flight=stages - s) for s in range(stages))
    options = (("stages", stages), ("micro_batches", micro_batches))
    return split_backwards(Schedule("dapple", options, workload, orders), split)


def _workload(stages: int, micro_batches: int, split: bool = False) -> Workload:
    at_least("stages", stages, 1)
    at_least("micro_batches", micro_batches, 1)
    return split_workload(plain(linear(stages), micro_batches), split)


def _most_stashed(stages: int, split: bool = False, **_: OptionValue) -> int | None:
    return None if split else stages


SCHEME = Scheme(
    name="dapple",
    aliases=("1f1b",),
    paper_name="1F1B",
    build=dapple,
    workload=_workload,
    summary="synchronous 1F1B",
    source="Fan et al. 2021",
    options=(
        Option("stages", "1 or more", "depth D: stages, one on each worker", letter="D"),
        MICRO_BATCHES,
        SPLIT,
    ),
    most_stashed=_most_stashed,
)
