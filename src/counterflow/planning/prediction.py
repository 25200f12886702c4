"""Predictions as plain records: a configuration, the parts of its step, its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from counterflow.common.html import preformatted, table, titled
from counterflow.common.number_texts import byte_size
from counterflow.common.parallel_degrees import DEGREES, Degrees, by_letter
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.scheme import DEPTH, OptionType

from .cost.device_placement import Arrangement
from .cost.memory import WorkerMemory
from .cost.stages import Cuts, Cutting
from .search.node_orders import Runs

_ONE_POSITION = Degrees()


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to train: the subject of a prediction and of a plan file.

    Attributes:
        scheme: the scheme's name.
        options: its options without ``periods``, because the number of simulated updates is not a choice.
        replicas: W, copies of the whole pipeline group.
        samples: B, samples of a micro-batch.
        recompute: what a backward computes again.
        sync: when gradients are summed.
        arrangement: which devices the workers are on.
        cuts: cuts of the layers.
        degrees: degrees of a worker's positions, each with a whole pipeline group, and ``samples`` if they
            are positions of ``dp_shard``.
        nodes: the order of nodes of different kinds; empty: the cluster's order.
        zero_stage: 1: one of the holders of a weight keeps its optimiser state, updates it and sends it to
            the others.
    """

    scheme: str
    options: tuple[tuple[str, OptionValue], ...]
    replicas: int
    samples: int
    recompute: Recompute = Recompute.NONE
    sync: Sync = Sync.EAGER_OPT
    arrangement: Arrangement = Arrangement.PIPELINE_INSIDE
    cuts: Cuts = Cutting.BALANCED
    degrees: Degrees = _ONE_POSITION
    nodes: Runs = ()
    zero_stage: int = 0

    @classmethod
    def of(
        cls, scheme: str, options: Mapping[str, OptionValue], replicas: int, samples: int, **more: Any
    ) -> Configuration:
        """A configuration with options from a mapping."""
        recompute = Recompute(more.pop("recompute", Recompute.NONE))
        return cls(scheme, tuple(options.items()), replicas, samples, recompute=recompute, **more)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a step's seconds; they add up to the step.

    Attributes:
        compute: ops of a worker, averaged over workers.
        imbalance: compute of the busiest worker beyond the mean.
        bubbles: idle time of the busiest worker that the order alone causes.
        messages: time that messages add.
        allreduce: time that gradient syncs add without overlap.
        update: the optimiser, and the fixed time of an update.
        shared_cores: time that waits for cores add.
        broadcasts: time to send updated weights, if optimiser state is sharded.
    """

    compute: float
    imbalance: float
    bubbles: float
    messages: float
    allreduce: float
    update: float
    shared_cores: float
    broadcasts: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost of a configuration.

    Attributes:
        configuration: the configuration, with its cuts resolved.
        schedule: the schedule's text.
        workers: D, workers of a replica.
        micro_batches: N, micro-batches of an update on each replica.
        step_seconds: seconds of one mini-batch of ``mini_batch`` samples; in the steady state if
            asynchronous.
        steady_step_seconds: the same if steps follow each other without a barrier.
        mini_batch: samples of a step, over all replicas.
        updates: updates of the weights in that time; more than 1 if each micro-batch has its own.
        bubble_ratio: share of the step in which a worker is idle, averaged over workers.
        memory: memory of each worker at its peak.
        usable_bytes: memory that a device can use.
        notes: caveats of the prediction.
        usable_by_worker: memory that each worker can use, if devices differ; otherwise empty.
        mesh: devices by replica, worker and position, the latter of (dp_shard, cp, tp), for a ``DeviceMesh``;
            None if a worker has one.
        step_range_seconds: the step with the low and the high quantile of every layer's seconds, see
            ``Play.range_seconds``; None: the profile has no quantiles.
    """

    configuration: Configuration
    schedule: str
    workers: int
    micro_batches: int
    step_seconds: float
    steady_step_seconds: float
    mini_batch: int
    updates: int
    bubble_ratio: float
    memory: tuple[WorkerMemory, ...]
    usable_bytes: float
    notes: tuple[str, ...] = ()
    usable_by_worker: tuple[float, ...] = ()
    mesh: list[list[list[int]]] | None = None
    step_range_seconds: tuple[float, float] | None = None

    @property
    def step_text(self) -> str:
        """Seconds of a step for people, with the larger distance to an end of its range."""
        return seconds_text(self.step_seconds, self.step_range_seconds)

    @property
    def samples_per_second(self) -> float:
        """Throughput of all replicas."""
        return self.mini_batch / self.step_seconds if self.step_seconds else 0.0

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Memory of each worker at its peak, without the reserve."""
        return tuple(worker.total for worker in self.memory)

    @property
    def fits(self) -> bool:
        """True if every worker's memory suffices."""
        return self.needed_bytes <= self.had_bytes

    @property
    def needed_bytes(self) -> float:
        """Memory that the worker with the least room needs."""
        return self._fullest[0]

    @property
    def had_bytes(self) -> float:
        """Memory that this worker can use."""
        return self._fullest[1]

    @property
    def _fullest(self) -> tuple[float, float]:
        usable = self.usable_by_worker or (self.usable_bytes,) * len(self.memory)
        return max(zip(self.peak_bytes, usable, strict=True), key=lambda both: both[0] - both[1])

    def _repr_html_(self) -> str:
        return titled(self.schedule, ranking([self]), *map(preformatted, self.notes))


