"""A measured model as the planner's three files: its layers, their costs on this machine, and the links.

Invariant: nothing is guessed, and the files say how each number came about.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from counterflow.errors import ConfigError
from counterflow.planning.inputs import input_files
from counterflow.planning.inputs.cluster import Cluster
from counterflow.planning.inputs.model import Model
from counterflow.planning.inputs.profile import Profile

from .cluster_costs import cluster_of
from .disturbance import HIGH, LOW
from .layer_costs import skips_of
from .layer_times import AtSize, StepOverheads
from .links import Travel
from .machine import device_name
from .measuring_progress import Progress
from .subject_pipeline import SubjectSource
from .survey import Survey, survey

SIZES = (1, 2, 4, 8, 16, 32)
"""Default samples of the micro-batches with which layers are measured."""

INPUTS = "model", "profile", "cluster"
"""Names of the planner's inputs, and of their files."""

_SHARES = (
    "attention_share, fixed_share: from steps with sequences as long, half and a quarter as long; samples of "
    "a micro-batch: {size}"
)
"""Origin of the shares of layers' seconds."""


@dataclass(frozen=True, slots=True)
class Measurement:
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

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """The measurement that ``save`` wrote, without its messages and all-reduces.

        Raises:
            ConfigError: a file is damaged, or missing.
        """
        model, profile, cluster = (Path(folder) / f"{name}.toml" for name in INPUTS)
        return cls(
            input_files.load_model(model),
            input_files.load_profile(profile),
            input_files.load_cluster(cluster),
            messages=(),
            allreduces=(),
        )

    def save(self, folder: Path | str) -> dict[str, Path]:
        """Write ``model.toml``, ``profile.toml`` and ``cluster.toml`` into a folder, made if it is not there.

        Returns:
            The paths, by ``model``, ``profile`` and ``cluster``.
        """
        paths = {name: Path(folder) / f"{name}.toml" for name in INPUTS}
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            draft = path.with_name(f".{path.name}.{os.getpid()}")  # a reader never sees a part
            draft.write_text(input_files.dumps(getattr(self, name)), encoding="utf-8")
            draft.replace(path)
        return paths


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
    source: SubjectSource,
    description: Description,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int | None = None,
    threads: int | None = None,
    repeats: int = 5,
    progress: Progress = lambda *_: None,
) -> Measurement:
    """Measure a model on this machine; under torchrun on all machines.

    Args:
        source: function that makes layers, loss, optimizer and samples; each worker calls it.
        description: words about it.
        sizes: samples of a micro-batch, each 1 or more.
        workers: number of workers of this machine as a node of the cluster; None: one per GPU, or one per
            core.
        threads: threads of each worker; None: the cores divided by the workers.
        repeats: number of measurements.
        progress: called with the progress.

    Raises:
        ConfigError: no sizes, or one below 1.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"sizes = {list(sizes)}: give one size of a micro-batch or more, each 1 or more")
    measured = survey(source, sizes, workers=workers, threads=threads, repeats=repeats, progress=progress)
    return measurement_of(measured, description, repeats=repeats)


def measurement_of(measured: Survey, description: Description, *, repeats: int) -> Measurement:
    """The planner's inputs from a survey.

    Args:
        measured: the survey.
        description: words about its model.
        repeats: number of measurements.
    """
    by_size = measured.by_size
    profile = profile_of(
        measured.layers,
        device_name(measured.device, measured.threads),
        by_size,
        measured.overheads,
        how=f"measured {repeats} times",
        optimizer=description.optimizer,
        sliced=measured.at_lengths is not None,
    )
    chain = measured.chain
    model = Model(
        name=description.name,
        layers=chain.kinds,
        optimizer_states=round(by_size[-1].update.states, 3),
        input_bytes=chain.input_bytes,
        train=dict(description.train),
        source=description.source,
        config=dict(description.config),
        skips=skips_of(by_size[-1]),
        ties=chain.ties,
    )
    return Measurement(model, profile, cluster_of(measured), *measured.inside, measured.between)


def profile_of(
    layers: Profile,
    machine: str,
    by_size: Sequence[AtSize],
    overheads: StepOverheads,
    *,
    how: str,
    optimizer: str,
    sliced: bool = False,
) -> Profile:
    """The profile of a model's layers.

    Args:
        layers: costs of its layers, as ``assembled``.
        machine: name of the machine, in words.
        by_size: costs of layers at each size of micro-batches.
        overheads: seconds of a step in addition to its ops and the optimizer.
        how: how times were measured.
        optimizer: name of the optimizer.
        sliced: True if layers were also measured at shorter sequences.
    """
    today = dt.date.today().isoformat()
    sources = {"shares": _SHARES.format(size=by_size[0].size)} if sliced else {}
    return replace(
        layers,
        name=f"{platform.node() or 'this machine'}, {today}",
        machine=machine,
        date=today,
        update_seconds_per_byte=statistics.median(cost.update_seconds_per_byte for cost in by_size),
        op_overhead_seconds=overheads.gap + statistics.median(cost.overhead_seconds for cost in by_size),
        step_overhead_seconds=overheads.around,
        message_core_seconds=overheads.message_core,
        sources={
            "layers": f"{how}; of equal layers in a row one to four, the median of a kind; "
            "halves of split backwards in proportion; on one thread seconds of a processor",
            "low_factors, high_factors": f"quantiles {LOW} and {HIGH} of steps and workers",
            "update_seconds_per_byte": f"{optimizer}: measured, median",
            "op_overhead_seconds": "measured: time between two ops, and what a stage adds to its layers",
            "step_overhead_seconds": "measured: a step without its ops and the optimiser",
            "message_core_seconds": "measured: all threads of all workers, without ops and gaps",
            "norm_peak_bytes": "measured, like all peaks: bytes of torch's allocator",
            **sources,
        },
    )
