"""Reports of a run: plain records, written to files and shown while the run is in progress.

Invariant: what is shown is the same as what is written and what ``--json`` prints. Nothing here prints or
imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from counterflow.common.json_models import Part, Result, describe, result_of
from counterflow.schedule.ir import OptionValue

Numbers = dict[str, float]
"""One line of ``metrics.jsonl``.

A step's line contains ``step`` (updates made so far, this one among them), ``loss``, ``grad_norm``,
``learning_rate``, ``samples_per_second`` and ``seconds`` (since training began); if losses are scaled,
``loss_scale``, and if the update was skipped, ``skipped``, but no ``grad_norm``, and ``loss`` only if it is
finite. An evaluation's line contains ``step``, ``validation_loss``, with averaged weights
``ema_validation_loss``, and ``seconds``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Description of a run, known before any process starts.

    Attributes:
        model: architecture and shape of the model, in words.
        parameters: number of parameters.
        text: name of the text that it is trained on.
        text_bytes: length of the text in bytes.
        unigram_entropy: loss of a model that knows only how frequent each target is, in nats per target.
        scheme: name of the schedule's scheme.
        options: options of the scheme.
        workers: workers of a pipeline group.
        replicas: number of pipeline groups.
        mesh: names and sizes of the mesh's dimensions inside of a stage; empty: each stage is on one rank.
        pipes: passes through all stages.
        stage_layers: first and last layer of each stage.
        micro_batches: micro-batches of a replica's mini-batch.
        samples: samples of a mini-batch, over all replicas.
        positions: tokens of a sample.
        steps: updates to be made in total.
        first_step: updates made by the run that this one resumes.
        resumed: checkpoint that the run resumes from; None: none.
        changed: keys of the config that differ from that checkpoint's, with both values.
        workers_here: workers on this machine.
        cores: CPU cores that they may use.
        on_cpu: whether workers compute on the CPU.
        unit: what a token is: ``byte``, or ``token`` of a tokenizer.
        target: what the model predicts: ``byte``, ``token``, or ``label`` of a text.
        where: where workers compute, and what carries their messages, in words.
    """

    model: str
    parameters: int
    text: str
    text_bytes: int
    unigram_entropy: float
    scheme: str
    options: dict[str, OptionValue]
    workers: int
    replicas: int
    pipes: int
    stage_layers: tuple[tuple[int, int], ...]
    micro_batches: int
    samples: int
    positions: int
    steps: int
    first_step: int
    resumed: str | None = None
    changed: tuple[str, ...] = ()
    workers_here: int
    cores: int
    on_cpu: bool
    unit: str = "byte"
    target: str = "byte"
    where: str = "on the CPU"
    mesh: dict[str, int] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Number of ranks: workers of all replicas, at all positions of the mesh."""
        return self.workers * self.replicas * math.prod(self.mesh.values())

    @property
    def sample_shares(self) -> int:
        """Number of groups of ranks that have samples of their own."""
        return self.replicas * math.prod(n for name, n in self.mesh.items() if name.startswith("dp_shard"))

    @property
    def shares_cores(self) -> bool:
        """True if several workers share a core."""
        return self.on_cpu and self.workers_here > self.cores


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured figure, and the simulator's prediction of it from the stages' measured costs."""

    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a run.

    Attributes:
        about: what was trained.
        steps: updates made in total.
        stopped: whether the run was ended before all steps were made.
        seconds: duration of training, including evaluations.
        samples_per_second: throughput over all steps, without evaluations.
        planned_samples_per_second: throughput that the plan predicted; None: no plan.
        training_loss: mean of the last ``training_steps`` steps.
        training_steps: number of these steps: 10, or all if there were fewer.
        validation_loss: loss on the held-out part of the text, after the last step.
        timed_together: number of steps that are timed together: 1, or in asynchronous schemes those from an
            empty pipeline to an empty one.
        sampled_steps: numbers of the steps whose ops were timed (the last of those timed together); the three
            figures below are medians over them.
        step_seconds: duration of a whole step: ops, syncs, updates and agreement.
        ops_seconds: time from the first op's start to the last one's end.
        bubble_ratio: share of that time in which workers have no op to run; in asynchronous schemes between
            warm-up and drain.
        saved_bytes: maximum bytes saved for backward at once, by worker.
        stages_held: maximum weights held at once, in stages with versions counted, by worker.
        memory_bytes: by worker the maximum memory in use: bytes that torch allocated on its GPU, or on the
            CPU the resident memory of its process, which includes Python, torch and other workers in it; the
            prediction covers weights, gradients, optimiser state and tensors saved for backward.
        beside_torch_bytes: by worker the bytes of its GPU that were in use at the end outside torch's
            allocator: CUDA, communicators, other processes; empty on the CPU.
        slowdown: the time of all ops in the run over their time when they were timed before it; 1: equally
            fast.
        as_ran_seconds: prediction of ``ops_seconds`` if ops take as long as they did in the run.
    """

    about: About
    steps: int
    stopped: bool
    seconds: float
    samples_per_second: float
    planned_samples_per_second: float | None
    training_loss: float
    training_steps: int
    validation_loss: float
    timed_together: int
    sampled_steps: tuple[int, ...]
    step_seconds: float
    ops_seconds: Pair
    bubble_ratio: Pair
    saved_bytes: tuple[Pair, ...]
    stages_held: tuple[Pair, ...]
    memory_bytes: tuple[Pair, ...] = ()
    beside_torch_bytes: tuple[float, ...] = ()
    slowdown: float = 1.0
    as_ran_seconds: float | None = None


