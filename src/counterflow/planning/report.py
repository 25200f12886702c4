"""A search's result as ``counterflow plan --json`` prints it: what each key means, and where it is read.

Times in seconds, memory in bytes, throughput in samples a second; keys end in ``_seconds`` and ``_bytes``.
What it does not do: print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from counterflow.shown import Options, Part, Result, reads, said

from .orders import Orders
from .prediction import Parts
from .search.found import Found
from .search.space import Omission
from .task import Task
from .why import BreakEven, Why


def chosen(text: str, name: str) -> Any:
    """A key of a configuration: a prediction's, or a candidate's that was not played."""
    return said(text, f"prediction.configuration.{name}", f"candidate.{name}")


def predicted(text: str, name: str) -> Any:
    """A key of a prediction."""
    return said(text, f"prediction.{name}")


def _runs(nodes: Sequence[Any]) -> list[Any]:
    """Nodes side by side, from pairs of kind and number."""
    return [{"kind": run[0], "nodes": run[1]} if isinstance(run, tuple) else run for run in nodes]


class NodesShown(Part):
    """Nodes of one kind, side by side."""

    kind: str
    nodes: Annotated[int, said("how many")]


class ConfigurationShown(Part):
    """A configuration."""

    scheme: Annotated[str, chosen("scheme", "scheme")]
    options: Annotated[Options, chosen("the scheme's options", "options")]
    replicas: Annotated[int, chosen("copies of the whole pipeline group", "replicas")]
    micro_batch_size: Annotated[int, chosen("samples of a micro-batch", "samples")]
    recompute: Annotated[str, chosen("none, stage or layer", "recompute")]
    sync_mode: Annotated[str, chosen("end, eager or eager-opt", "sync")]
    arrangement: Annotated[
        str, chosen("pipeline-inside, replicas-inside or copies-inside a node", "arrangement")
    ]
    nodes: Annotated[
        list[NodesShown],
        BeforeValidator(_runs),
        chosen("the order in which nodes of different kinds stand; empty: the cluster's", "nodes"),
    ]
    zero_stage: Annotated[
        int, chosen("1: optimiser state is sharded over the holders of a weight", "zero_stage")
    ]
    cuts: Annotated[
        list[int] | str,
        chosen("layers at which stages begin after the first; or balanced, even: not cut yet", "cuts"),
    ]
    tensor_parallel: Annotated[
        int, chosen("positions of tensor parallelism, at each of which stands a pipeline", "tensor_parallel")
    ]


class MemoryShown(Part):
    """A worker's memory at its peak, in a plan."""

    weights_bytes: Annotated[
        float, said("weights, gradients, optimiser state, of all copies and versions", "weights")
    ]
    activations_bytes: Annotated[
        float, said("kept for backwards, and what recomputation needs", "activations")
    ]
    buffers_bytes: Annotated[float, said("messages in flight", "buffers")]
    workspace_bytes: Annotated[
        float, said("what the op that needs most needs besides; 0: not profiled", "workspace")
    ]
    gradients_bytes: Annotated[float, said("of `weights_bytes`, gradients; 0: not profiled", "gradients")]
    optimizer_bytes: Annotated[
        float, said("of `weights_bytes`, the optimiser's state; 0: not profiled", "optimizer")
    ]
    casts_bytes: Annotated[float, said("of `weights_bytes`, weights cast to another precision", "casts")]
    communicators_bytes: Annotated[
        float, said("communicators; 0: the cluster does not say what one takes", "communicators")
    ]


class PredictionShown(ConfigurationShown):
    """What a configuration costs."""

    workers: Annotated[int, predicted("of a replica", "workers")]
    micro_batches: Annotated[int, predicted("of an update, on each replica", "micro_batches")]
    step_seconds: Annotated[float, predicted("one mini-batch", "step_seconds")]
    steady_step_seconds: Annotated[
        float, predicted("what a step adds where none waits for a barrier", "steady_step_seconds")
    ]
    samples_per_second: Annotated[float, predicted("of all replicas", "samples_per_second")]
    mini_batch: Annotated[int, predicted("samples that its step is counted for", "mini_batch")]
    updates: Annotated[int, predicted("in that step", "updates")]
    bubble_ratio: Annotated[float, predicted("share of a step in which a worker is idle", "bubble_ratio")]
    peak_bytes: Annotated[list[float], predicted("by worker", "peak_bytes")]
    usable_by_worker_bytes: Annotated[
        list[float], predicted("memory of each worker, where devices differ; else empty", "usable_by_worker")
    ]
    memory: Annotated[list[MemoryShown], predicted("by worker", "memory")]
    fits: Annotated[bool, predicted("whether all workers' peaks fit their memory", "fits")]
    notes: Annotated[list[str], predicted("for people", "notes")]