def seconds_text(seconds: float, within: tuple[float, float] | None = None) -> str:
    """Seconds for people, with the larger distance to an end of a range.

    >>> seconds_text(0.2835), seconds_text(0.2835, (0.28, 0.2921)), seconds_text(1.5, (1.5, 1.5))
    ('283.5 ms', '283.5 ± 8.6 ms', '1.5 s')
    """
    scale, unit = (1.0, "s") if seconds >= 1 else (1000.0, "ms")
    return f"{scale * seconds:.4g}{distance_text(seconds, within, scale)} {unit}"


def distance_text(seconds: float, within: tuple[float, float] | None, scale: float) -> str:
    """Larger distance of seconds to an end of a range, after ``±``; empty if it is small, or there is none.

    Args:
        seconds: the seconds.
        within: the range.
        scale: the unit per second.
    """
    distance = 0.0 if within is None else scale * max(seconds - within[0], within[1] - seconds)
    if distance <= 5e-4 * scale * seconds:
        return ""
    return f" ± {distance:.2g}" if distance < 100 else f" ± {distance:.0f}"


def choices(configuration: Configuration) -> str:
    """The options of a configuration other than its depth and micro-batches, for people.

    The number of parts of the model on a worker is shown even if it is the default; optimiser state is shown
    if it is sharded.

    >>> options = {"stages": 4, "micro_batches": 8, "pairs": 1, "concat": "forward-doubling"}
    >>> choices(Configuration.of("chimera", options, 1, 1))
    'concat=forward-doubling'
    """
    words = []
    for name, value in configuration.options:
        option = registry.option(configuration.scheme, name)
        assert option is not None
        plain = option.unsaid if option.kind is OptionType.NUMBER else option.default
        if value != plain and name not in (*DEPTH, "micro_batches"):
            words.append(f"{name}={value}")
    if configuration.zero_stage:
        words.append(f"zero_stage={configuration.zero_stage}")
    return " ".join(words)


def ranking(predictions: Iterable[Prediction]) -> str:
    """Predictions as an HTML table with one row each."""
    predictions = list(predictions)
    degrees = [by_letter(prediction.configuration.degrees) for prediction in predictions]
    used = [
        names.letter
        for name, names in DEGREES.items()
        if name == "tp" or any(letters[names.letter] > 1 for letters in degrees)
    ]
    heads = (
        "scheme",
        "D",
        "W",
        *used,
        "B",
        "N",
        "recompute",
        "sync",
        "step",
        "samples/s",
        "bubbles",
        "peak memory",
    )
    rows = []
    for prediction in predictions:
        plan, peak = prediction.configuration, byte_size(max(prediction.peak_bytes))
        rows.append(
            (
                *(plan.scheme, prediction.workers, plan.replicas),
                *(by_letter(plan.degrees)[letter] for letter in used),
                *(plan.samples, prediction.micro_batches),
                *(plan.recompute.value, plan.sync.value, prediction.step_text),
                *(f"{prediction.samples_per_second:.4g}", f"{prediction.bubble_ratio:.1%}"),
                f"{peak}{'' if prediction.fits else ': too large'}",
            )
        )
    return table(heads, rows)
