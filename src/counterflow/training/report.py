"""What a run tells of itself: plain records, which are written to files and shown while it runs.

Invariant: what is shown is what is written, or is about to be, and what ``--json`` prints. Nothing here
prints or knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from counterflow.schedule.ir import OptionValue
from counterflow.shown import Part, Result, result_of, said

Numbers = dict[str, float]
"""One line of ``metrics.jsonl``.

Of a step: ``step`` (updates made so far, this one among them), ``loss``, ``grad_norm``, ``learning_rate``,
``samples_per_second`` and ``seconds`` (since training began). Of an evaluation: ``step``,
``validation_loss``, with averaged weights ``ema_validation_loss``, and ``seconds``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is trained, known before any process starts.

    Attributes:
        model: its architecture and shape, in words.
        parameters: how many numbers it has.
        text: what it is trained on.
        text_bytes: its length.
        unigram_entropy: loss of a model that knows only how frequent each target is, in nats a target.
        scheme: name of the schedule's scheme.
        options: its options.
        workers: of a pipeline group.
        replicas: pipeline groups.
        pipes: passes through all stages.
        stage_layers: first and last layer of each stage.
        micro_batches: of a replica's mini-batch.
        samples: of a mini-batch of all replicas.
        positions: tokens of a sample.
        steps: updates to be made in total.
        first_step: updates made by the run that this one resumes.
        resumed: the checkpoint that it goes on from; None without.
        changed: the keys of the config that have other values than when that was written, with both.
        workers_here: workers on this machine.
        cores: CPU cores that they may use.
        on_cpu: whether workers compute on them.
        unit: what a token is: ``byte``, or ``token`` of a tokenizer.
        target: what the model is to tell: ``byte``, ``token``, or ``label`` of a text.
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

    @property
    def processes(self) -> int:
        """Workers of all replicas."""
        return self.workers * self.replicas

    @property
    def shares_cores(self) -> bool:
        """Whether several workers compute on one core."""
        return self.on_cpu and self.workers_here > self.cores


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure as it was measured, and as the simulator predicted it from the stages' measured costs."""

    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a run.

    Attributes:
        about: what was trained.
        steps: updates made in total.
        stopped: whether it was ended before all steps were made.
        seconds: of training, evaluations among them.
        samples_per_second: over all steps, without evaluations.
        planned_samples_per_second: what the plan that was trained expected; None without one.
        training_loss: mean of the last ``training_steps`` steps.
        training_steps: those: 10, or fewer if there were fewer.
        validation_loss: on the part of the text that is kept for it, after the last step.
        timed_together: steps; 1, or in asynchronous schemes those from an empty pipeline to an empty one.
        sampled_steps: whose ops were timed (the last of those timed together); the three figures below are
            medians over them.
        step_seconds: of a whole step: ops, syncs, updates and agreement.
        ops_seconds: from the first op's start to the last one's end.
        bubble_ratio: share of that in which workers have no op to run; asynchronous: between warm-up and
            drain.
        saved_bytes: most bytes saved for backward at once, by worker.
        stages_held: most weights held at once, in stages with versions counted, by worker.
        memory_bytes: by worker the most memory in use: what torch allocated on its GPU, or on the CPU what of
            its process was resident, with Python, torch and other workers in it; and as predicted: weights,
            gradients, optimiser state and what is saved for backward.
        beside_torch_bytes: by worker what of its GPU was in use at the end beside what torch's allocator had:
            CUDA, communicators, other processes; empty on the CPU.
        slowdown: the time of all ops in the run over their time when they were timed before it; 1: as quick.
        as_ran_seconds: what is predicted in place of ``ops_seconds`` for ops as long as they were in the run.
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


_FOLDER = Annotated[str, said("of the results")]

Prepared = result_of(
    "`counterflow train --dry-run`.",
    Result,
    About,
    folder=_FOLDER,
    least_bytes=Annotated[
        list[int], said("by worker: weights, gradients and optimiser state; activations come on top")
    ],
)

Trained = result_of("`counterflow train`.", Result, About, Summary, folder=_FOLDER)


def prepared(about: About, folder: Path, least_bytes: Sequence[int]) -> Result:
    """What would be trained, and what each worker holds of it at least."""
    return Prepared.of(**asdict(about), folder=str(folder), least_bytes=list(least_bytes))


def trained(summary: Summary, folder: Path) -> Result:
    """What came of a run."""
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

    key: Annotated[str, said("with its section: `train.steps`")]
    default: Annotated[Any, said("null where another key or the data decides")]
    about: Annotated[str, said("what it means")]
    legal: Annotated[str, said("what it may be")]


class Keys(Result):
    """`counterflow train --keys`."""

    keys: list[KeyShown]
