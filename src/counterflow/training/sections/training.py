"""The tables ``[optimizer]``, ``[train]`` and ``[plan]``: how weights are updated, how long, and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict, model_validator

from counterflow import toml
from counterflow.errors import ConfigError
from counterflow.execution import option

from .. import registry
from .keys import AUTO, MANY, PATH, SHARE, PathKey, Section, WholeNumbers, as_path, count

MOST_TOKENS = 2**27
"""Of the mini-batch of a replica: a gigabyte; the largest models are trained on some 2²⁴ in all."""


def _as_resumed(value: object) -> Path | str:
    return AUTO if value == AUTO else as_path(value)


ResumeKey = Annotated[Path | str, BeforeValidator(_as_resumed)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)
]


class OptimizerSection(Section):
    """How weights are updated."""

    name: Literal["adamw", "adam", "sgd"] = option("adamw", "one of adamw, adam, sgd")
    """Which optimiser of torch."""

    learning_rate: float | None = option(
        None,
        "a finite number, more than 0",
        gt=0,
        description=f"largest learning rate; {', '.join(source.usual_rate for source in registry.sources())}",
    )

    weight_decay: float = option(0.01, "a finite number, 0 or more", ge=0)
    """Decay of weights; norms and biases have none."""

    betas: Betas = option((0.9, 0.99), "a list of 2 numbers, each from 0 to less than 1")
    """adam, adamw: decay of both averages"""

    momentum: float = option(0.0, SHARE, ge=0, lt=1)
    """sgd: momentum"""

    warmup_steps: int | None = count(None, MANY, least=0)
    """Steps in which the learning rate rises to its largest; a quarter of all where not given."""

    schedule: Literal["constant", "cosine", "linear"] = option("cosine", "one of constant, cosine, linear")
    """How the learning rate goes on, down to 0 but for constant."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        unused = "betas" if self.name == "sgd" else "momentum"
        value = getattr(self, unused)
        if value != type(self).model_fields[unused].default:
            uses = "momentum" if self.name == "sgd" else "betas"
            raise ConfigError(
                f"optimizer.{unused} = {toml.shown(value)}: {self.name} has none (it has {uses}); "
                f"leave it out, or choose another optimizer.name"
            )
        return self


class TrainSection(Section):
    """For how long, and what is kept."""

    steps: int = count(400, MANY)
    """Mini-batches to train on, one update each."""

    samples: int = count(64, MOST_TOKENS)
    """Samples of a mini-batch for each replica."""

    seed: int = option(0, "a whole number, 0 to 4294967295", ge=0, lt=2**32)
    """Of the weights, the data and dropout."""

    evaluate_every: int = count(50, MANY, least=0)
    """Steps between validation losses; 0: at the end only."""

    checkpoint_every: int = count(50, MANY, least=0)
    """Steps between checkpoints; 0: at the end only."""

    memory_every: int | None = count(None, MANY, least=0)
    """Steps between copies of the weights in the machines' memory, for restarts; 0: never; where not given,
    as often as takes 5 % of the time at most, if restarts are allowed.
    """

    fewer_after: float | None = option(None, "a number of seconds, 0 or more, at most 1000000", ge=0, le=1e6)
    """restarts: go on with fewer workers, as the planner chooses, when one does not come back within this
    many seconds; where not given all are waited for
    """

    ema_decay: float | None = option(None, SHARE, ge=0, lt=1)
    """Keep an exponential moving average of the weights, which keeps this share of itself at an update; where
    not given there is none.
    """

    keep_last: int = count(2, MANY)
    """Checkpoints that are kept, the last ones."""

    keep_best: bool = option(True, "true or false")
    """Whether the checkpoint of the least validation loss is kept too."""

    out: PathKey | None = option(None, PATH)
    """Folder of the results, that all machines see; the next free runs/SCHEME-NUMBER where not given."""

    resume: ResumeKey | None = option(None, 'a path, in quotes, or "auto"')
    """A run's folder, to go on from its last checkpoint, in it where train.out is not given; auto: in
    train.out, from its last one or from the begin; fresh weights where not given.
    """

    loggers: Annotated[tuple[Literal["tensorboard"], ...], Strict(False)] | None = option(
        None, 'a list; known: "tensorboard"'
    )
    """What else writes the metrics, into a folder of its name in the run's; needs its extra."""

    threads: int | None = count(None, 1_024)
    """Threads a worker computes with; the cores shared out where not given."""


class PlanSection(Section):
    """What ``counterflow plan`` expects of the run, told in its summary; but ``devices`` decides."""

    cluster: str | None = option(None, "a text, in quotes")
    """The devices it was planned for."""

    profile: str | None = option(None, "a text, in quotes")
    """What layers cost there."""

    mini_batch: int | None = count(None, MANY)
    """Samples of an update, of all replicas."""

    micro_batch: int | None = count(None, MANY)
    """Samples of a micro-batch."""

    arrangement: str | None = option(None, "a text")
    """Which workers share a node: pipeline-inside, replicas-inside or copies-inside."""

    devices: WholeNumbers | None = option(None, "a list of whole numbers")
    """The device, or rank, counted from 0 node by node, of each worker of replica 0, of replica 1, …."""

    step_seconds: float | None = option(None, "a number", ge=0)
    """One update."""

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
                f"plan.devices = {toml.shown(self.devices)}: must have each device from 0 on once; leave it "
                "out to place the workers of a replica side by side"
            )
        return self

    def ranks(self, workers: int, replicas: int) -> list[tuple[int, ...]] | None:
        """The rank of each worker, by replica; None where the plan is of another layout."""
        found = self.devices
        if found is None or len(found) != workers * replicas:
            return None
        return [found[r * workers : (r + 1) * workers] for r in range(replicas)]
