"""What ``counterflow plan --json`` prints; ``counterflow.planning.report`` makes it."""

from __future__ import annotations

from typing import Annotated

from .result import Options, Part, Result, said


class NodesShown(Part):
    """Nodes of one kind, side by side."""

    kind: str
    nodes: Annotated[int, said("how many")]


class ConfigurationShown(Part):
    """A configuration."""

    scheme: str
    options: Annotated[Options, said("the scheme's options")]
    replicas: Annotated[int, said("copies of the whole pipeline group")]
    micro_batch_size: Annotated[int, said("samples of a micro-batch")]
    recompute: Annotated[str, said("none, stage or layer")]
    sync_mode: Annotated[str, said("end, eager or eager-opt")]
    arrangement: Annotated[str, said("pipeline-inside, replicas-inside or copies-inside a node")]
    nodes: Annotated[
        list[NodesShown], said("the order in which nodes of different kinds stand; empty: the cluster's")
    ]
    zero_stage: Annotated[int, said("1: optimiser state is sharded over the holders of a weight")]
    cuts: Annotated[
        list[int] | str, said("layers at which stages begin after the first; or balanced, even: not cut yet")
    ]
    tensor_parallel: Annotated[
        int, said("positions of tensor parallelism, at each of which stands a pipeline")
    ]


class MemoryShown(Part):
    """A worker's memory at its peak, in a plan."""

    weights_bytes: Annotated[float, said("weights, gradients, optimiser state, of all copies and versions")]
    activations_bytes: Annotated[float, said("kept for backwards, and what recomputation needs")]
    buffers_bytes: Annotated[float, said("messages under way")]
    workspace_bytes: Annotated[float, said("what the op that needs most needs besides; 0: not profiled")]
    gradients_bytes: Annotated[float, said("of `weights_bytes`, gradients; 0: not profiled")]
    optimizer_bytes: Annotated[float, said("of `weights_bytes`, the optimiser's state; 0: not profiled")]
    casts_bytes: Annotated[float, said("of `weights_bytes`, weights cast to another precision")]
    communicators_bytes: Annotated[float, said("communicators; 0: the cluster does not say what one takes")]


class PredictionShown(ConfigurationShown):
    """What a configuration costs."""

    workers: Annotated[int, said("of a replica")]
    micro_batches: Annotated[int, said("of an update, on each replica")]
    step_seconds: Annotated[float, said("one mini-batch")]
    steady_step_seconds: Annotated[float, said("what a step adds where none waits for a barrier")]
    samples_per_second: Annotated[float, said("of all replicas")]
    mini_batch: Annotated[int, said("samples that its step is counted for")]
    updates: Annotated[int, said("in that step")]
    bubble_ratio: Annotated[float, said("share of a step in which a worker is idle")]
    peak_bytes: Annotated[list[float], said("by worker")]
    usable_by_worker_bytes: Annotated[
        list[float], said("memory of each worker, where devices differ; else empty")
    ]
    memory: Annotated[list[MemoryShown], said("by worker")]
    fits: Annotated[bool, said("whether all workers' peaks fit their memory")]
    notes: list[str]


class PlanShown(PredictionShown):
    """A plan."""

    mesh: Annotated[
        list[list[list[int]]] | None,
        said("devices by replica, worker and position, for a DeviceMesh; null without tensor parallelism"),
    ]


class LargerShown(PlanShown):
    """A plan that would need more memory than there is."""

    needed_bytes: Annotated[float, said("of a device")]


class TooLargeShown(ConfigurationShown):
    """A configuration that does not fit."""

    needed_bytes: Annotated[float, said("at least, on its largest worker")]
    worker_usable_bytes: Annotated[float, said("what that worker has")]
    worker: Annotated[int, said("that worker")]


