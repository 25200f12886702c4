"""A search's result as plain data: what ``counterflow plan --json`` prints and its tables show.

Times in seconds, memory in bytes, throughput in samples a second; keys end in ``_seconds`` and ``_bytes``.
What it does not do: print.
"""

from __future__ import annotations

from typing import Any

from counterflow.schedule import registry
from counterflow.schedule.scheme import DEPTH, OptionType

from .cost.device_placement import mesh
from .orders import Orders
from .prediction import Configuration, Parts, Prediction
from .search.search import Found, Plan, Rejections
from .why import Why


def as_json(
    found: Found,
    explained: Why,
    orders: Orders | None = None,
) -> dict[str, Any]:
    """All of it.

    Args:
        found: what the search found.
        explained: why the best plan is the best.
        orders: what was computed for the best plans.
    """
    larger = explained.in_more_memory
    return {
        "mini_batch": found.mini_batch,
        "usable_bytes": found.usable_bytes,
        "best": [plan_json(plan) for plan in found.best],
        "schemes": [plan_json(plan) for plan in found.of_schemes],
        "rejected": [
            {"scheme": scheme, **_rejections(rejected)} for scheme, rejected in found.rejections.items()
        ],
        "omitted": [{"what": omission.what, "reason": omission.reason} for omission in found.omissions],
        "why": {
            "parts_seconds": parts_json(explained.parts),
            "limit": explained.limit,
            "second": explained.second and explained.second.play.configuration.scheme,
            "second_parts_seconds": explained.second_parts and parts_json(explained.second_parts),
            "second_wins_if": [
                {"what": change.what, "times": change.times} for change in explained.break_evens
            ],
            "in_more_memory": larger and {**plan_json(larger), "needed_bytes": explained.needed_bytes},
        },
        "synthesized": orders and orders_json(orders),
    }


def orders_json(orders: Orders) -> dict[str, Any]:
    """What was computed for the best plans."""
    return {
        "gain": orders.gain,
        "named": plan_json(orders.named),
        "orders": [
            {
                **prediction_json(one.play.prediction()),
                "placement_of": one.named.play.configuration.scheme,
                "split": one.split,
                "objective": one.synthesis.objective.value,
                "lower_bound_seconds": one.bound_seconds,
                "reason": one.synthesis.bound.reason,
                "gap": one.gap,
                "method": one.method,
                "recut": one.recut,
            }
            for one in orders.computed
        ],
        "omitted": [{"what": omission.what, "reason": omission.reason} for omission in orders.omissions],
        "stopped": orders.stopped,
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """One plan."""
    return {**prediction_json(plan.play.prediction()), "mesh": mesh_of(plan)}


def mesh_of(plan: Plan) -> list[list[list[int]]] | None:
    """Devices by replica, worker and position, for a ``DeviceMesh``; None without tensor parallelism."""
    chosen, placement = plan.play.configuration, plan.play.schedule.placement
    if chosen.tensor_parallel == 1:
        return None
    where = placement, chosen.replicas, chosen.arrangement, chosen.tensor_parallel
    found = mesh(*where, cluster=plan.play.predictor.cluster, nodes=chosen.nodes)
    return [list(map(list, replica)) for replica in found]


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """One prediction, with its configuration."""
    return {
        **configuration_json(prediction.configuration),
        "workers": prediction.workers,
        "micro_batches": prediction.micro_batches,
        "step_seconds": prediction.step_seconds,
        "steady_step_seconds": prediction.steady_step_seconds,
        "samples_per_second": prediction.samples_per_second,
        "mini_batch": prediction.mini_batch,
        "updates": prediction.updates,
        "bubble_ratio": prediction.bubble_ratio,
        "peak_bytes": list(prediction.peak_bytes),
        "usable_by_worker_bytes": list(prediction.usable_by_worker),
        "memory": [
            {
                "weights_bytes": worker.weights,
                "activations_bytes": worker.activations,
                "buffers_bytes": worker.buffers,
                "workspace_bytes": worker.workspace,
                "gradients_bytes": worker.gradients,
                "optimizer_bytes": worker.optimizer,
                "casts_bytes": worker.casts,
                "communicators_bytes": worker.communicators,
            }
            for worker in prediction.memory
        ],
        "fits": prediction.fits,
        "notes": list(prediction.notes),
    }


def configuration_json(configuration: Configuration) -> dict[str, Any]:
    """One configuration."""
    cuts = configuration.cuts
    return {
        "scheme": configuration.scheme,
        "options": dict(configuration.options),
        "replicas": configuration.replicas,
        "micro_batch_size": configuration.samples,
        "recompute": configuration.recompute.value,
        "sync_mode": configuration.sync.value,
        "arrangement": configuration.arrangement.value,
        "nodes": [{"kind": kind, "nodes": count} for kind, count in configuration.nodes],
        "zero_stage": configuration.zero_stage,
        "cuts": list(cuts) if isinstance(cuts, tuple) else cuts.value,
        "tensor_parallel": configuration.tensor_parallel,
    }


def parts_json(parts: Parts) -> dict[str, float]:
    """Where a step's seconds go."""
    return {name: getattr(parts, name) for name in Parts.__slots__}


def choices(configuration: Configuration) -> str:
    """The options of a configuration that its depth and micro-batches do not tell, for people.

    Parts of the model on a worker are told even where they are the usual ones; optimiser state, where it is
    sharded.

    >>> options = {"stages": 4, "micro_batches": 8, "pairs": 1, "concat": "forward-doubling"}
    >>> choices(Configuration.of("chimera", options, 1, 1))
    'concat=forward-doubling'
    """
    told = []
    for name, value in configuration.options:
        option = registry.scheme(configuration.scheme).option(name)
        assert option is not None
        plain = option.unsaid if option.kind is OptionType.NUMBER else option.default
        if value != plain and name not in (*DEPTH, "micro_batches"):
            told.append(f"{name}={value}")
    if configuration.zero_stage:
        told.append(f"zero_stage={configuration.zero_stage}")
    return " ".join(told)


def _rejections(rejected: Rejections) -> dict[str, Any]:
    closest = rejected.closest
    return {
        "candidates": rejected.candidates,
        "too_large": rejected.too_large,
        "slower_by_bound": rejected.slower,
        "simulated": rejected.simulated,
        "closest_too_large": closest
        and {
            **configuration_json(closest.candidate),
            "needed_bytes": closest.needed_bytes,
            "worker": closest.worker,
            "worker_usable_bytes": closest.usable_bytes,
        },
    }
