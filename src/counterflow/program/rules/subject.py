"""What is checked, and what a rule is: one named property of a schedule or of the lists it is lowered to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from counterflow.errors import ScheduleError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule

from ..actions import Program

MOST_SHOWN = 5
"""Violations of one rule that are shown; the rest are counted."""


@dataclass(slots=True)
class Subject:
    """What is checked: a schedule, its lowered program once there is one, and the user's limit.

    ``graph`` is that of the schedule, made when a rule first needs it.
    """

    schedule: Schedule
    program: Program | None = None
    peak_limit: float | None = None
    graph: OpGraph | None = None

    def needed_graph(self) -> OpGraph:
        """The graph of the schedule."""
        if self.graph is None:
            self.graph = OpGraph(self.schedule)
        return self.graph


@dataclass(frozen=True, slots=True)
class Rule:
    """One named property. ``after`` names the rules without which it cannot be looked at."""

    name: str
    violations: Callable[[Subject], Iterator[str]]
    after: tuple[str, ...] = ()
    lowered: bool = False
    error: type[ScheduleError] = ScheduleError


def details(rule: Rule, subject: Subject) -> str:
    """The rule's violations as lines, the first few of them; empty if it holds."""
    lines: list[str] = []
    more = 0
    for violation in rule.violations(subject):
        if len(lines) < MOST_SHOWN:
            lines.append(violation)
        else:
            more += 1
    if more:
        lines.append(f"… and {more} more")
    return "\n".join(lines)


def require(subject: Subject, rules: Iterable[Rule]) -> None:
    """Raise the error of the first of ``rules`` that ``subject`` breaks.

    Raises:
        ScheduleError: or ``DeadlockError``, with the rule's name and its violations.
    """
    for rule in rules:
        detail = details(rule, subject)
        if detail:
            raise rule.error(f"{subject.schedule} breaks the rule '{rule.name}':\n{detail}")
