"""The tables ``[optimizer]``, ``[train]`` and ``[plan]``: how weights are updated, how long, and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict, model_validator

from counterflow import toml
from counterflow.errors import ConfigError

from .. import registry
from .keys import AUTO, MANY, PATH, SHARE, PathKey, Section, as_path, count, key

MOST_TOKENS = 2**27
"""Of the mini-batch of a replica: a gigabyte; the largest models are trained on some 2²⁴ in all."""


def _as_resumed(value: object) -> Path | str:
    return AUTO if value == AUTO else as_path(value)


ResumeKey = Annotated[Path | str, BeforeValidator(_as_resumed)]
WholeNumbers = Annotated[tuple[int, ...], Strict(False)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)
]


class OptimizerSection(Section):
    """How weights are updated."""

    name: Literal["adamw", "adam", "sgd"] = key(
        "adamw", "which optimiser of torch", "one of adamw, adam, sgd"
    )
    learning_rate: float | None = key(
        None,
        f"largest learning rate; {', '.join(source.usual_rate for source in registry.sources())}",
        "a finite number, more than 0",
        gt=0,
    )
    weight_decay: float = key(
        0.01, "decay of weights; norms and biases have none", "a finite number, 0 or more", ge=0
    )
    betas: Betas = key(
        (0.9, 0.99), "adam, adamw: decay of both averages", "a list of 2 numbers, each from 0 to less than 1"
    )
    momentum: float = key(0.0, "sgd: momentum", SHARE, ge=0, lt=1)
    warmup_steps: int | None = count(
        None,
        "steps in which the learning rate rises to its largest; a quarter of all where not given",
        MANY,
        least=0,
    )
    schedule: Literal["constant", "cosine", "linear"] = key(
        "cosine",
        "how the learning rate goes on, down to 0 but for constant",
        "one of constant, cosine, linear",
    )

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

    steps: int = count(400, "mini-batches to train on, one update each", MANY)
    samples: int = count(64, "samples of a mini-batch for each replica", MOST_TOKENS)
    seed: int = key(
        0, "of the weights, the data and dropout", "a whole number, 0 to 4294967295", ge=0, lt=2**32
    )
    evaluate_every: int = count(50, "steps between validation losses; 0: at the end only", MANY, least=0)
    checkpoint_every: int = count(50, "steps between checkpoints; 0: at the end only", MANY, least=0)
    memory_every: int | None = count(
        None,
        "steps between copies of the weights in the machines' memory, for restarts; 0: never; where not "
        "given, as often as takes 5 % of the time at most, if restarts are allowed",
        MANY,
        least=0,
    )
    fewer_after: float | None = key(
        None,
        "restarts: go on with fewer workers, as the planner chooses, when one does not come back within "
        "this many seconds; where not given all are waited for",
        "a number of seconds, 0 or more, at most 1000000",
        ge=0,
        le=1e6,
    )
    ema_decay: float | None = key(
        None,
        "keep an exponential moving average of the weights, which keeps this share of itself at an update; "
        "where not given there is none",
        SHARE,
        ge=0,
        lt=1,
    )
    keep_last: int = count(2, "checkpoints that are kept, the last ones", MANY)
    keep_best: bool = key(
        True, "whether the checkpoint of the least validation loss is kept too", "true or false"
    )
    out: PathKey | None = key(
        None,
        "folder of the results, that all machines see; the next free runs/SCHEME-NUMBER where not given",
        PATH,
    )
    resume: ResumeKey | None = key(
        None,
        "a run's folder, to go on from its last checkpoint, in it where train.out is not given; "
        "auto: in train.out, from its last one or from the begin; fresh weights where not given",
        'a path, in quotes, or "auto"',
    )
    loggers: Annotated[tuple[Literal["tensorboard"], ...], Strict(False)] | None = key(
        None,
        "what else writes the metrics, into a folder of its name in the run's; needs its extra",
        'a list; known: "tensorboard"',
    )
    threads: int | None = count(
        None, "threads a worker computes with; the cores shared out where not given", 1_024
    )


class PlanSection(Section):
    """What ``counterflow plan`` expects of the run, told in its summary; but ``devices`` decides."""

    cluster: str | None = key(None, "the devices it was planned for", "a text, in quotes")
    profile: str | None = key(None, "what layers cost there", "a text, in quotes")
    mini_batch: int | None = count(None, "samples of an update, of all replicas", MANY)
    micro_batch: int | None = count(None, "samples of a micro-batch", MANY)
    arrangement: str | None = key(
        None, "which workers share a node: pipeline-inside, replicas-inside or copies-inside", "a text"
    )
    devices: WholeNumbers | None = key(
        None,
        "the device, or rank, counted from 0 node by node, of each worker of replica 0, of replica 1, …",
        "a list of whole numbers",
    )
    step_seconds: float | None = key(None, "one update", "a number", ge=0)
    samples_per_second: float | None = key(None, "throughput of all replicas", "a number", ge=0)
    bubble_ratio: float | None = key(None, "share of a step in which a worker is idle", "a number", ge=0)
    peak_bytes: Annotated[tuple[float, ...], Strict(False)] | None = key(
        None, "memory of each worker, without the cluster's reserve", "a list of numbers"
    )

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
