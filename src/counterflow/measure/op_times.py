"""Durations of ops in real steps: layers one after another, other micro-batches in memory, messages.

A layer that runs repeatedly finds its weights and activations in the processor's caches; in a step it does
not. So a profile takes its times from steps. Several pipelines are best timed alternately, so disturbances
affect all of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch

from counterflow.common.laps import Lap, OpLap, lap, read_start, read_stop
from counterflow.program.lists import messages_of
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule.graph import Nodes, OpGraph
from counterflow.schedule.ir import Op, OpKind

from .disturbance import (
    HIGH,
    LOW,
    WAITING,
    TimedSteps,
    computing_wait,
    is_exact,
    mean_seconds,
    thread_lap,
    thread_times,
    undisturbed,
    waiting_share,
)

T = TypeVar("T")

WARM_UP_STEPS = 3
"""Steps before the timed ones, in which shapes are learnt, bytes counted and memory obtained from the system.
"""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Duration of ops: the mean over steps and micro-batches, and the median over workers.

    The mean is used because a step is a sum of ops, so an op that now and then takes longer does so in a
    step, too. Time in which others had the processor is no part of it where that is known, see
    ``undisturbed``.

    Attributes:
        forward: seconds of a forward, by stage.
        backward: seconds of a backward, by stage.
        gap_seconds: seconds between two ops of a worker if the second one does not wait: sends are posted
            there.
        around_seconds: seconds of a step before its first op and after its last one on any worker; of a
            disturbed step those of a processor, without waits for other workers.
        message_core_seconds: processor seconds of a message, of all threads of both workers, beside ops and
            gaps; 0 if there are no messages, or several threads compute.
        by_worker: seconds of all of a worker's ops, one micro-batch, by rank.
        spread: by stage, a low and a high quantile over steps and workers of its seconds, forward and
            backward together, as multiples of them.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gap_seconds: float
    around_seconds: float
    message_core_seconds: float = 0.0
    by_worker: tuple[float, ...] = ()
    spread: tuple[tuple[float, float], ...] = ()


@dataclass(slots=True)
class _Turn:
    """Parts of a timed step, in seconds; ``step`` and ``waiting`` are equal on all workers.

    ``carried`` are processor seconds between its ops and of threads that carry messages.
    """

    step: float
    waiting: float
    around: float
    carried: float
    ops: dict[tuple[OpKind, int], list[Lap]] = field(default_factory=lambda: defaultdict(list))
    gaps: list[Lap] = field(default_factory=list)


class OpTimer:
    """Times the ops of a synchronous pipeline. All workers call all methods.

    Args:
        pipeline: the pipeline to time, which trains.
        inputs: see ``Pipeline.step``.
        targets: see ``Pipeline.step``.
        laps: list of the laps of its last step's ops on this worker; None, or empty after a step: ops of its
            replica are timed by the wall alone.
    """

    def __init__(
        self, pipeline: Pipeline, inputs: Any, targets: Any, laps: list[OpLap] | None = None
    ) -> None:
        self.pipeline = pipeline
        self._batch = inputs, targets
        self._last_stage = pipeline.schedule.stages - 1
        self._turns: list[_Turn] = []
        self._laps = [] if laps is None else laps

    @property
    def repeats(self) -> TimedSteps:
        """The timed steps."""
        turns = self._turns
        return TimedSteps(tuple(turn.step for turn in turns), tuple(turn.waiting for turn in turns))

    def warm_up(self, steps: int = WARM_UP_STEPS) -> None:
        """Run steps that are not timed."""
        for _ in range(steps):
            self.pipeline.step(*self._batch)

    def turn(self) -> None:
        """Run a timed step."""
        pipeline = self.pipeline
        pipeline.transport.gather([])  # all begin together
        threads, process, begin = thread_times(), time.process_time(), read_start()
        step = pipeline.step(*self._batch)
        passed, process = lap(begin, read_stop()), time.process_time() - process
        waiting = waiting_share([thread_lap(op.begin, op.end) for op in self._laps])
        if waiting is None:
            waiting = min(1.0, computing_wait(threads, thread_times()) / passed.wall)
        rows = pipeline.transport.gather([step.seconds, waiting])
        seconds, waiting = (max(column) for column in zip(*rows, strict=True))
        timeline = pipeline.timeline(pipeline.replica)
        begins = min(row[0][1] for row in timeline if row)
        ends = max(row[-1][2] for row in timeline if row)
        around = seconds - (ends - begins)
        carried = 0.0
        if self._laps:
            inside = self._laps[-1].end.processor - self._laps[0].begin.processor
            if waiting > WAITING:
                around = min(around, passed.processor - inside)
            in_ops = sum(op.end.processor - op.begin.processor for op in self._laps)
            carried = process - passed.processor + inside - in_ops
        turn = _Turn(seconds, waiting, around, carried)
        if self._laps:
            self._read_laps(turn)
        else:
            for row in timeline:
                for op, start, end in row:
                    turn.ops[op.kind, op.stage].append(_by_wall(end - start))
                turn.gaps += [_by_wall(b[1] - a[2]) for a, b in pairwise(row) if self._takes_no_message(b[0])]
        self._turns.append(turn)

    def _read_laps(self, turn: _Turn) -> None:
        for op, begin, end in self._laps:
            turn.ops[op.kind, op.stage].append(thread_lap(begin, end))
        turn.gaps += [
            thread_lap(before.end, after.begin)
            for before, after in pairwise(self._laps)
            if self._takes_no_message(after.op)
        ]

    def times(self, quietest: float = 1.0) -> OpTimes:
        """Results of the turns.

        Args:
            quietest: share of the steps that count, which are the fastest ones.
        """
        turns = least(self._turns, quietest, key=lambda turn: turn.step)
        keys = {key: None for turn in turns for key in turn.ops}
        laps = {key: [lap for turn in turns for lap in turn.ops[key]] for key in keys}
        exact = {key: is_exact(laps[key]) for key in keys}
        means = {key: mean_seconds(undisturbed(laps[key], exact=exact[key])) for key in keys}
        lows, highs = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        for turn in turns:
            seconds: dict[int, list[tuple[float, float]]] = defaultdict(list)
            for (kind, stage), ops in turn.ops.items():
                mean = mean_seconds(undisturbed(ops, exact=exact[kind, stage]))
                least_mean = mean if exact[kind, stage] else (1 - turn.waiting) * mean
                seconds[stage].append((least_mean, mean))
            for stage, ranges in seconds.items():
                low, high = map(sum, zip(*ranges, strict=True))
                lows[stage].append(low)
                highs[stage].append(high)
        gap = mean_seconds(undisturbed([gap for turn in turns for gap in turn.gaps]))
        around = mean_seconds([turn.around for turn in turns])
        silent = [gap.processor for turn in turns for gap in turn.gaps]  # part of an op's overhead
        between = max(0, len(self._laps) - 1) * statistics.fmean(silent or [0.0])
        carried = statistics.fmean([turn.carried for turn in turns]) - between
        results = _WorkerTimes(means, dict(lows), dict(highs), gap, around, carried)
        rows = cast("list[_WorkerTimes]", self.pipeline.transport.gather_objects(results))
        stages = range(self._last_stage + 1)
        forward, backward = (
            tuple(
                statistics.median(row.means[kind, stage] for row in rows if (kind, stage) in row.means)
                for stage in stages
            )
            for kind in (OpKind.FORWARD, OpKind.BACKWARD)
        )
        spread = (
            spread_of(
                forward[stage] + backward[stage],
                [seconds for row in rows for seconds in row.lows.get(stage, ())],
                [seconds for row in rows for seconds in row.highs.get(stage, ())],
            )
            for stage in stages
        )
        return OpTimes(
            forward,
            backward,
            statistics.median(row.gap for row in rows),
            statistics.median(row.around for row in rows),
            self._for_each_message(max(0.0, row.carried) for row in rows),
            tuple(sum(row.means.values()) for row in rows),
            tuple(spread),
        )

    def _for_each_message(self, seconds: Iterable[float]) -> float:
        schedule = self.pipeline.schedule
        messages = len(messages_of(OpGraph(schedule, Nodes(schedule))).makers)
        return sum(seconds) / messages if messages and torch.get_num_threads() == 1 else 0.0

    def _takes_no_message(self, op: Op) -> bool:
        return op.stage == (0 if op.kind.is_forward else self._last_stage)


@dataclass(frozen=True, slots=True)
class _WorkerTimes:
    """Times on a worker: means by op, low and high seconds of a stage in each step, gaps and the rest.

    ``carried`` is as that of a step, without the gaps.
    """

    means: dict[tuple[OpKind, int], float]
    lows: dict[int, list[float]]
    highs: dict[int, list[float]]
    gap: float
    around: float
    carried: float


def _by_wall(seconds: float) -> Lap:
    return Lap(seconds, seconds, None)


def spread_of(seconds: float, lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Quantiles ``LOW`` and ``HIGH`` of repeats, as multiples of a time that is between them.

    Args:
        seconds: the time.
        lows: seconds of each repeat, without those in which threads may have waited for a processor.
        highs: seconds of each repeat.

    >>> spread_of(2.0, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    (0.6, 1.4)
    """
    if not seconds or not lows:
        return 1.0, 1.0
    low, high = float(np.quantile(lows, LOW)), float(np.quantile(highs, HIGH))
    return min(1.0, low / seconds), max(1.0, high / seconds)


def least(values: Sequence[T], share: float, key: Callable[[T], float]) -> list[T]:
    """A share of the values, at least one: the smallest by ``key``.

    >>> least([4, 1, 3, 2], 0.5, key=float)
    [1, 2]
    """
    return sorted(values, key=key)[: max(1, math.ceil(share * len(values)))]
