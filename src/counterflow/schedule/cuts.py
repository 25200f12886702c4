"""Cuts of a list of layers into stages.

A cut is the tuple of the layers at which each stage after the first begins:

    layers  0  1  2  3  4  5
    stages  ──0── ─1─ ──2───       cuts (2, 3)

Invariant: every stage has at least one layer, and the same costs always give the same cuts. Costs of layers
are computed elsewhere, and torch is not imported. The module belongs to the schedule's room because the
planner and the engine both cut, and neither imports the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import SupportsIndex

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from .layouts import Layout


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The cuts that minimise the most expensive stage.

    Exact: among these cuts those with the smallest sum of the stages' squared costs, and among those the ones
    that cut earliest, so the first stages, which hold the most activations, are the lighter ones.
    It takes time in proportion to stages · places at which one may begin · layers of the longest stage.

    Args:
        costs: each layer's cost in any one unit, finite, 0 or more.
        stages: number of stages, 1 to the number of layers.

    Raises:
        ConfigError: fewer layers than stages, no stages, or an illegal cost.

    >>> balance([1, 1, 1, 1, 4], stages=2), balance([1] * 10, stages=4)
    ((4,), (2, 4, 7))
    """
    _refuse_too_few(len(costs), stages)
    ends = [0, *accumulate(_integers(costs))]
    return _squarest(ends, stages, _smallest_limit(ends, stages))


def explicit(cuts: Sequence[int] | str, layers: int, stages: int) -> tuple[int, ...]:
    """The user's own cuts, after they are checked.

    Args:
        cuts: the layer at which each stage after the first begins; or a layout of Megatron-LM as text, whose
            first layer is an embedding, and whose last is a head with the loss.
        layers: number of layers of the model.
        stages: number of stages of the schedule.

    Raises:
        ConfigError: the number of cuts is not one less than that of stages, a stage has no layer, or a layout
            has other layers or stages.

    >>> explicit([2, 3], layers=6, stages=3), explicit("Et|t|ttL", layers=6, stages=3)
    ((2, 3), (2, 3))
    """
    _refuse_too_few(layers, stages)
    if isinstance(cuts, str):
        return Layout.read(cuts).cuts(layers, stages=stages)
    if not all(isinstance(cut, (int, SupportsIndex)) for cut in cuts):
        raise ConfigError(f"cuts={list(cuts)}: cuts must be numbers of layers; give whole numbers")
    if len(cuts) != stages - 1:
        raise ConfigError(
            f"cuts={list(cuts)}: {len(cuts)} cuts make {plural(len(cuts) + 1, 'stage')}, not {stages}; "
            f"give {stages - 1}"
        )
    for place, (before, cut) in enumerate(pairwise([0, *cuts])):
        if not before < cut < layers:
            raise ConfigError(
                f"cuts={list(cuts)}: stage {place + 1} begins at layer {cut}; cuts must increase and "
                f"lie between 1 and {layers - 1}, because every stage needs at least one of the {layers} "
                "layers"
            )
    return tuple(cuts)


def stage_layers(cuts: Sequence[int], layers: int) -> tuple[range, ...]:
    """The layers of each stage.

    >>> stage_layers((2, 3), layers=6)
    (range(0, 2), range(2, 3), range(3, 6))
    """
    return tuple(range(first, end) for first, end in pairwise([0, *cuts, layers]))


def _refuse_too_few(layers: int, stages: int) -> None:
    if stages < 1:
        raise ConfigError(f"stages={stages}: must be 1 or more")
    if layers < stages:
        legal = (
            f"choose at most {layers} stage{'s' if layers > 1 else ''}"
            if layers
            else "the model has no layers"
        )
        raise ConfigError(
            f"a model of {plural(layers, 'layer')} for {plural(stages, 'stage')}: every stage needs at "
            f"least one layer; {legal}"
        )


def _integers(costs: Sequence[float]) -> list[int]:
    for index, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise ConfigError(f"cost of layer {index} is {cost}: must be a finite number, 0 or more")
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in ratios)  # all are powers of two
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _smallest_limit(ends: Sequence[int], stages: int) -> int:
    """Smallest cost of the most expensive stage; ``ends[i]`` is the cost of the first i layers.

    Fewer stages within a limit are as good as ``stages``, because cutting one again makes no stage more
    expensive.
    """
    low, high = max(b - a for a, b in pairwise(ends)), ends[-1]
    while low < high:
        limit = (low + high) // 2
        reached = 0
        for _ in range(stages):
            reached = bisect_right(ends, ends[reached] + limit) - 1
        if reached == len(ends) - 1:
            high = limit
        else:
            low = limit + 1
    return low


def _reached(ends: Sequence[int], stages: int, limit: int) -> tuple[list[int], list[int]]:
    """Latest layers at which the first stages may end, for each number of them, and earliest at which
    the last ones may begin; no stage is above ``limit`` or empty.
    """
    layers = len(ends) - 1
    latest, earliest = [0], [layers]
    for count in range(1, stages + 1):
        end = bisect_right(ends, ends[latest[-1]] + limit) - 1
        latest.append(min(end, layers - stages + count))
        first = bisect_left(ends, ends[earliest[-1]] - limit)
        earliest.append(max(first, stages - count))
    return latest, earliest


def _squarest(ends: Sequence[int], stages: int, limit: int) -> tuple[int, ...]:
    layers = len(ends) - 1
    # best[i]: the smallest sum for the layers from i on, in as many stages as were counted so far.
    best: list[int | None] = [
        (ends[-1] - end) ** 2 if index < layers and ends[-1] - end <= limit else None
        for index, end in enumerate(ends)
    ]
    choices: list[dict[int, int]] = []
    latest, earliest = _reached(ends, stages, limit)
    for counted in range(2, stages + 1):
        longer: list[int | None] = [None] * (layers + 1)
        choice: dict[int, int] = {}
        # Between where the stages before may end at the latest, and these may begin at the earliest.
        for first in range(earliest[counted], latest[stages - counted] + 1):
            for end in range(max(first + 1, earliest[counted - 1]), layers - counted + 2):
                cost = ends[end] - ends[first]
                if cost > limit:
                    break
                rest, so_far = best[end], longer[first]
                if rest is not None and (so_far is None or cost * cost + rest < so_far):
                    longer[first], choice[first] = cost * cost + rest, end
        best = longer
        choices.append(choice)
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return tuple(cuts[1:])
