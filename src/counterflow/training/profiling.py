"""Measures what the planner needs: a config's model on this machine, and the links between its workers.

``measure`` takes the times from training steps and makes a profile and a cluster of them. Here the config
decides what is measured, and the planner's files are assembled.

Invariant: nothing is guessed, and the files say how each number came about.
"""

from __future__ import annotations

import datetime as dt
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch.utils import _pytree as pytree

from counterflow.common.json_models import Result
from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.measure.cluster_costs import cluster_of
from counterflow.measure.layer_costs import assembled, kinds_of, skips_of, ties_of
from counterflow.measure.layer_times import AtLengths, AtSize, Subject
from counterflow.measure.links import Travel
from counterflow.measure.machine import device_name
from counterflow.measure.measuring_progress import Progress
from counterflow.measure.survey import survey
from counterflow.planning import Cluster, Model, Profile
from counterflow.planning.inputs import input_files

from .config import RunConfig
from .job import Job, prepare
from .planned import carried_tables

SIZES = (1, 2, 4, 8, 16, 32)
"""Default samples of the micro-batches with which layers are measured."""

_SHARES = (
    "attention_share, fixed_share: from steps with sequences as long, half and a quarter as long; samples of "
    "a micro-batch: {size}"
)
"""Origin of the shares of layers' seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model on a machine, ready to be planned."""

    model: Model
    profile: Profile
    cluster: Cluster
    messages: tuple[Travel, ...]
    allreduces: tuple[Travel, ...]
    between: tuple[tuple[Travel, ...], tuple[Travel, ...]] = ((), ())
    """Messages and all-reduces between two workers on different nodes."""


_AsData = Annotated[dict[str, Any], BeforeValidator(input_files.as_data)]


class Profiled(Result):
    """`counterflow profile`: the three files that it wrote."""

    model: _AsData
    profile: _AsData
    cluster: _AsData


def measure(
    config: RunConfig,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int | None = None,
    repeats: int = 5,
    progress: Progress = lambda *_: None,
) -> Measured:
    """Measure a config's model and this machine.

    Args:
        config: its model, data, optimiser and device are used; its schedule is not.
        sizes: samples of a micro-batch, each 1 or more.
        workers: number of workers of this machine as a node of the cluster; None: one per GPU, or one per
            core.
        repeats: number of measurements, of which the median counts.
        progress: called with the progress.

    Raises:
        ConfigError: no sizes, or one below 1.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"sizes = {list(sizes)}: give one size of a micro-batch or more, each 1 or more")
    job = prepare(config)
    measured = survey(
        subject_of(job),
        sizes,
        workers=workers,
        threads=config.train.threads,
        repeats=repeats,
        progress=progress,
    )
    by_size, about = measured.by_size, device_name(measured.device, measured.threads)
    how = f"measured, median of {repeats}"
    profile = profile_of(
        job,
        about,
        by_size,
        measured.gap_seconds,
        measured.around_seconds,
        how=how,
        at_lengths=measured.at_lengths,
    )
    inputs, _ = job.bundle.batches.batch(0, 1)
    model = Model(
        name=job.about.model,
        layers=tuple(kinds_of(job.layers)),
        optimizer_states=round(by_size[-1].update.states, 3),
        input_bytes=float(sum(t.nbytes for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))),
        train=config.model.values(),
        source="counterflow profile",
        config=carried_tables(config),
        skips=skips_of(by_size[-1]),
        ties=ties_of(job.layers),
    )
    return Measured(model, profile, cluster_of(measured), *measured.inside, measured.between)


def subject_of(job: Job) -> Subject:
    """The timed part of a job: its layers in their precision, without the run's evaluations and files."""
    options = job.config.pipeline
    return Subject(
        layers=job.layers,
        loss=job.bundle.loss,
        optimizer=job.optimizer,
        batch=partial(job.bundle.batches.batch, 0),
        seed=job.config.train.seed,
        execution=Execution(
            autocast=options.autocast,
            compute_dtype=options.compute_dtype,
            compile=options.compile,
            digest_every=0,
        ),
    )


def profile_of(
    job: Job,
    machine: str,
    by_size: Sequence[AtSize],
    gap: float,
    around: float,
    *,
    how: str,
    at_lengths: AtLengths | None = None,
) -> Profile:
    """The profile of a model's layers.

    Args:
        job: the model.
        machine: name of the machine, in words.
        by_size: costs of layers at each size of micro-batches.
        gap: seconds between two ops.
        around: seconds of a step in addition to its ops and the optimiser.
        how: how times were measured.
        at_lengths: costs of layers at shorter sequences; None: not measured.
    """
    today = dt.date.today().isoformat()
    sources = {} if at_lengths is None else {"shares": _SHARES.format(size=by_size[0].size)}
    return replace(
        assembled(job.layers, by_size, at_lengths),
        name=f"{platform.node() or 'this machine'}, {today}",
        machine=machine,
        date=today,
        update_seconds_per_byte=statistics.median(cost.update_seconds_per_byte for cost in by_size),
        op_overhead_seconds=gap + statistics.median(cost.overhead_seconds for cost in by_size),
        step_overhead_seconds=around,
        sources={
            "layers": f"{how}; layers of one kind: median over them; halves of split backwards in proportion",
            "update_seconds_per_byte": f"{job.config.optimizer.name}: measured, median",
            "op_overhead_seconds": "measured: time between two ops, and what a stage adds to its layers",
            "step_overhead_seconds": "measured: a step without its ops and the optimiser",
            "norm_peak_bytes": "measured, like all peaks: bytes of torch's allocator",
            **sources,
        },
    )
