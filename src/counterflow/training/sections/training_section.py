"""The tables ``[optimizer]``, ``[train]`` and ``[plan]``: how weights are updated, how long, and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict, model_validator

from counterflow.common import toml
from counterflow.common.options import option
from counterflow.errors import ConfigError

from .. import source_registry
from .keys import AUTO, MANY, PATH, SHARE, PathKey, Section, WholeNumbers, as_path, count

MOST_TOKENS = 2**27
"""Maximum tokens of a replica's mini-batch: a gigabyte; the largest models are trained on about 2²⁴ in total.
"""


def _as_resumed(value: object) -> Path | str:
    return AUTO if value == AUTO else as_path(value)


ResumeKey = Annotated[Path | str, BeforeValidator(_as_resumed)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)
]


class OptimizerSection(Section):
    """Optimiser, learning rate and weight decay."""

    name: Literal["adamw", "adam", "sgd"] = option("adamw", "one of adamw, adam, sgd")
    """Optimiser of torch."""

    learning_rate: float | None = option(
        None,
        "a finite number, more than 0",
        gt=0,
        description="maximum learning rate; "
        + ", ".join(source.usual_rate for source in source_registry.sources()),
    )

    weight_decay: float = option(0.01, "a finite number, 0 or more", ge=0)
    """Weight decay; norms and biases do not decay."""

    betas: Betas = option((0.9, 0.99), "a list of 2 numbers, each from 0 to less than 1")
    """adam, adamw: decay of both averages"""

    momentum: float = option(0.0, SHARE, ge=0, lt=1)
    """sgd: momentum"""

    warmup_steps: int | None = count(None, MANY, least=0)
    """Steps in which the learning rate rises to its maximum; default: a quarter of all steps."""

    schedule: Literal["constant", "cosine", "linear"] = option("cosine", "one of constant, cosine, linear")
    """Course of the learning rate after the warm-up; all but constant fall to 0."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        unused = "betas" if self.name == "sgd" else "momentum"
        value = getattr(self, unused)
        if value != type(self).model_fields[unused].default:
            uses = "momentum" if self.name == "sgd" else "betas"
            raise ConfigError(
                f"optimizer.{unused} = {toml.shown(value)}: {self.name} has no such key (it has {uses}); "
                f"leave it out, or choose another optimizer.name"
            )
        return self


class TrainSection(Section):
    """Length of the training, and what is saved."""

    steps: int = count(400, MANY)
    """Mini-batches to train on, one update each."""

    samples: int = count(64, MOST_TOKENS)
    """Samples of a mini-batch for each replica."""

    seed: int = option(0, "a whole number, 0 to 4294967295", ge=0, lt=2**32)
    """Seed of the weights, the data and dropout."""

    evaluate_every: int = count(50, MANY, least=0)
    """Steps between validation losses; 0: at the end only."""

    checkpoint_every: int = count(50, MANY, least=0)
    """Steps between checkpoints; 0: at the end only."""

    memory_every: int | None = count(None, MANY, least=0)
    """Steps between copies of the weights to the machines' memory, for restarts; 0: never; default: as often
    as takes at most 5 % of the time, if restarts are allowed.
    """

    fewer_after: float | None = option(None, "a number of seconds, 0 or more, at most 1000000", ge=0, le=1e6)
    """restarts: continue with fewer workers, as the planner chooses, if one does not return within this many
    seconds; default: wait for all
    """

    ema_decay: float | None = option(None, SHARE, ge=0, lt=1)
    """Keep an exponential moving average of the weights, with this share of itself at each update; default:
    no average.
    """

    keep_last: int = count(2, MANY)
    """Number of last checkpoints that are kept."""

    keep_best: bool = option(True, "true or false")
    """Whether the checkpoint with the lowest validation loss is kept too."""

    out: PathKey | None = option(None, PATH)
    """Folder of the results, which all machines see; default: the next free runs/SCHEME-NUMBER."""

    resume: ResumeKey | None = option(None, 'a path, in quotes, or "auto"')
    """Folder of a run to resume from its last checkpoint, in place unless train.out is given; auto: resume in
    train.out, or start there if it has no checkpoint; default: fresh weights.
    """

    loggers: Annotated[tuple[Literal["tensorboard"], ...], Strict(False)] | None = option(
        None, 'a list; known: "tensorboard"'
    )
    """Further writers of metrics, each into a folder of its name in the run's folder; needs their extra."""

    threads: int | None = count(None, 1_024)
    """Threads per worker; default: the cores divided by the workers."""


class PlanSection(Section):
    """Prediction of ``counterflow plan`` for the run, shown in its summary; only ``devices`` changes the
    run.
    """

    cluster: str | None = option(None, "a text, in quotes")
    """Devices that the run was planned for."""

    profile: str | None = option(None, "a text, in quotes")
    """Costs of layers on these devices."""

    mini_batch: int | None = count(None, MANY)
    """Samples of an update, over all replicas."""

    micro_batch: int | None = count(None, MANY)
    """Samples of a micro-batch."""

    layout: str | None = option(None, "a text, in quotes")
    """The stages as a layout of Megatron-LM."""

    arrangement: str | None = option(None, "a text")
    """Which workers share a node: pipeline-inside, replicas-inside or copies-inside."""

    devices: WholeNumbers | None = option(None, "a list of whole numbers")
    """The device, which is the rank, of each worker of replica 0, of replica 1, …, at each position of the
    mesh; counted from 0 node by node.
    """

    step_seconds: float | None = option(None, "a number", ge=0)
    """Seconds of one update."""

    samples_per_second: float | None = option(None, "a number", ge=0)
    """Throughput of all replicas."""

    bubble_ratio: float | None = option(None, "a number", ge=0)
    """Share of a step in which a worker is idle."""

    peak_bytes: Annotated[tuple[float, ...], Strict(False)] | None = option(None, "a list of numbers")
    """Memory of each worker, without the cluster's reserve."""

    @model_validator(mode="after")
    def _check(self) -> PlanSection:
        if self.devices is not None and sorted(self.devices) != list(range(len(self.devices))):
            raise ConfigError(
                f"plan.devices = {toml.shown(self.devices)}: must contain each device from 0 on once; leave "
                "it "
                "out to place the workers of a replica side by side"
            )
        return self

    def devices_of(self, ranks: int) -> tuple[int, ...] | None:
        """The device of each rank; None if the plan is for another number of them."""
        return self.devices if self.devices is not None and len(self.devices) == ranks else None

    def ranks(self, workers: int, replicas: int) -> list[tuple[int, ...]] | None:
        """The rank of each worker, by replica; None if the plan has another layout."""
        devices = self.devices_of(workers * replicas)
        if devices is None:
            return None
        return [devices[r * workers : (r + 1) * workers] for r in range(replicas)]
