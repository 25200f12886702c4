"""A search's result as ``counterflow plan --json`` prints it: the meaning of each key, and where it is read.

Times are in seconds, memory in bytes, throughput in samples per second; keys end in ``_seconds`` and
``_bytes``. Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from counterflow.common.json_models import Options, Part, Result, describe, reads

from .by_length import AtLength
from .orders import Orders
from .prediction import Parts
from .search.search_result import SearchResult
from .search.space import Omission
from .task import PlanningTask
from .why import BreakEven, Why


def chosen(text: str, name: str) -> Any:
    """A key of a configuration: a prediction's, or a candidate's that was not simulated."""
    return describe(text, f"prediction.configuration.{name}", f"candidate.{name}")


def predicted(text: str, name: str) -> Any:
    """A key of a prediction."""
    return describe(text, f"prediction.{name}")


def _runs(nodes: Sequence[Any]) -> list[Any]:
    return [{"kind": run[0], "nodes": run[1]} if isinstance(run, tuple) else run for run in nodes]


class NodesShown(Part):
    """Adjacent nodes of one kind."""

    kind: str
    nodes: Annotated[int, describe("number of nodes")]


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
        chosen("order of nodes of different kinds; empty: the cluster's", "nodes"),
    ]
    zero_stage: Annotated[
        int, chosen("1: optimiser state is sharded over the holders of a weight", "zero_stage")
    ]
    cuts: Annotated[
        list[int] | str,
        chosen("layers at which stages begin after the first; or balanced, even: not cut yet", "cuts"),
    ]
    tensor_parallel: Annotated[
        int, chosen("tensor-parallel degree: devices that share the work of every layer", "degrees.tp")
    ]
    context_parallel: Annotated[
        int, chosen("degree of contexts: devices that share each sequence", "degrees.cp")
    ]
    expert_parallel: Annotated[
        int, chosen("degree of experts: devices that share the experts of a layer", "degrees.ep")
    ]
    dp_shard: Annotated[
        int, chosen("devices of a worker with samples of their own, which shard weights", "degrees.dp_shard")
    ]


class MemoryShown(Part):
    """A worker's memory at its peak, in a plan."""

    weights_bytes: Annotated[
        float, describe("weights, gradients and optimiser state of all copies and versions", "weights")
    ]
    activations_bytes: Annotated[
        float, describe("saved for backwards, and memory of recomputation", "activations")
    ]
    buffers_bytes: Annotated[float, describe("messages in flight", "buffers")]
    workspace_bytes: Annotated[
        float, describe("additional memory of the largest op; 0: not profiled", "workspace")
    ]
    gradients_bytes: Annotated[
        float, describe("part of `weights_bytes` that is gradients; 0: not profiled", "gradients")
    ]
    optimizer_bytes: Annotated[
        float, describe("part of `weights_bytes` that is optimiser state; 0: not profiled", "optimizer")
    ]
    casts_bytes: Annotated[
        float, describe("part of `weights_bytes` that is weights cast to another precision", "casts")
    ]
    communicators_bytes: Annotated[
        float, describe("communicators; 0: the cluster does not give their size", "communicators")
    ]


class PredictionShown(ConfigurationShown):
    """The cost of a configuration."""

    workers: Annotated[int, predicted("workers of a replica", "workers")]
    micro_batches: Annotated[int, predicted("micro-batches of an update, on each replica", "micro_batches")]
    step_seconds: Annotated[float, predicted("one mini-batch", "step_seconds")]
    step_range_seconds: Annotated[
        tuple[float, float] | None,
        predicted(
            "the step with the low and the high quantile of every layer's seconds; null: not profiled",
            "step_range_seconds",
        ),
    ]
    steady_step_seconds: Annotated[
        float,
        predicted(
            "time that a step adds if steps follow each other without a barrier", "steady_step_seconds"
        ),
    ]
    samples_per_second: Annotated[float, predicted("throughput of all replicas", "samples_per_second")]
    mini_batch: Annotated[int, predicted("samples of a step", "mini_batch")]
    updates: Annotated[int, predicted("updates in a step", "updates")]
    bubble_ratio: Annotated[float, predicted("share of a step in which a worker is idle", "bubble_ratio")]
    peak_bytes: Annotated[list[float], predicted("memory by worker", "peak_bytes")]
    usable_by_worker_bytes: Annotated[
        list[float],
        predicted("memory that each worker can use, if devices differ; otherwise empty", "usable_by_worker"),
    ]
    memory: Annotated[list[MemoryShown], predicted("parts of the peak memory, by worker", "memory")]
    fits: Annotated[bool, predicted("whether all workers' peaks fit their memory", "fits")]
    notes: Annotated[list[str], predicted("caveats, for people", "notes")]


class PlanShown(PredictionShown):
    """A plan."""

    mesh: Annotated[
        list[list[list[int]]] | None,
        predicted(
            "devices by replica, worker and position (dp_shard, cp, tp), for DeviceMesh; null: one a worker",
            "mesh",
        ),
    ]


class LargerShown(PlanShown):
    """A plan that would need more memory than available."""

    needed_bytes: Annotated[float, predicted("memory of a device", "needed_bytes")]


class TooLargeShown(ConfigurationShown):
    """A configuration that does not fit."""

    needed_bytes: Annotated[float, describe("minimum memory on its fullest worker")]
    worker_usable_bytes: Annotated[float, describe("memory that this worker can use", "usable_bytes")]
    worker: Annotated[int, describe("number of this worker")]


