"""Changes of a planner's example that make it a run of a figure, or show the cause of a miss.

A run is an ``example`` with other values of the ``cluster``, another ``mini_batch``, ``model`` values
(``blocks``, ``optimizer_states``) and ``profile`` values: ``update_seconds_per_byte``, factors of the seconds
of all layers (``forward``, ``backward``), of the bytes of messages (``output``), of the bytes that a block
saves (``saved``), and ``half_rate_samples``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from counterflow.planning.inputs.cluster import Cluster
from counterflow.planning.inputs.model import Model
from counterflow.planning.inputs.profile import LayerProfile, Profile
from counterflow.planning.task import PlanningTask, load_example

_CLUSTER = TypeAdapter(Cluster)

_Data = Mapping[str, Any]


def example_task(run: _Data, common: _Data, about: str) -> PlanningTask:
    """An example of the planner with a run's changes.

    Args:
        run: the example's name and its changes.
        common: changes of all runs of the paper, which come first.
        about: description of the task.
    """
    # The papers' backwards recompute by themselves, unless a paper says otherwise.
    task = changed_task(load_example(run["example"]), {"cluster": {"recompute_ahead": False}})
    task = changed_task(task, common)
    return replace(changed_task(task, run), name="", about=about)


def changed_task(task: PlanningTask, change: _Data) -> PlanningTask:
    """A task with changes of its cluster, model, profile and mini-batch."""
    cluster = task.cluster
    if change.get("cluster"):
        values = asdict(cluster) | dict(change["cluster"])
        cluster = _CLUSTER.validate_json(json.dumps(values))
    return replace(
        task,
        model=_model(task.model, change.get("model", {})),
        profile=_profile(task.profile, change.get("profile", {})),
        cluster=cluster,
        mini_batch=change.get("mini_batch", task.mini_batch),
    )


def _model(model: Model, change: _Data) -> Model:
    states = change.get("optimizer_states", model.optimizer_states)
    layers = model.layers
    if "blocks" in change:
        layers = (layers[0], *["block"] * change["blocks"], layers[-1])
    return replace(model, layers=layers, optimizer_states=states)


def _profile(profile: Profile, change: _Data) -> Profile:
    seconds = change.get("update_seconds_per_byte", profile.update_seconds_per_byte)
    layers = {name: _layer(layer, change) for name, layer in profile.layers.items()}
    if "saved" in change:
        block, factor = layers["block"], change["saved"]
        layers["block"] = replace(block, saved_bytes=tuple(factor * size for size in block.saved_bytes))
    return replace(profile, layers=layers, update_seconds_per_byte=seconds)


def _layer(layer: LayerProfile, change: _Data) -> LayerProfile:
    forward, backward = (change.get(name, 1.0) for name in ("forward", "backward"))
    rates = [1.0] * len(layer.samples)
    if "half_rate_samples" in change:
        rates = half_rates(layer.samples, layer.forward_seconds, change["half_rate_samples"])
    return replace(
        layer,
        forward_seconds=_times(layer.forward_seconds, forward, rates),
        backward_seconds=_times(layer.backward_seconds, backward, rates),
        output_bytes=layer.output_bytes * change.get("output", 1.0),
    )


def _times(values: tuple[float, ...], factor: float, rates: list[float]) -> tuple[float, ...]:
    return tuple(factor * rate * value for rate, value in zip(rates, values, strict=True))


def half_rates(samples: tuple[float, ...], seconds: tuple[float, ...], half: float) -> list[float]:
    """Factors that make a layer's rate B / (B + ``half``) of its highest one, with its largest size kept.

    A device that computes B samples in a time proportional to B + h has half of its rate at B = h.

    >>> half_rates((1.0, 4.0), (1.0, 4.0), 4.0)
    [2.5, 1.0]
    """
    if not seconds[-1]:
        return [1.0] * len(samples)
    per_sample = seconds[-1] / (samples[-1] + half)
    return [per_sample * (size + half) / value for size, value in zip(samples, seconds, strict=True)]
