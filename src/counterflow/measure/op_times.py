"""Durations of ops in real steps: layers one after another, other micro-batches in memory, messages.

A layer that runs repeatedly finds its weights and activations in the processor's caches; in a step it does
not. So a profile takes its times from steps. Several pipelines are best timed alternately, so disturbances
affect all of them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule.ir import Op, OpKind

T = TypeVar("T")

WARM_UP_STEPS = 3
"""Steps before the timed ones, in which shapes are learnt, bytes counted and memory obtained from the system.
"""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Duration of ops: the mean over steps and micro-batches, and the median over workers.

    The mean is used because a step is a sum of ops, so an op that now and then takes longer does so in a
    step, too.

    Attributes:
        forward: seconds of a forward, by stage.
        backward: seconds of a backward, by stage.
        gap_seconds: seconds between two ops of a worker if the second one does not wait: sends are posted
            there.
        around_seconds: seconds of a step before its first op and after its last one on any worker.
        by_worker: seconds of all of a worker's ops, one micro-batch, by rank.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gap_seconds: float
    around_seconds: float
    by_worker: tuple[float, ...] = ()


@dataclass(slots=True)
class _Turn:
    """Parts of a timed step, in seconds; ``step`` is equal on all workers."""

    step: float
    around: float
    ops: dict[tuple[OpKind, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: list[float] = field(default_factory=list)


class OpTimer:
    """Times the ops of a synchronous pipeline. All workers call all methods.

    Args:
        pipeline: the pipeline to time, which trains.
        inputs: see ``Pipeline.step``.
        targets: see ``Pipeline.step``.
    """

    def __init__(self, pipeline: Pipeline, inputs: Any, targets: Any) -> None:
        self.pipeline = pipeline
        self._batch = inputs, targets
        self._last_stage = pipeline.schedule.stages - 1
        self._turns: list[_Turn] = []

    def warm_up(self, steps: int = WARM_UP_STEPS) -> None:
        """Run steps that are not timed."""
        for _ in range(steps):
            self.pipeline.step(*self._batch)

    def turn(self) -> None:
        """Run a timed step."""
        pipeline = self.pipeline
        pipeline.transport.gather([])  # all begin together
        step = pipeline.step(*self._batch)
        seconds = max(row[0] for row in pipeline.transport.gather([step.seconds]))
        timeline = pipeline.timeline(pipeline.replica)
        begins = min(row[0][1] for row in timeline if row)
        ends = max(row[-1][2] for row in timeline if row)
        turn = _Turn(seconds, seconds - (ends - begins))
        for row in timeline:
            for op, start, end in row:
                turn.ops[op.kind, op.stage].append(end - start)
            turn.gaps += [b[1] - a[2] for a, b in pairwise(row) if self._waits_for_none(b[0])]
        self._turns.append(turn)

    def times(self, quietest: float = 1.0) -> OpTimes:
        """Results of the turns.

        Args:
            quietest: share of the steps that count, which are the fastest ones.
        """
        turns = least(self._turns, quietest, key=lambda turn: turn.step)
        seconds: dict[tuple[OpKind, int], list[float]] = defaultdict(list)
        for turn in turns:
            for key, durations in turn.ops.items():
                seconds[key] += durations
        means = {key: _mean(durations) for key, durations in seconds.items()}
        gap = _mean([gap for turn in turns for gap in turn.gaps])
        around = _mean([turn.around for turn in turns])
        rows = cast(
            "list[tuple[dict[tuple[OpKind, int], float], float, float]]",
            self.pipeline.transport.gather_objects((means, gap, around)),
        )
        forward, backward = (
            tuple(
                statistics.median(row[0][kind, stage] for row in rows)
                for stage in range(self._last_stage + 1)
            )
            for kind in (OpKind.FORWARD, OpKind.BACKWARD)
        )
        return OpTimes(
            forward,
            backward,
            statistics.median(row[1] for row in rows),
            statistics.median(row[2] for row in rows),
            tuple(sum(row[0].values()) for row in rows),
        )

    def _waits_for_none(self, op: Op) -> bool:
        """True if an op takes the mini-batch, or its stage's loss."""
        return op.stage == (0 if op.kind.is_forward else self._last_stage)


def least(values: Sequence[T], share: float, key: Callable[[T], float]) -> list[T]:
    """A share of the values, at least one: the smallest by ``key``.

    >>> least([4, 1, 3, 2], 0.5, key=float)
    [1, 2]
    """
    return sorted(values, key=key)[: max(1, math.ceil(share * len(values)))]


_ODD = 5
"""Multiple of the median from which a duration is discarded, because the machine was busy with something
else.
"""


def _mean(seconds: list[float]) -> float:
    if not seconds:
        return 0.0
    most = _ODD * statistics.median(seconds)
    return statistics.fmean(duration for duration in seconds if duration <= most)
