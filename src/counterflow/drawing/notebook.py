"""Representations of simulations and schedules in a notebook: a picture, or the orders as a table.

Invariant: the picture is an SVG without external references, and all text is escaped; this module is loaded
when something is shown.
"""

from __future__ import annotations

from counterflow.common.html import preformatted, table, titled
from counterflow.errors import ScheduleError
from counterflow.program.checker import check
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Simulation, simulate

from .charting import chart_of

MOST_OPS = 5_000
"""Maximum ops that are drawn; more make a notebook slow, and single ops invisible."""


def svg_of(result: Simulation) -> str | None:
    """The timeline as an SVG element; None if there are too many ops to be seen."""
    from .figure import svg  # noqa: PLC0415 - matplotlib takes a while to import

    if not 0 < sum(map(len, result.schedule.orders)) <= MOST_OPS:
        return None
    drawn = svg([chart_of(result, memory=result.costs.memory is not None)])
    return drawn[drawn.index("<svg") :]


def html_of(schedule: Schedule) -> str:
    """A schedule simulated with unit costs; a wrong one as its orders, with the violations."""
    if sum(map(len, schedule.orders)) > MOST_OPS:
        return titled(str(schedule), _orders(schedule))
    try:
        check(schedule)
    except ScheduleError as error:
        return titled(f"{schedule} is wrong", preformatted(str(error)), _orders(schedule))
    return titled(str(schedule), svg_of(simulate(schedule)) or "")


_SHOWN = 60
"""Maximum ops of a worker that its row shows."""


def _orders(schedule: Schedule) -> str:
    rows = []
    for worker, order in enumerate(schedule.orders):
        more = f" … {len(order) - _SHOWN:,} more" if len(order) > _SHOWN else ""
        rows.append((f"worker {worker}", " ".join(map(str, order[:_SHOWN])) + more))
    return table(("worker", "ops"), rows[:_SHOWN])
