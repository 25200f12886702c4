"""What ops take in steps as they run: layers one after another, other micro-batches in memory, messages.

A layer run again and again finds its weights and activations in the processor's caches; in a step it does
not. So a profile takes its times from steps.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from counterflow.schedule.ir import Op, OpKind

from .pipeline import Pipeline

WARM_UP_STEPS = 3
"""Steps that are not timed: shapes are learnt, bytes counted, memory got from the system."""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Medians over steps, micro-batches and workers.

    Attributes:
        forward: seconds of a forward, by stage.
        backward: seconds of a backward, by stage.
        gap_seconds: between two ops of a worker, where the second one waits for nobody: what is sent is
            posted there.
        around_seconds: of a step, before its first op and after its last one on any worker.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gap_seconds: float
    around_seconds: float


def time_ops(pipeline: Pipeline, inputs: Any, targets: Any, *, repeats: int) -> OpTimes:
    """Train some steps and time their ops; all workers call it with a mini-batch as for ``step``.

    Args:
        pipeline: with a flush.
        inputs: see ``Pipeline.step``.
        targets: likewise.
        repeats: steps that count.
    """
    last = pipeline.schedule.stages - 1
    seconds: dict[tuple[OpKind, int], list[float]] = defaultdict(list)
    gaps: list[float] = []
    around: list[float] = []
    for turn in range(WARM_UP_STEPS + repeats):
        pipeline.transport.gather([])  # all begin together
        step = pipeline.step(inputs, targets)
        whole = max(row[0] for row in pipeline.transport.gather([step.seconds]))
        timeline = pipeline.timeline()
        if turn < WARM_UP_STEPS:
            continue
        for row in timeline:
            for op, start, end in row:
                seconds[op.kind, op.stage].append(end - start)
            gaps += [b[1] - a[2] for a, b in pairwise(row) if _waits_for_nobody(b[0], last)]
        begins = min(row[0][1] for row in timeline if row)
        ends = max(row[-1][2] for row in timeline if row)
        around.append(whole - (ends - begins))
    mine = {key: statistics.median(found) for key, found in seconds.items()}
    rows = pipeline.transport.gather_objects((mine, gaps, around))
    found = cast("list[tuple[dict[tuple[OpKind, int], float], list[float], list[float]]]", rows)
    forward, backward = (
        tuple(statistics.median(row[0][kind, stage] for row in found) for stage in range(last + 1))
        for kind in (OpKind.FORWARD, OpKind.BACKWARD)
    )
    return OpTimes(
        forward,
        backward,
        statistics.median([gap for row in found for gap in row[1]] or [0.0]),
        statistics.median([one for row in found for one in row[2]]),
    )


def _waits_for_nobody(op: Op, last_stage: int) -> bool:
    """Whether an op takes the mini-batch, or its own stage's loss."""
    return op.stage == (0 if op.kind is OpKind.FORWARD else last_stage)
