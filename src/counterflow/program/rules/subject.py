"""The subject of a check, and rules: named properties of a schedule or of the lists it is lowered to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from counterflow.errors import ScheduleError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule

from ..actions import Program
from ..communication.communication_plan import CommunicationPlan, communication_plan

MOST_SHOWN = 5
"""Number of violations of a rule that are shown; the rest are counted."""


@dataclass(slots=True)
class CheckSubject:
    """The subject of a check: a schedule, its lowered program once it exists, and the user's limit.

    ``graph`` is the schedule's graph and ``plan`` its communication plan, made when a rule first needs them.
    """

    schedule: Schedule
    program: Program | None = None
    peak_limit: float | None = None
    graph: OpGraph | None = None
    plan: CommunicationPlan | None = None

    def needed_graph(self) -> OpGraph:
        """The schedule's graph, made at the first call."""
        if self.graph is None:
            self.graph = OpGraph(self.schedule)
        return self.graph

    def needed_plan(self) -> CommunicationPlan:
        """The program's communication plan, made at the first call."""
        if self.plan is None:
            assert self.program is not None
            self.plan = communication_plan(self.program, self.needed_graph())
        return self.plan


@dataclass(frozen=True, slots=True)
class Rule:
    """A named property. ``after`` names the rules that have to hold before it can be checked."""

    name: str
    violations: Callable[[CheckSubject], Iterator[str]]
    after: tuple[str, ...] = ()
    lowered: bool = False
    error: type[ScheduleError] = ScheduleError


def details(rule: Rule, subject: CheckSubject) -> str:
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


def require(subject: CheckSubject, rules: Iterable[Rule]) -> None:
    """Raise the error of the first of ``rules`` that ``subject`` breaks.

    Raises:
        ScheduleError: a rule is broken, with its name and violations; ``DeadlockError`` for a deadlock.
    """
    for rule in rules:
        detail = details(rule, subject)
        if detail:
            raise rule.error(f"{subject.schedule} breaks the rule '{rule.name}':\n{detail}")
