"""Costs of a model, or of a worker's share of it, for whatever stages a schedule cuts it into.

Schemes differ in how many stages a worker holds. With costs per stage, a scheme with two stages per worker
computes a model twice as large; with costs of the model, or of a worker's share of it, every schedule on the
same number of workers computes the same model.

Invariant: a field of the costs is divided if its definition says so (``Asked.divided``).
"""

from __future__ import annotations

from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from counterflow.errors import ConfigError
from counterflow.schedule.placement import Placement

from .costs import ByteCosts, Costs

Record = TypeVar("Record", Costs, ByteCosts)


class CostsOf(StrEnum):
    """The unit that costs are given for."""

    STAGE = "stage"
    WORKER = "worker"
    MODEL = "model"


def of_stages(costs: Costs, placement: Placement, unit: CostsOf) -> Costs:
    """Costs of the stages of a placement, from those of a worker's share of the model or of the whole model.

    Args:
        costs: costs of one stage, of 1/P of the model (P: the placement's workers), or of the whole model.
        placement: which worker holds which stage.
        unit: the unit of these costs.

    Raises:
        ConfigError: a cost is given stage by stage, so it belongs to one placement only.

    >>> from counterflow.schedule.placement import linear, wave
    >>> [of_stages(Costs(), placed, CostsOf.WORKER).forward for placed in (linear(4), wave(4, 1))]
    [1.0, 0.5]
    >>> of_stages(Costs(backward=8.0), linear(4), CostsOf.MODEL).backward
    2.0
    """
    if unit is CostsOf.STAGE:
        return costs
    if costs.ops is not None or not isinstance(costs.memory, ByteCosts | None):
        raise ConfigError(f"costs of ops are those of one schedule's stages; give costs of a {unit}")
    share = (placement.workers if unit is CostsOf.WORKER else 1) / placement.stages
    memory = None if costs.memory is None else _divided(costs.memory, share, unit)
    return replace(_divided(costs, share, unit), memory=memory, relative=costs.in_forwards)


def _divided(record: Record, share: float, unit: CostsOf) -> Record:
    changed: dict[str, Any] = {}
    for cost in fields(record):
        option = cost.metadata.get("cli_field")
        value = getattr(record, cost.name)
        if option is None or option.divided is None or value is None:
            continue
        if not isinstance(value, (int, float)):
            whose = "a worker's share of the" if unit is CostsOf.WORKER else "the whole"
            raise ConfigError(
                f"{option.name or cost.name}: {len(value)} numbers are those of one placement's stages; give "
                f"one number, for {whose} model"
            )
        changed[cost.name] = max(value * share, min(value, option.divided))
    return replace(record, **changed)
