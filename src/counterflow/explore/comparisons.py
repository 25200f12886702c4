"""All schemes for one model, for the page: what ``counterflow compare`` finds, each row ready to open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from counterflow.common.number_texts import byte_size, compact
from counterflow.common.plurals import plural
from counterflow.drawing.chart import percent
from counterflow.drawing.time_units import time_unit
from counterflow.planning.compared import Compared
from counterflow.planning.scheme_comparison import Comparison
from counterflow.planning.scheme_comparison import compare as compared
from counterflow.schedule.formats import dumps
from counterflow.simulation.model_share import CostsOf

from .requests import CompareRequest

_LONGEST = 2.0
"""Length of the longest bar, in those of the fastest schedule; bars of slower ones end there."""


def compare(request: CompareRequest, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Compare all schemes: the best row of each, the quickest first.

    Args:
        request: request.
        report: callback for progress.

    Raises:
        ConfigError: the request is inconsistent.
    """
    comparison = compared(
        request.workers,
        request.micro_batches,
        request.costs.costs(),
        costs_of=request.costs.costs_of or CostsOf.WORKER,
        peak=request.peak,
        memory_bytes=request.memory_bytes(),
        seconds=request.seconds,
        report=lambda number, total, what: report(
            {"said": f"{number} of {total}: {what}", "share": (number - 1) / total}
        ),
    )
    steps = [row.step for row in comparison.listed] or [1.0]
    longest = min(max(steps), _LONGEST * min(steps))
    return {
        "heading": f"{plural(comparison.workers, 'worker')}, "
        f"{plural(comparison.micro_batches, 'micro-batch')}",
        "rows": [_row(comparison, row, longest) for row in comparison.listed],
        "too_large": len(comparison.too_large),
        "left_out": [f"{name}: {reason}" for name, reason in comparison.left_out],
    }


def _row(comparison: Comparison, row: Compared, longest: float) -> dict[str, Any]:
    unit = time_unit(longest, in_forwards=comparison.costs.in_forwards)
    over = row.step / comparison.rows[0].step - 1
    columns: dict[str, Any] = {
        "name": row.name,
        "remark": _remark(row),
        "synchronous": row.synchronous,
        "step": unit.text(row.step),
        "length": min(1.0, row.step / longest),
        "bubble": row.bubble_ratio,
        "over": "" if over < 5e-4 else percent(over),
        "bubbles": percent(row.bubble_ratio),
        "activations": compact(row.activations, 4),
        "weights": compact(row.weights, 4),
        "memory": "" if row.peak_bytes is None else byte_size(row.peak_bytes),
    }
    if row.computed is None:
        return columns | {"scheme": row.scheme, "options": dict(row.schedule.options)}
    return columns | {"schedule": dumps(row.schedule)}


def _remark(row: Compared) -> str:
    if not row.synchronous:
        return "asynchronous"
    if row.computed is None:
        return ""
    gap = row.computed.gap
    return "proved best" if row.computed.proved else f"at most {percent(gap)} from the best"
