"""A measured model as the planner's three files: its layers, their costs on this machine, and the links.

Invariant: nothing is guessed, and the files say how each number came about.
"""

from __future__ import annotations

import datetime as dt
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError
from counterflow.planning import Cluster, Model, Profile

from .cluster_costs import cluster_of
from .layer_costs import assembled, kinds_of, skips_of, ties_of
from .layer_times import AtLengths, AtSize, Subject
from .links import Travel
from .machine import device_name
from .measuring_progress import Progress
from .survey import survey

SIZES = (1, 2, 4, 8, 16, 32)
"""Default samples of the micro-batches with which layers are measured."""

_SHARES = (
    "attention_share, fixed_share: from steps with sequences as long, half and a quarter as long; samples of "
    "a micro-batch: {size}"
)
"""Origin of the shares of layers' seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model on a machine, ready to be planned.

    Attributes:
        model: layers of the model.
        profile: their costs.
        cluster: this machine, or the machines of torchrun's workers.
        messages: messages between two workers of a node, by size.
        allreduces: all-reduces of two workers of a node, by size.
        between: messages and all-reduces between two workers on different nodes.
    """

    model: Model
    profile: Profile
    cluster: Cluster
    messages: tuple[Travel, ...]
    allreduces: tuple[Travel, ...]
    between: tuple[tuple[Travel, ...], tuple[Travel, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class Description:
    """Words and tables about a measured model that its layers do not say.

    Attributes:
        name: name of the model.
        optimizer: name of its optimizer.
        source: what measured it.
        train: keys of ``[model]`` with which ``counterflow train`` makes it; empty: it cannot.
        config: further tables of the config that a plan keeps.
    """

    name: str
    optimizer: str
    source: str
    train: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def measure_model(
    subject: Subject,
    description: Description,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int | None = None,
    threads: int | None = None,
    repeats: int = 5,
    progress: Progress = lambda *_: None,
) -> Measured:
    """Measure a model on this machine; under torchrun on all machines.

    Args:
        subject: layers, loss, optimizer and samples.
        description: words about it.
        sizes: samples of a micro-batch, each 1 or more.
        workers: number of workers of this machine as a node of the cluster; None: one per GPU, or one per
            core.
        threads: threads of each worker; None: the cores divided by the workers.
        repeats: number of measurements, of which the median counts.
        progress: called with the progress.

    Raises:
        ConfigError: no sizes, or one below 1.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"sizes = {list(sizes)}: give one size of a micro-batch or more, each 1 or more")
    measured = survey(
        subject, sizes, workers=workers, threads=threads, repeats=repeats, progress=progress
    )
    by_size = measured.by_size
    profile = profile_of(
        subject.layers,
        device_name(measured.device, measured.threads),
        by_size,
        measured.gap_seconds,
        measured.around_seconds,
        how=f"measured, median of {repeats}",
        optimizer=description.optimizer,
        at_lengths=measured.at_lengths,
    )
    inputs, _ = subject.batch(1)
    model = Model(
        name=description.name,
        layers=tuple(kinds_of(subject.layers)),
        optimizer_states=round(by_size[-1].update.states, 3),
        input_bytes=float(sum(t.nbytes for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))),
        train=dict(description.train),
        source=description.source,
        config=dict(description.config),
        skips=skips_of(by_size[-1]),
        ties=ties_of(subject.layers),
    )
    return Measured(model, profile, cluster_of(measured), *measured.inside, measured.between)


def profile_of(
    layers: Sequence[nn.Module],
    machine: str,
    by_size: Sequence[AtSize],
    gap: float,
    around: float,
    *,
    how: str,
    optimizer: str,
    at_lengths: AtLengths | None = None,
) -> Profile:
    """The profile of a model's layers.

    Args:
        layers: layers of the model.
        machine: name of the machine, in words.
        by_size: costs of layers at each size of micro-batches.
        gap: seconds between two ops.
        around: seconds of a step in addition to its ops and the optimizer.
        how: how times were measured.
        optimizer: name of the optimizer.
        at_lengths: costs of layers at shorter sequences; None: not measured.
    """
    today = dt.date.today().isoformat()
    sources = {} if at_lengths is None else {"shares": _SHARES.format(size=by_size[0].size)}
    return replace(
        assembled(layers, by_size, at_lengths),
        name=f"{platform.node() or 'this machine'}, {today}",
        machine=machine,
        date=today,
        update_seconds_per_byte=statistics.median(cost.update_seconds_per_byte for cost in by_size),
        op_overhead_seconds=gap + statistics.median(cost.overhead_seconds for cost in by_size),
        step_overhead_seconds=around,
        sources={
            "layers": f"{how}; layers of one kind: median over them; halves of split backwards in proportion",
            "update_seconds_per_byte": f"{optimizer}: measured, median",
            "op_overhead_seconds": "measured: time between two ops, and what a stage adds to its layers",
            "step_overhead_seconds": "measured: a step without its ops and the optimiser",
            "norm_peak_bytes": "measured, like all peaks: bytes of torch's allocator",
            **sources,
        },
    )