class PlanShown(PredictionShown):
    """A plan."""

    mesh: Annotated[
        list[list[list[int]]] | None,
        predicted(
            "devices by replica, worker and position, for a DeviceMesh; null without tensor parallelism",
            "mesh",
        ),
    ]


class LargerShown(PlanShown):
    """A plan that would need more memory than there is."""

    needed_bytes: Annotated[float, predicted("of a device", "needed_bytes")]


class TooLargeShown(ConfigurationShown):
    """A configuration that does not fit."""

    needed_bytes: Annotated[float, said("at least, on its largest worker")]
    worker_usable_bytes: Annotated[float, said("what that worker has", "usable_bytes")]
    worker: Annotated[int, said("that worker")]


class RejectedShown(Part):
    """What became of a scheme's candidates."""

    scheme: str
    candidates: int
    too_large: Annotated[int, said("that do not fit the memory, unless known to be slower")]
    slower_by_bound: Annotated[
        int, said("that cannot be as fast as what was found, and were not simulated", "slower")
    ]
    simulated: int
    closest_too_large: Annotated[TooLargeShown | None, said("the smallest that does not fit", "closest")]


class WhyShown(Part):
    """Why the best plan is the best."""

    parts_seconds: Annotated[Parts, said("of the best plan", "parts")]
    limit: Annotated[str | None, said("the part that costs most beside compute")]
    second: Annotated[
        str | None, said("the scheme of the best plan of another one", "second.play.configuration.scheme")
    ] = None
    second_parts_seconds: Annotated[Parts | None, said("of that plan", "second_parts")]
    second_wins_if: Annotated[list[BreakEven], said("either of them", "break_evens")]
    in_more_memory: Annotated[LargerShown | None, said("a faster plan that does not fit")]


class OrderShown(PredictionShown):
    """A computed order."""

    placement_of: Annotated[
        str,
        said(
            "the scheme of the plan whose placement and micro-batches it has",
            "named.play.configuration.scheme",
        ),
    ]
    split: Annotated[bool, said("whether its backwards are split")]
    objective: Annotated[
        str, said("the objective: makespan, or steady where there is no barrier", "synthesis.objective")
    ]
    lower_bound_seconds: Annotated[
        float, said("no order of these ops within the memory has a shorter step", "bound_seconds")
    ]
    reason: Annotated[
        str, said("why, for people; in seconds of ops, messages and syncs", "synthesis.bound.reason")
    ]
    gap: Annotated[float, said("share of the step that a better order could save at most")]
    method: Annotated[str, said("what found it")]
    recut: Annotated[bool, said("whether layers moved between stages for it")]


class OrdersShown(Part):
    """What was computed for the best plans."""

    gain: Annotated[
        float, said("share of the best named plan's step that the best order saves; 0: none does")
    ]
    named: Annotated[PlanShown, said("the best named plan")]
    orders: Annotated[list[OrderShown], said("best first", "computed")]
    omitted: Annotated[list[Omission], said("what was not computed, and why", "omissions")]
    stopped: Annotated[bool, said("whether it was interrupted")]


class Planned(Result):
    """`counterflow plan`."""

    model_config = reads("found")

    model: Annotated[str, said("its name", "task.model.name")]
    profile: Annotated[str, said("its name", "task.profile.name")]
    cluster: Annotated[str, said("its name", "task.cluster.name")]
    mini_batch: Annotated[int, said("samples of an update, of all replicas")]
    usable_bytes: Annotated[float, said("memory of a device without the reserve")]
    best: Annotated[list[PlanShown], said("the best plans: one, or as many as `--top` says")]
    schemes: Annotated[list[PlanShown], said("the best plan of each scheme", "found.of_schemes")]
    rejected: Annotated[list[RejectedShown], said("by scheme", "found.rejections")]
    omitted: Annotated[list[Omission], said("what has no candidate, and why", "found.omissions")]
    why: WhyShown
    synthesized: Annotated[OrdersShown | None, said("with `--synthesize`")]


class ExampleShown(Part):
    """A paper's run."""

    name: str
    about: str
    mini_batch: int
    source: str


class Examples(Result):
    """`counterflow plan --list`."""

    examples: list[ExampleShown]


def planned(task: Task, found: Found, explained: Why, orders: Orders | None = None) -> Planned:
    """All that is known of the best plans.

    Args:
        task: what was planned.
        found: what the search found.
        explained: why the best plan is the best.
        orders: what was computed for the best plans.
    """
    return Planned.of(task=task, found=found, why=explained, synthesized=orders)
