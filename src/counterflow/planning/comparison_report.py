"""A comparison as ``counterflow compare --json`` prints it: what each key means, and where it is read.

Times in the unit of the costs. What it does not do: print.
"""

from __future__ import annotations

from typing import Annotated

from counterflow.shown import Options, Part, Result, said


class ComparedShown(Part):
    """A schedule of a comparison."""

    name: Annotated[str, said("the scheme, with the options that are not the usual ones")]
    scheme: Annotated[str, said("scheme; `computed`: an order that was computed")]
    options: Annotated[Options, said("all options", "schedule.options")]
    synchronous: Annotated[bool, said("false: it computes with older weights")]
    stages: Annotated[int, said("of the model", "schedule.stages")]
    step: Annotated[float, said("seconds of one mini-batch; F where no seconds were given")]
    bubble_ratio: Annotated[float, said("share of a step in which a worker is idle")]
    activations: Annotated[
        float, said("most that a worker holds, in those of its share of the model for one micro-batch")
    ]
    weights: Annotated[float, said("most copies of its share of the model, versions counted")]
    peak_bytes: Annotated[float | None, said("most that a worker holds; null: no bytes were given")]
    proved: Annotated[bool | None, said("whether no order of these stages is better; null: not computed")]
    lower_bound: Annotated[float | None, said("no order of these stages takes less; null: not computed")]


class LeftOut(Part):
    """A scheme without a schedule of this size."""

    scheme: Annotated[str, said("scheme", "0")]
    reason: Annotated[str, said("why", "1")]


class ComparisonShown(Result):
    """`counterflow compare`."""

    workers: int
    micro_batches: int
    costs_of: Annotated[str, said("worker: costs are those of a worker's share; model: of the whole model")]
    rows: Annotated[list[ComparedShown], said("within the limits, the quickest first")]
    too_large: Annotated[list[ComparedShown], said("not within them, the smallest first")]
    left_out: list[LeftOut]
