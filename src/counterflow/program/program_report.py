"""The checker's verdict as ``counterflow check --json`` prints it. Nothing is printed here."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import describe, reads
from counterflow.schedule.ir import Schedule
from counterflow.schedule.schedule_report import Sized

from .checker import Report, RuleResult


class Checked(Sized):
    """`counterflow check`."""

    model_config = reads("schedule", "report")

    op_count: Annotated[int, describe("ops of all workers")]
    ok: Annotated[bool, describe("whether all rules hold")]
    rules: Annotated[list[RuleResult], describe("result of each rule", "report.results")]


def checked(schedule: Schedule, report: Report) -> Checked:
    """The results of the rules for a schedule."""
    return Checked.of(schedule=schedule, report=report, op_count=sum(map(len, schedule.orders)))
