"""A comparison as ``counterflow compare --json`` prints it: the meaning of each key, and where it is read.

Times are in the unit of the costs. Nothing is printed here.
"""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import Options, Part, Result, describe


class ComparedShown(Part):
    """A schedule of a comparison."""

    name: Annotated[str, describe("the scheme, with the options that differ from their defaults")]
    scheme: Annotated[str, describe("scheme; `computed`: a computed order")]
    options: Annotated[Options, describe("all options", "schedule.options")]
    synchronous: Annotated[bool, describe("false: it computes with older weights")]
    stages: Annotated[int, describe("number of stages of the model", "schedule.stages")]
    step: Annotated[float, describe("seconds of one mini-batch; F if a forward takes 1")]
    bubble_ratio: Annotated[float, describe("share of a step in which a worker is idle")]
    activations: Annotated[
        float,
        describe("maximum activations of a worker, in units of its share of the model for one micro-batch"),
    ]
    weights: Annotated[float, describe("maximum copies of a worker's share of the model, versions counted")]
    peak_bytes: Annotated[float | None, describe("maximum bytes of a worker; null: no bytes were given")]
    proved: Annotated[bool | None, describe("whether no order of these stages is better; null: not computed")]
    lower_bound: Annotated[
        float | None, describe("lower bound of all orders of these stages; null: not computed")
    ]


class LeftOut(Part):
    """A scheme without a schedule of this size."""

    scheme: Annotated[str, describe("scheme")]
    reason: Annotated[str, describe("why")]


class ComparisonShown(Result):
    """`counterflow compare`."""

    workers: int
    micro_batches: int
    costs_of: Annotated[
        str, describe("worker: costs are those of a worker's share; model: of the whole model")
    ]
    rows: Annotated[list[ComparedShown], describe("schedules within the limits, fastest first")]
    too_large: Annotated[list[ComparedShown], describe("schedules beyond the limits, smallest first")]
    left_out: list[LeftOut]
    profiled: Annotated[
        str, describe("model, cluster and samples of a micro-batch of a profile; empty: costs were given")
    ]


class SweepShown(Result):
    """`counterflow compare --sweep`."""

    name: Annotated[str, describe("what varies: workers, micro_batches or p2p", "sweep.name")]
    values: Annotated[list[float], describe("its values", "sweep.values")]
    comparisons: Annotated[list[ComparisonShown], describe("a comparison for each value")]
