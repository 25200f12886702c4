"""The schedule of ``schedule="auto"``: stages are timed on the first batch, the fastest schedule is taken.

Invariant: all workers choose the same schedule, and the timed pipeline is one of a copy of the model, so
nothing that is trained depends on the times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

from counterflow.measure.links import measure_messages
from counterflow.measure.stages.stage_record import StageCost
from counterflow.measure.stages.timing import measure_stages
from counterflow.planning.scheme_comparison import compare
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule.ir import Schedule
from counterflow.simulation.costs import Costs

WARM_UP_STEPS = 2
"""Steps before the timed ones."""

_LOG = logging.getLogger("counterflow.integrations.transformers")


def chosen(first: Schedule, pipeline: Pipeline, batch: tuple[Any, Any]) -> Schedule:
    """The schedule with the shortest step, of those that save no more activations than the first one.

    All workers call it. The timed pipeline is closed.

    Args:
        first: schedule of the timed pipeline, with one stage a worker.
        pipeline: pipeline of a copy of the model.
        batch: inputs and targets of a step.
    """
    workers = first.placement.workers
    with pipeline:
        if workers == 1:
            return first
        for _ in range(WARM_UP_STEPS):
            pipeline.step(*batch)
        stages = measure_stages(pipeline, *batch)
        worker_costs = _costs(pipeline, stages)
        layers = sum(stage.layers for stage in stages)
        costs = cast("list[Costs]", pipeline.transport.gather_objects(worker_costs))[0]
    comparison = compare(workers, first.micro_batches, costs, peak=float(workers))
    for row in comparison.best:
        if row.synchronous and row.schedule.stages <= layers and row.schedule.workload.slices == 1:
            _LOG.info("schedule='auto': %s, %.4g s a step", row.name, row.step)
            return row.schedule
    return first


def _costs(pipeline: Pipeline, stages: Sequence[StageCost]) -> Costs:
    size = int(fmean(stage.profile.output_bytes for stage in stages[:-1])) // 4 * 4 or 4
    travel = measure_messages(pipeline.transport, [size])[0]
    return Costs(
        forward=fmean(stage.forward_seconds for stage in stages),
        backward=fmean(stage.backward_seconds for stage in stages),
        input_gradient=fmean(stage.input_gradient_seconds for stage in stages),
        weight_gradients=fmean(stage.weight_gradients_seconds for stage in stages),
        p2p=travel.seconds,
    )
