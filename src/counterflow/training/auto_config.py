"""``scheme = "auto"`` of a config: the model is measured and planned, and the config of the plan runs.

Invariant: only what the plan decides is changed: schedule, cuts, recomputation. The planned config runs
without planning again.
"""

from __future__ import annotations

from functools import partial

from counterflow.automatic import planned, sizes_of, text_of
from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.measure.model_profile import Description
from counterflow.measure.profile_cache import LOG, measure_once
from counterflow.measure.subject_pipeline import same
from counterflow.runtime.workers import world

from .config import RunConfig
from .job import prepare
from .planned import carried_tables, planned_config
from .profiling import subject_of

_HOW = 'schedule.scheme = "auto"'


def with_plan(config: RunConfig) -> RunConfig:
    """The config with a planned schedule; itself if the schedule is named.

    Raises:
        ConfigError: a launcher started this process, the config decides what a plan does, or nothing fits.
    """
    if not config.schedule.planned:
        return config
    _refuse(config)
    pipeline, replicas = config.pipeline, config.pipeline.replicas
    workers, samples = config.build_schedule().workers, config.train.samples
    job = prepare(config.but(train={"resume": None}))
    description = Description(
        job.about.model,
        config.optimizer.name,
        "counterflow train",
        train=config.model.values(),
        config=carried_tables(config),
    )
    sizes = sizes_of(samples, workers)
    source = partial(same, subject_of(job))
    measurement = measure_once(
        source, description, sizes, workers=workers * replicas, threads=config.train.threads
    )
    execution = Execution(recompute=pipeline.recompute, sync=pipeline.sync, zero_stage=pipeline.zero_stage)
    result = planned(measurement, samples * replicas, sizes, workers, execution)
    LOG.warning("%s", text_of(result))
    prediction = result.simplest().play.prediction()
    plan = planned_config(measurement.model, measurement.profile, measurement.cluster, prediction)
    return plan.but(
        pipeline={"transport": pipeline.transport},
        train={name: getattr(config.train, name) for name in ("out", "resume")},
    )


def _refuse(config: RunConfig) -> None:
    launcher = world.started_by()
    if launcher is not None:
        raise ConfigError(
            f"{_HOW}: is planned where one process starts the workers, and {launcher} has started them; run "
            "counterflow profile under it, then counterflow plan --out plan.toml, and train plan.toml"
        )
    if config.pipeline.cuts is not None:
        raise ConfigError(f"{_HOW}: decides pipeline.cuts; leave it out, or name the scheme")
    if config.mesh.degrees.positions > 1:
        raise ConfigError(f"{_HOW}: plans no [mesh]; leave it out, or plan with counterflow plan")
