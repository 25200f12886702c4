"""All schemes for one model, for the page: what ``counterflow compare`` finds, each row ready to open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from counterflow.drawing.chart import percent
from counterflow.drawing.units import bytes_text, compact, time_unit
from counterflow.planning.comparison import Compared, Comparison
from counterflow.planning.comparison import compare as compared
from counterflow.schedule.formats import dumps
from counterflow.simulation import Costs
from counterflow.simulation.cost_texts import COSTS
from counterflow.simulation.model_share import of_stages

from .asked import CompareAsked


def compare(asked: CompareAsked, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The best row of each scheme, the quickest first.

    Args:
        asked: what is compared.
        tell: told of progress.

    Raises:
        ConfigError: what is asked makes no sense.
    """
    found = compared(
        asked.workers,
        asked.micro_batches,
        asked.costs.costs(),
        costs_of=asked.costs_of,
        peak=asked.peak,
        memory_bytes=asked.memory_bytes(),
        seconds=asked.seconds,
        report=lambda done, total, what: tell({"done": done, "of": total, "doing": what}),
    )
    longest = max((row.step for row in found.best), default=1.0)
    return {
        "heading": f"{found.workers} workers, {found.micro_batches} micro-batches",
        "rows": [_row(found, row, longest) for row in found.best],
        "too_large": len(found.too_large),
        "left_out": [f"{name}: {reason}" for name, reason in found.left_out],
    }


def _row(found: Comparison, row: Compared, longest: float) -> dict[str, Any]:
    unit = time_unit(longest, in_forwards=found.costs.in_forwards)
    over = row.step / found.rows[0].step - 1
    told: dict[str, Any] = {
        "name": row.name,
        "remark": _remark(row),
        "synchronous": row.synchronous,
        "step": unit.text(row.step),
        "length": row.step / longest,
        "bubble": row.bubble_ratio,
        "over": "" if over < 5e-4 else percent(over),
        "bubbles": percent(row.bubble_ratio),
        "activations": compact(row.activations, 4),
        "weights": compact(row.weights, 4),
        "memory": "" if row.peak_bytes is None else bytes_text(row.peak_bytes),
        "costs": _given(of_stages(found.costs, row.schedule.placement, found.costs_of)),
    }
    if row.computed is None:
        return told | {"scheme": row.scheme, "options": dict(row.schedule.options)}
    return told | {"schedule": dumps(row.schedule)}


def _remark(row: Compared) -> str:
    """``Compared.remark`` in the few words that a table has room for."""
    if not row.synchronous:
        return "asynchronous"
    if row.computed is None:
        return ""
    gap = row.computed.gap
    return "proved best" if row.computed.proved else f"at most {percent(gap)} from the best"


def _given(costs: Costs) -> dict[str, Any]:
    """Costs of stages as the page of schedules has them: those that are not the usual ones."""
    found = {}
    for name, one in COSTS.items():
        record = costs if one.record is Costs else costs.memory
        value = one.default if record is None else getattr(record, one.field)
        if value != one.default:
            found[name] = value if one.asked.kind is not str else f"{value:.12g}"
    return found
