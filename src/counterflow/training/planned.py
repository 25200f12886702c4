"""From a plan to the config with which ``counterflow train`` runs the plan.

Invariant: the config is complete and checked like any other: its schedule builds, its cuts fit the model.
The profiled model is the one that is trained: only the keys that the plan decides are changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from counterflow.common.parallel_degrees import above_one
from counterflow.errors import ConfigError
from counterflow.planning import Cluster, Model, Prediction, Profile
from counterflow.planning.cost.device_placement import mesh
from counterflow.planning.cost.stages import Cuts
from counterflow.runtime.transport.kinds import GLOO, NCCL
from counterflow.schedule.layouts import Layout

from .config import RunConfig

_DECIDED = {
    "pipeline": ("replicas", "recompute", "sync", "cuts", "transport"),  # and zero_stage, if it is 1
    "train": ("samples", "out", "resume"),
}
"""Keys that a plan decides, or that belong to the run that was profiled, by table of a config."""

_CARRIED_TABLES = "data", "lora", "pipeline", "optimizer", "train"
"""Tables of a config that a plan keeps in addition to ``[model]``."""


def carried_tables(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The parts of a config that a plan for its model keeps, as plain data."""
    tables = {}
    for table in _CARRIED_TABLES:
        undecided = {
            key: value
            for key, value in getattr(config, table).model_dump(mode="json", exclude_none=True).items()
            if key not in _DECIDED.get(table, ())
        }
        if undecided:
            tables[table] = undecided
    if not config.pipeline.zero_stage:
        tables.get("pipeline", {}).pop("zero_stage", None)
    return tables


_OPTIMIZERS: dict[float, dict[str, Any]] = {
    0.0: {"name": "sgd"},
    1.0: {"name": "sgd", "momentum": 0.9},
    2.0: {"name": "adamw"},
}
"""Optimisers by the bytes of optimiser state for each byte of weights."""


def planned_config(
    model: Model,
    profile: Profile,
    cluster: Cluster,
    prediction: Prediction,
    schedule_file: Path | None = None,
) -> RunConfig:
    """The config that runs a plan.

    Args:
        model: the model, with the keys of ``[model]`` that make it.
        profile: profile that the plan was made with.
        cluster: cluster that the plan was made for.
        prediction: prediction of the plan, with its cuts resolved.
        schedule_file: file of its schedule, if no scheme makes it.

    Raises:
        ConfigError: the model does not say how it is made, or its keys make another model than the plan's.
    """
    if not model.train:
        made_in_python = ".py:" in model.name
        raise ConfigError(
            f"model {model.name}: has no [train] table, so no config can be written that trains it; the "
            "report without --out ends with the call of cf.Pipeline that runs the plan"
            + ("" if made_in_python else ', or add the keys of [model] there, such as kind = "gpt"')
        )
    plan = prediction.configuration
    if "optimizer" not in model.config and model.optimizer_states not in _OPTIMIZERS:
        known = ", ".join(f"{states:g} ({_in_words(o)})" for states, o in _OPTIMIZERS.items())
        raise ConfigError(
            f"model {model.name}: optimizer_states = {model.optimizer_states:g}: no known "
            f"optimiser has this number; give one of {known}, or the optimiser's keys as [config.optimizer]"
        )
    values: dict[str, Any] = {
        "model": dict(model.train),
        "schedule": {"scheme": plan.scheme, **dict(plan.options)}
        if schedule_file is None
        else {"file": str(schedule_file)},
        "pipeline": {
            "replicas": plan.replicas,
            "recompute": plan.recompute,
            "sync": plan.sync,
            "cuts": plan.cuts,
            "transport": (NCCL if cluster.cores is None else GLOO).name,
            "zero_stage": plan.zero_stage,
        },
        "mesh": above_one(plan.degrees),
        "optimizer": _OPTIMIZERS.get(model.optimizer_states, {}),
        "train": {"samples": plan.samples * prediction.micro_batches},
    }
    for table, carried in model.config.items():
        decided = values.get(table, {}) if table != "optimizer" else {}
        of_run = ("out", "resume") if table == "train" else ()
        values[table] = {**{key: value for key, value in carried.items() if key not in of_run}, **decided}
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        place = ".".join(str(part) for part in problem["loc"])
        reason = str(cause) if isinstance(cause, ConfigError) else f"{place}: {problem['msg']}"
        raise ConfigError(
            f"model {model.name}: its [train] and [config] tables do not make the planned model: {reason}"
        ) from None
    if config.model.all_layers != len(model.layers):
        raise ConfigError(
            f"model {model.name}: its [train] table makes {config.model.all_layers} layers (embedding, "
            f"blocks, head), but the model lists {len(model.layers)}; make the numbers equal"
        )
    placement = config.build_schedule().placement
    places = placement, plan.replicas, plan.arrangement, plan.degrees.positions
    placed = mesh(*places, cluster=cluster, nodes=plan.nodes)
    expected: dict[str, Any] = {
        "cluster": cluster.name,
        "profile": profile.name,
        "mini_batch": prediction.mini_batch // prediction.updates,
        "micro_batch": plan.samples,
        "layout": str(layout) if (layout := _layout(model, plan.cuts)) else None,
        "arrangement": plan.arrangement.value,
        "devices": [device for replica in placed for worker in replica for device in worker],
        "step_seconds": prediction.step_seconds,
        "samples_per_second": prediction.samples_per_second,
        "bubble_ratio": prediction.bubble_ratio,
        "peak_bytes": prediction.peak_bytes,
    }
    return RunConfig.model_validate(values | {"plan": expected})


def _layout(model: Model, cuts: Cuts) -> Layout | None:
    return model.layout(cuts) if isinstance(cuts, tuple) else None


def _in_words(optimizer: dict[str, Any]) -> str:
    return " ".join(str(value) for value in optimizer.values())
