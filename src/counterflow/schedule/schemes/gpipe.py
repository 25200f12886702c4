"""GPipe: all forwards, then all backwards, last in first out.

D=4, N=4 (digit = forward, letter = backward of the same micro-batch, B = 2F):

    P0  0 1 2 3 . . . . . . . . . d d c c b b a a
    P1  . 0 1 2 3 . . . . . . d d c c b b a a . .
    P2  . . 0 1 2 3 . . . d d c c b b a a . . . .
    P3  . . . 0 1 2 3 d d c c b b a a . . . . . .

``groups=g`` cuts each worker's part of the model into g chunks on the looped placement and runs the
forwards chunk by chunk, then the backwards chunk by chunk: for the same model the idle time falls to 1/g.

Sources: Huang et al., GPipe (NeurIPS 2019); groups: WPipe (ICLR 2022), appendix A.4, Figure 15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.placement import looped
from counterflow.schedule.scheme import MICRO_BATCHES, Option, Scheme, counts
from counterflow.schedule.workload import Workload, plain


def gpipe(stages: int, micro_batches: int, groups: int = 1) -> Schedule:
    """All forwards, then all backwards.

    Args:
        stages: depth D, the number of workers, 1 or more. With ``groups`` the model is cut into
            ``stages * groups`` stages, ``groups`` on each worker.
        micro_batches: N, 1 or more.
        groups: number of chunks that a worker holds, 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*gpipe(stages=2, micro_batches=2).orders[0])
    F0.0 F1.0 B1.0 B0.0
    """
    workload = _workload(stages, micro_batches, groups)
    orders = tuple(tuple(_order(w, stages, groups, micro_batches)) for w in range(stages))
    options = (("stages", stages), ("micro_batches", micro_batches), ("groups", groups))
    return Schedule("gpipe", options, workload, orders)


def _workload(stages: int, micro_batches: int, groups: int = 1) -> Workload:
    at_least("stages", stages, 1)
    at_least("micro_batches", micro_batches, 1)
    at_least("groups", groups, 1)
    return plain(looped(stages, groups), micro_batches)


def _order(worker: int, workers: int, chunks: int, micro_batches: int) -> Iterator[Op]:
    for chunk in range(chunks):
        for m in range(micro_batches):
            yield Op(F, chunk * workers + worker, (m,))
    for chunk in reversed(range(chunks)):
        for m in reversed(range(micro_batches)):
            yield Op(B, chunk * workers + worker, (m,))


def _planned(workers: int, _micro_batches: int, layers: int) -> Iterator[Mapping[str, OptionValue]]:
    for groups in counts(1, layers // workers):
        yield {"groups": groups}


SCHEME = Scheme(
    name="gpipe",
    build=gpipe,
    workload=_workload,
    summary="all forwards, then all backwards",
    source="Huang et al. 2019; groups: WPipe, appendix A.4",
    options=(
        Option("stages", "1 or more", "depth D: workers; the model is cut in D·groups", letter="D"),
        MICRO_BATCHES,
        Option(
            "groups",
            "1 or more",
            "chunks of the model that a worker holds",
            default=1,
            noun="group",
            unsaid=1,
            multiplies=True,
        ),
    ),
    planner=_planned,
    chunk="group",
)
