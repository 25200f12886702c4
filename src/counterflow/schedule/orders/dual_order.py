"""DualPipe's order of one worker, for both of its forms: two directions, or folded into a V.

A worker holds stage 0, whose micro-batches reach it first, and stage 1. DualPipe overlaps a forward and a
backward that are next to each other, on devices that can; here one follows the other.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from counterflow.schedule.workload import Pass, Share


def dual_order(distance: int, depth: int, micro_batches: int) -> list[str]:
    """The order in words.

    Args:
        distance: workers between this one and the end at which stage 0 begins.
        depth: workers from that end to where both directions, or both arms of the V, meet.
        micro_batches: micro-batches of stage 0, and as many of stage 1; 2·depth or more.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437) section 3.2.1, and the public code of DualPipe.

    >>> print(*dual_order(distance=0, depth=1, micro_batches=2))
    F0 F1 F0 B1 F1 B0 B1 I0 W
    """
    ahead, done = depth - distance - 1, distance + 1
    last = ["1", "0"] * done
    unsplit = _count_unsplit(done)
    return [
        *["F0"] * (2 * ahead),
        *["F0", "F1"] * done,
        *["I1", "W", "F1"] * ahead,
        *["F0", "B1", "F1", "B0"] * (micro_batches - 2 * depth + done),
        *["B1", "F1", "B0"] * ahead,
        *(("B" if place < unsplit else "I") + stage for place, stage in enumerate(last)),
        *["W", "I0"] * ahead,
        *["W"] * done,
    ]


def split_in(distance: int, depth: int, micro_batches: int) -> tuple[set[int], set[int]]:
    """The micro-batches of stage 0 and of stage 1 whose backwards the order splits; arguments as in
    ``dual_order``.

    >>> split_in(distance=0, depth=1, micro_batches=2)
    ({1}, set())
    """
    ahead, done = depth - distance - 1, distance + 1
    halves = 2 * done - _count_unsplit(
        done
    )  # among the last backwards, which take turns and end with stage 0
    last = [micro_batches - (halves + 1) // 2 - ahead, micro_batches - halves // 2]
    stage_0, stage_1 = (set(range(first, micro_batches)) for first in last)
    return stage_0, {*range(ahead), *stage_1}


def passes_split(split: Sequence[Set[int]], micro_batches: int, pipes: int = 1) -> tuple[Pass, ...]:
    """The passes of a number of micro-batches per pipe; ``split`` has, for each stage, those whose backwards
    are split.
    """
    splits = [
        tuple(stage for stage, of_stage in enumerate(split) if m in of_stage) for m in range(micro_batches)
    ]
    return tuple(
        Pass(pipe, (number := pipe * micro_batches + m,), (Share((number,), split=stages),))
        for pipe in range(pipes)
        for m, stages in enumerate(splits)
    )


def _count_unsplit(done: int) -> int:
    return 2 * (done // 2) + (done % 2)