_FOLDER = Annotated[str, describe("of the results")]


class WeightsShown(Part):
    """Weights that a mesh divides, sums and counts alike."""

    stages: Annotated[list[int], describe("stages that hold them")]
    names: Annotated[list[str], describe("names in the model")]
    ranks: Annotated[list[int], describe("ranks that hold a part")]
    contents: Annotated[dict[str, str], describe("by dimension of the mesh: replicated, shard or expert")]
    summed_by_engine: Annotated[
        list[list[int]], describe("groups of ranks over which Counterflow sums gradients")
    ]
    summed_by_fsdp: Annotated[list[str], describe("dimensions over which fully_shard sums gradients")]
    counted_by: Annotated[list[int], describe("ranks whose part counts in the gradient norm")]


class WorkerMemoryShown(Part):
    """Bytes of a worker when they are most, in a step after the first ones."""

    worker: Annotated[int, describe("number of the worker")]
    weights: Annotated[int, describe("weights in all versions, and buffers")]
    gradients: Annotated[int, describe("gradients, and buffers in which they are summed")]
    optimizer: Annotated[int, describe("states of the optimizer")]
    activations: Annotated[int, describe("tensors that exist between ops")]
    messages: Annotated[int, describe("buffers of received messages")]
    workspace: Annotated[int, describe("what an op or an update allocates and frees while it runs")]


Prepared = result_of(
    "`counterflow train --dry-run`.",
    Result,
    About,
    folder=_FOLDER,
    least_bytes=Annotated[
        list[int], describe("by worker: weights, gradients and optimiser state; activations come on top")
    ],
    memory=Annotated[
        list[WorkerMemoryShown] | None, describe("by worker: bytes in a step; null: they were not counted")
    ],
    weights=Annotated[
        list[WeightsShown], describe("groups of weights that are divided alike; empty without [mesh]")
    ],
)

Trained = result_of("`counterflow train`.", Result, About, Summary, folder=_FOLDER)


def prepared(
    about: About,
    folder: Path,
    least_bytes: Sequence[int],
    memory: Sequence[Mapping[str, int]] | None = None,
    weights: Sequence[Mapping[str, Any]] = (),
) -> Result:
    """Description of what would be trained, the bytes of each worker at least and in a step, and weights."""
    return Prepared.of(
        **asdict(about),
        folder=str(folder),
        least_bytes=list(least_bytes),
        memory=None if memory is None else list(memory),
        weights=list(weights),
    )


def trained(summary: Summary, folder: Path) -> Result:
    """The result of a run."""
    return Trained.of(**{**asdict(summary.about), **asdict(summary)}, folder=str(folder))


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
        summary: losses, times and memory, measured and predicted.
        folder: the run's folder: config, metrics, checkpoint, timeline.
    """

    summary: Summary
    folder: Path


class KeyShown(Part):
    """A key of a config."""

    key: Annotated[str, describe("the key with its section: `train.steps`")]
    default: Annotated[Any, describe("null if another key or the data decides")]
    about: Annotated[str, describe("meaning of the key")]
    legal: Annotated[str, describe("legal values")]


class ConfigKeys(Result):
    """`counterflow train --keys`."""

    keys: list[KeyShown]
