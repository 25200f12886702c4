"""Measures a model's layers in training steps.

In one pipeline each layer is a stage of its own, which gives its share; in another the model is one stage,
which gives the sum without the runtime's code around each layer. The difference is that code.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from counterflow.common.laps import OP_LAPS, Lap, OpLap, read_start, read_stop
from counterflow.errors import CounterflowError
from counterflow.runtime.mini_batch.samples import samples_in
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes import dapple, gpipe, interleaved

from .disturbance import TimedSteps, thread_lap, undisturbed
from .op_times import WARM_UP_STEPS, OpTimer, least
from .sequences import Growth, at_lengths, positions_of_batch
from .stages.stage_record import StageCost
from .stages.timing import measure_stages
from .stages.update_memory import UpdateMemory, measure_update
from .subject_pipeline import Subject, pipeline_alone, pipeline_of, with_copies

MICRO_BATCHES = 4
"""Micro-batches of a timed step, on each stage."""


@dataclass(frozen=True, slots=True)
class AtSize:
    """Costs of layers at a size of micro-batches, in samples.

    ``costs`` are those of each layer as a stage, with its seconds in a step; ``overhead_seconds`` is the time
    of an op in addition to its layers, ``by_worker`` the total time of each worker, by rank, ``waiting`` the
    mean share of the ops in which threads waited for a processor.
    """

    size: int
    costs: tuple[StageCost, ...]
    overhead_seconds: float
    update_seconds_per_byte: float
    update: UpdateMemory
    by_worker: tuple[float, ...] = ()
    waiting: float = 0.0


def bytes_of(make: Callable[[Schedule], Pipeline], layers: int, inputs: Any, targets: Any) -> AtSize:
    """Memory of layers, without times, for a micro-batch as large as these inputs.

    Args:
        make: function that makes a pipeline of one worker with the model.
        layers: number of layers.
        inputs: inputs as in ``Pipeline.step``.
        targets: targets as in ``Pipeline.step``.
    """
    pipeline, by_layer = make(dapple(1, 1)), make(interleaved(1, 1, chunks=layers))
    pipeline.step(inputs, targets)
    by_layer.step(inputs, targets)
    costs = measure_stages(by_layer, inputs, targets, repeats=1)
    ones = (1.0,) * layers
    size = samples_in(inputs, by_layer.batching.input_dims)
    return AtSize(size, in_step(costs, ones, ones), 0.0, 0.0, measure_update(pipeline, by_layer))


def in_step(
    costs: Sequence[StageCost],
    forward: Sequence[float],
    backward: Sequence[float],
    spread: Sequence[tuple[float, float]] = (),
) -> tuple[StageCost, ...]:
    """Costs of stages with their seconds in a step, and the spread of these, as in ``OpTimes``.

    The halves of a split backward are in proportion to their measured times, scaled to the full backward.
    """

    def scaled(half: float, backward: float, seconds: float) -> tuple[float]:
        return (seconds * half / backward if backward else 0.0,)

    stages = []
    quantiles = spread or [(1.0, 1.0)] * len(costs)
    for cost, ahead, back, (low, high) in zip(costs, forward, backward, quantiles, strict=True):
        profile = replace(
            cost.profile,
            low_factors=(low,),
            high_factors=(high,),
            forward_seconds=(ahead,),
            backward_seconds=(back,),
            input_gradient_seconds=scaled(cost.input_gradient_seconds, cost.backward_seconds, back),
            weight_gradients_seconds=scaled(cost.weight_gradients_seconds, cost.backward_seconds, back),
        )
        stages.append(replace(cost, profile=profile))
    return tuple(stages)


class _Turns:
    """Pipelines that are timed alternately, and updates of the first; all workers call all methods."""

    def __init__(self, *timers: OpTimer) -> None:
        self._timers = timers
        self._updates: list[Lap] = []

    def warm_up(self, steps: int = WARM_UP_STEPS) -> None:
        """Run steps that are not timed."""
        for timer in self._timers:
            timer.warm_up(steps)

    def turn(self) -> None:
        """Run a step of each pipeline, and an update."""
        for timer in self._timers:
            timer.turn()
        if self._timers:
            self._updates.append(_update_lap(self._timers[0].pipeline))

    @property
    def repeats(self) -> TimedSteps:
        """The timed steps of the slowest of the pipelines, which has the most work."""
        by_timer = [timer.repeats for timer in self._timers]
        return max(by_timer, key=lambda repeats: sum(repeats.seconds), default=TimedSteps((), ()))

    def update_seconds(self, quietest: float) -> float:
        """Seconds of an update of this worker, from the turns."""
        return statistics.median(least(undisturbed(self._updates), quietest, key=float))

    def close(self) -> None:
        """Free the timed pipelines."""
        for pipeline in {id(timer.pipeline): timer.pipeline for timer in self._timers}.values():
            pipeline.close()


class LayerTimer(_Turns):
    """Times layers at a size of micro-batches; all workers call all methods."""

    def __init__(self, subject: Subject, size: int) -> None:
        self.size = size
        self._batch = subject.batch(size * MICRO_BATCHES)
        count = len(subject.layers)
        by_layer, single = _by_layer(count, MICRO_BATCHES), dapple(1, MICRO_BATCHES)
        super().__init__(*(_timer(subject, schedule, self._batch) for schedule in (single, by_layer)))

    def result(self, quietest: float = 1.0) -> AtSize:
        """Times from the turns (see ``OpTimer.times``), and bytes."""
        single, by_layer = (timer.pipeline for timer in self._timers)
        single_times, by_layer_times = (timer.times(quietest) for timer in self._timers)
        costs = measure_stages(by_layer, *self._batch, repeats=3)
        forward, in_forward = without_overhead(by_layer_times.forward, single_times.forward[0])
        backward, in_backward = without_overhead(by_layer_times.backward, single_times.backward[0])
        return AtSize(
            self.size,
            in_step(with_copies(costs, by_layer), forward, backward, by_layer_times.spread),
            (in_forward + in_backward) / 2,
            self.update_seconds(quietest) / max(1, trained_bytes(single)),
            measure_update(single, by_layer),
            single_times.by_worker,
            statistics.fmean(self.repeats.waiting),
        )


@dataclass(frozen=True, slots=True)
class AtLengths:
    """Costs of layers by the length of a sequence.

    Attributes:
        positions: positions of a whole sequence.
        lengths: the timed shares of it.
        seconds: forward and backward together of each layer, by length.
        state_bytes: by layer, for one sample, size of what slices leave to later ones, as far as it grows
            with them, and size of what each leaves however short it is.
    """

    positions: int
    lengths: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]
    state_bytes: tuple[tuple[float, float], ...]

    def growth(self, members: Sequence[int], overhead_seconds: float) -> Growth:
        """Growth of the seconds of layers of one kind.

        Args:
            members: their numbers.
            overhead_seconds: time of an op in addition to its layer, which is in the seconds.
        """
        seconds = [
            sum(max(_LEAST * row[layer], row[layer] - 2 * overhead_seconds) for layer in members)
            for row in self.seconds
        ]
        return Growth.of(
            self.lengths, seconds, attends=any(any(self.state_bytes[layer]) for layer in members)
        )


class LengthTimer(_Turns):
    """Times layers with shorter sequences; all workers call all methods.

    Nothing is timed if the model has no sequences that slices divide.
    """

    def __init__(self, subject: Subject, size: int) -> None:
        batch = subject.batch(size * MICRO_BATCHES)
        self._positions = positions_of_batch(*batch, subject.batching)
        self._states = _states(subject, subject.batch(size), size) if self._positions else None
        self._lengths: tuple[float, ...] = ()
        if self._states is None:
            super().__init__()
            return
        shorter = at_lengths(*batch, subject.batching)
        self._lengths = tuple(share for share, *_ in shorter)
        pipeline, laps = _timed_pipeline(subject, _by_layer(len(subject.layers), MICRO_BATCHES))
        super().__init__(*(OpTimer(pipeline, inputs, targets, laps) for _, inputs, targets in shorter))

    def result(self, quietest: float = 1.0) -> AtLengths | None:
        """Times from the turns, see ``OpTimer.times``; None if nothing was timed."""
        if self._states is None:
            return None
        times = [timer.times(quietest) for timer in self._timers]
        seconds = tuple(
            tuple(map(sum, zip(result.forward, result.backward, strict=True))) for result in times
        )
        return AtLengths(self._positions, self._lengths, seconds, self._states)


def _states(subject: Subject, batch: tuple[Any, Any], size: int) -> tuple[tuple[float, float], ...] | None:
    """Bytes that each layer leaves to later slices, as ``AtLengths`` has them; None if slices are refused.

    The first worker finds out alone while the others wait, so a refusal is no failure of theirs, and all know
    the same.
    """
    transport = current_transport()
    states = _states_alone(subject, batch, size) if transport.rank == 0 else None
    return cast("tuple[tuple[float, float], ...] | None", transport.gather_objects(states)[0])


def _states_alone(
    subject: Subject, batch: tuple[Any, Any], size: int
) -> tuple[tuple[float, float], ...] | None:
    schedule = _by_layer(len(subject.layers), 1, slices=2)
    try:
        pipeline = pipeline_alone(subject, schedule)
        pipeline.step(*batch)
        costs = measure_stages(pipeline, *batch, repeats=1)
        pipeline.close()
    except CounterflowError:
        return None
    return tuple((cost.profile.state_bytes / size, cost.profile.slice_state_bytes / size) for cost in costs)


class StepOverheads(NamedTuple):
    """Seconds of a step beside its ops and the optimiser.

    Attributes:
        gap: seconds between two ops.
        around: seconds before the first op and after the last.
        message_core: processor seconds of a message, see ``OpTimes``.
    """

    gap: float
    around: float
    message_core: float


class StepTimer(_Turns):
    """Times a pipeline over all workers between ops, and around them in a step.

    A model of fewer layers than workers ends in layers that return their input.
    """

    def __init__(self, subject: Subject, size: int) -> None:
        workers = current_transport().world_size
        schedule = gpipe(workers, 2 * MICRO_BATCHES)
        further = [nn.Identity() for _ in range(workers - len(subject.layers))]
        subject = replace(subject, layers=[*subject.layers, *further])
        super().__init__(_timer(subject, schedule, subject.batch(2 * MICRO_BATCHES * size)))

    def result(self, quietest: float = 1.0) -> StepOverheads:
        """Seconds beside the ops. See ``OpTimer.times``."""
        (timer,) = self._timers
        times = timer.times(quietest)
        update = max(row[0] for row in timer.pipeline.transport.gather([self.update_seconds(quietest)]))
        around = max(0.0, times.around_seconds - update)
        return StepOverheads(times.gap_seconds, around, times.message_core_seconds)


def _update_lap(pipeline: Pipeline) -> Lap:
    """Lap of an update of this worker's weights, with zero gradients, because without gradients nothing
    is updated.
    """
    pipeline.weights.attach()
    begin = read_start()
    for optimizer in pipeline.optimizers.values():
        optimizer.step()
    if pipeline.device.type == "cuda":
        torch.cuda.synchronize(pipeline.device)
    update = thread_lap(begin, read_stop())
    pipeline.weights.detach()
    return update if pipeline.device.type == "cpu" else update._replace(waits=None)


def trained_bytes(pipeline: Pipeline) -> int:
    """Bytes of this worker's trained weights."""
    parameters = {id(p): p for copy in pipeline.stages.values() for p in copy.parameters()}
    return sum(p.nbytes for p in parameters.values() if p.requires_grad)