class RejectedShown(Part):
    """What became of a scheme's candidates."""

    scheme: str
    candidates: int
    too_large: Annotated[int, said("that do not fit the memory, unless known to be slower")]
    slower_by_bound: Annotated[int, said("that cannot be as fast as what was found, and were not simulated")]
    simulated: int
    closest_too_large: Annotated[TooLargeShown | None, said("the smallest that does not fit")]


class OmittedShown(Part):
    """A part of the space without a candidate."""

    what: Annotated[str, said("a scheme, or depths")]
    reason: str


class PartsShown(Part):
    """Where a step's seconds go; together they are the step."""

    compute: Annotated[float, said("ops of a worker, the mean of all")]
    imbalance: Annotated[float, said("what the busiest worker computes beyond the mean")]
    bubbles: Annotated[float, said("idle time of the busiest worker that the order alone makes")]
    messages: Annotated[float, said("what messages add")]
    allreduce: Annotated[float, said("what gradient syncs add that nothing hides")]
    update: Annotated[float, said("the optimiser, and what else an update takes")]
    shared_cores: Annotated[float, said("what workers add that wait for a core")]
    broadcasts: Annotated[float, said("what sending updated weights adds, with `zero_stage` 1")]


class ChangeShown(Part):
    """A change that makes the second plan win."""

    what: Annotated[str, said("messages or all-reduces")]
    times: Annotated[float, said("so many times slower; below 1: faster")]


class WhyShown(Part):
    """Why the best plan is the best."""

    parts_seconds: PartsShown
    limit: Annotated[str | None, said("the part that costs most beside compute")]
    second: Annotated[str | None, said("the scheme of the best plan of another one")]
    second_parts_seconds: PartsShown | None
    second_wins_if: list[ChangeShown]
    in_more_memory: Annotated[LargerShown | None, said("a faster plan that does not fit")]


class OrderShown(PredictionShown):
    """A computed order."""

    placement_of: Annotated[str, said("the scheme of the plan whose placement and micro-batches it has")]
    split: Annotated[bool, said("whether its backwards are split")]
    objective: Annotated[str, said("what was made small: makespan, or steady where there is no barrier")]
    lower_bound_seconds: Annotated[float, said("no order of these ops within the memory has a shorter step")]
    reason: Annotated[str, said("why, for people; in seconds of ops, messages and syncs")]
    gap: Annotated[float, said("share of the step that a better order could save at most")]
    method: Annotated[str, said("what found it")]
    recut: Annotated[bool, said("whether layers moved between stages for it")]


class OrdersShown(Part):
    """What was computed for the best plans."""

    gain: Annotated[
        float, said("share of the best named plan's step that the best order saves; 0: none does")
    ]
    named: Annotated[PlanShown, said("the best named plan")]
    orders: Annotated[list[OrderShown], said("best first")]
    omitted: Annotated[list[OmittedShown], said("what was not computed, and why")]
    stopped: Annotated[bool, said("whether it was interrupted")]


class Planned(Result):
    """`counterflow plan`."""

    model: Annotated[str, said("its name")]
    profile: Annotated[str, said("its name")]
    cluster: Annotated[str, said("its name")]
    mini_batch: Annotated[int, said("samples of an update, of all replicas")]
    usable_bytes: Annotated[float, said("memory of a device without the reserve")]
    best: Annotated[list[PlanShown], said("the best plans: one, or as many as `--top` says")]
    schemes: Annotated[list[PlanShown], said("the best plan of each scheme")]
    rejected: Annotated[list[RejectedShown], said("by scheme")]
    omitted: list[OmittedShown]
    why: WhyShown
    synthesized: Annotated[OrdersShown | None, said("with `--synthesize`")]


PLAN_PARTS: tuple[type[Part], ...] = (
    *(
        ConfigurationShown,
        NodesShown,
        PlanShown,
        MemoryShown,
        RejectedShown,
        TooLargeShown,
        OmittedShown,
    ),
    *(WhyShown, PartsShown, ChangeShown, LargerShown, OrdersShown, OrderShown),
)
"""Those that the page tells of."""
