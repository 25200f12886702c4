"""Measures what the planner needs: a config's model on this machine, and the links between its workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator

from counterflow.common.json_models import Result
from counterflow.measure.folder_model import ModelFolder
from counterflow.measure.measuring_progress import Progress
from counterflow.measure.model_file import ModelFile
from counterflow.measure.model_profile import SIZES, Description, Measurement, measure_model
from counterflow.measure.subject_pipeline import Subject, same
from counterflow.planning.inputs import input_files

from .config import RunConfig
from .job import Job, prepare
from .planned import carried_tables

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
) -> Measurement:
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
    job = prepare(config)
    description = Description(
        job.about.model,
        config.optimizer.name,
        "counterflow profile",
        train=config.model.values(),
        config=carried_tables(config),
    )
    return measure_model(
        partial(same, subject_of(job)),
        description,
        sizes=sizes,
        workers=workers,
        threads=config.train.threads,
        repeats=repeats,
        progress=progress,
    )


def measure_file(
    file: ModelFile | ModelFolder,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int | None = None,
    repeats: int = 5,
    progress: Progress = lambda *_: None,
) -> tuple[Measurement, int]:
    """Measure the model of a Python file, or of a transformers folder, on this machine.

    Args:
        file: the file or folder.
        sizes: as of ``measure``.
        workers: as of ``measure``.
        repeats: as of ``measure``.
        progress: as of ``measure``.

    Returns:
        The measurement, and the number of samples of the example.

    Raises:
        ConfigError: the file does not make a model, layers cannot be found, or sizes are as ``measure``
            refuses them.
    """
    model = file.load()
    description = Description(file.name, model.optimizer_name, "counterflow profile")
    measurement = measure_model(
        file, description, sizes=sizes, workers=workers, repeats=repeats, progress=progress
    )
    return measurement, model.samples


def subject_of(job: Job) -> Subject:
    """The timed part of a job: its layers in their precision, without the run's evaluations and files."""
    options = job.config.pipeline
    return Subject(
        layers=job.layers,
        loss=job.bundle.loss,
        optimizer=job.optimizer,
        batch=partial(job.bundle.batches.batch, 0),
        seed=job.config.train.seed,
        execution=options.of_measurement(),
    )