def timed(
    make: Callable[[Subject, int], LayerTimer | LengthTimer | StepTimer],
    subject: Subject,
    size: int,
    repeats: int,
    *,
    repeating: bool = True,
) -> Any:
    """Run a timer's turns on a worker: up to twice ``repeats`` if some are disturbed; the fastest count.

    All workers run as many, because they judge by equal numbers.

    Args:
        make: function that makes the timer of a subject at a size.
        subject: the subject.
        size: samples of a micro-batch.
        repeats: number of turns that count.
        repeating: False: workers share cores and wait for each other, so waits are no disturbance.
    """
    timer = make(subject, size)
    timer.warm_up()
    for _ in range(repeats):
        timer.turn()
    while repeating and not timer.repeats.suffice(repeats):
        timer.turn()
    result = timer.result(repeats / len(timer.repeats.seconds) if timer.repeats.seconds else 1.0)
    timer.close()
    del timer
    gc.collect()  # closed pipelines are in circles, and the next ones need their memory
    return result


_LEAST = 0.1
"""Minimum share of a layer's time that counts as the layer's, however small it is compared with the overhead.
"""


def without_overhead(by_layer: Sequence[float], together: float) -> tuple[tuple[float, ...], float]:
    """Layers' seconds that add up to their time together, and the additional time of each alone.

    The time of the layers together contains that overhead once as well; it is subtracted.

    >>> without_overhead((2.0, 4.0), 5.0)
    ((1.0, 3.0), 1.0)
    >>> without_overhead((2.0, 4.0), 9.0)  # nothing more: in proportion
    ((3.0, 6.0), 0.0)
    """
    more = (sum(by_layer) - together) / (len(by_layer) - 1) if len(by_layer) > 1 else 0.0
    if more <= 0.0:
        return tuple(seconds * together / sum(by_layer) for seconds in by_layer), 0.0
    return tuple(max(_LEAST * seconds, seconds - more) for seconds in by_layer), more


def _by_layer(layers: int, micro_batches: int, slices: int = 1) -> Schedule:
    """Each layer a stage of one worker.

    It is 1F1B, in which no op follows one of the same layer, so that it finds little in the caches.
    """
    if layers == 1:
        return dapple(stages=1, micro_batches=micro_batches, slices=slices)
    return interleaved(workers=1, micro_batches=micro_batches, chunks=layers, slices=slices)


def _timer(subject: Subject, schedule: Schedule, batch: tuple[Any, Any]) -> OpTimer:
    pipeline, laps = _timed_pipeline(subject, schedule)
    return OpTimer(pipeline, *batch, laps)


def _timed_pipeline(subject: Subject, schedule: Schedule) -> tuple[Pipeline, list[OpLap]]:
    """A pipeline, and the list that has the laps of its last step's ops on a device without streams."""
    laps: list[OpLap] = []
    token = OP_LAPS.set(laps)
    try:
        return pipeline_of(subject, schedule), laps
    finally:
        OP_LAPS.reset(token)