class RejectedShown(Part):
    """Numbers of a scheme's candidates by outcome."""

    scheme: str
    candidates: int
    too_large: Annotated[int, describe("candidates that do not fit the memory, unless known to be slower")]
    slower_by_bound: Annotated[
        int, describe("candidates that cannot be as fast as the best found, and were not simulated", "slower")
    ]
    simulated: int
    closest_too_large: Annotated[
        TooLargeShown | None, describe("the smallest candidate that does not fit", "closest")
    ]


class WhyShown(Part):
    """Reasons that the best plan is the best."""

    parts_seconds: Annotated[Parts, describe("parts of the best plan's step", "parts")]
    limit: Annotated[str | None, describe("the largest part other than compute")]
    second: Annotated[
        str | None,
        describe(
            "scheme of the second-best plan, which has another scheme", "second.play.configuration.scheme"
        ),
    ] = None
    second_parts_seconds: Annotated[
        Parts | None, describe("parts of the second-best plan's step", "second_parts")
    ]
    second_wins_if: Annotated[
        list[BreakEven], describe("changes that would make the second-best plan win", "break_evens")
    ]
    in_more_memory: Annotated[LargerShown | None, describe("a faster plan that does not fit")]


class OrderShown(PredictionShown):
    """A computed order."""

    placement_of: Annotated[
        str,
        describe(
            "scheme of the plan with the same placement and micro-batches",
            "named.play.configuration.scheme",
        ),
    ]
    split: Annotated[bool, describe("whether its backwards are split")]
    objective: Annotated[
        str, describe("the objective: makespan, or steady without a barrier", "synthesis.objective")
    ]
    lower_bound_seconds: Annotated[
        float,
        describe("lower bound of the step over all orders of these ops within the memory", "bound_seconds"),
    ]
    reason: Annotated[
        str,
        describe(
            "why the bound holds, for people; in seconds of ops, messages and syncs", "synthesis.bound.reason"
        ),
    ]
    gap: Annotated[float, describe("maximum share of the step that a better order could save")]
    method: Annotated[str, describe("method that found the order")]
    recut: Annotated[bool, describe("whether layers were moved between stages")]


class OrdersShown(Part):
    """Orders computed for the best plans."""

    gain: Annotated[float, describe("share of the best named plan's step that the best order saves; 0: none")]
    named: Annotated[PlanShown, describe("the best named plan")]
    orders: Annotated[list[OrderShown], describe("computed orders, best first", "computed")]
    omitted: Annotated[list[Omission], describe("orders that were not computed, and why", "omissions")]
    stopped: Annotated[bool, describe("whether the search was interrupted")]


class AtLengthShown(Part):
    """The best plans at a length of the sequence."""

    positions: Annotated[int, describe("positions of a sample's sequence")]
    whole: Annotated[PlanShown | None, describe("the best plan without slices; null: none fits", "unsliced")]
    sliced: Annotated[PlanShown | None, describe("the best plan with slices; null: none fits")]
    slices_win: Annotated[bool, describe("whether slices are faster, or alone fit")]
    faster: Annotated[
        float | None, describe("how many times as fast slices are; null: one of the two does not fit")
    ]


class Planned(Result):
    """`counterflow plan`."""

    model_config = reads("result")

    model: Annotated[str, describe("name of the model", "task.model.name")]
    profile: Annotated[str, describe("name of the profile", "task.profile.name")]
    cluster: Annotated[str, describe("name of the cluster", "task.cluster.name")]
    mini_batch: Annotated[int, describe("samples of an update, over all replicas")]
    usable_bytes: Annotated[float, describe("memory of a device without the reserve")]
    layout: Annotated[
        str | None,
        describe(
            "the best plan's stages as Megatron-LM's `--pipeline-model-parallel-layout`; null: it has none"
        ),
    ]
    best: Annotated[list[PlanShown], describe("the best plans: one, or the number given by `--top`")]
    schemes: Annotated[list[PlanShown], describe("the best plan of each scheme", "result.of_schemes")]
    rejected: Annotated[
        list[RejectedShown], describe("numbers of candidates by outcome, by scheme", "result.rejections")
    ]
    omitted: Annotated[
        list[Omission], describe("parts of the space without candidates, and why", "result.omissions")
    ]
    why: WhyShown
    synthesized: Annotated[OrdersShown | None, describe("computed orders, with `--synthesize`")]
    by_length: Annotated[
        list[AtLengthShown],
        describe("plans at other lengths of the sequence, with `--by-length`; otherwise empty"),
    ]


class ExampleShown(Part):
    """A paper's run."""

    name: str
    about: str
    mini_batch: int
    source: str


class Examples(Result):
    """`counterflow plan --list`."""

    examples: list[ExampleShown]


def planned(
    task: PlanningTask,
    result: SearchResult,
    explained: Why,
    orders: Orders | None = None,
    by_length: Sequence[AtLength] = (),
) -> Planned:
    """The best plans with all their explanations.

    Args:
        task: what was planned.
        result: result of the search.
        explained: why the best plan is the best.
        orders: orders computed for the best plans.
        by_length: plans at other lengths.
    """
    layout = result.best[0].layout
    return Planned.of(
        task=task, result=result, layout=layout, why=explained, synthesized=orders, by_length=by_length
    )
