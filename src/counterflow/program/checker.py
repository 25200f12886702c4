"""The checker: whether a schedule is right, rule by rule, with the place of each violation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from counterflow.common.html import table, titled
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync
from counterflow.schedule.scheme_keywords import Sizes

from .actions import Matching, Program
from .communication.communication_plan import CommunicationPlan
from .lowering import NOTHING_SHARED, WITH_A_BARRIER, Ends, OpTimes, Shared, lower
from .rules import RULES, CheckSubject, details, require


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of one rule.

    Attributes:
        rule: name of the rule.
        ok: whether the rule holds; None if it was skipped because another one is broken.
        detail: the reason, for people.
    """

    rule: str
    ok: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all rules."""

    results: tuple[RuleResult, ...]

    @property
    def ok(self) -> bool:
        """True if every rule was checked and holds."""
        return all(result.ok for result in self.results)

    def _repr_html_(self) -> str:
        signs = {True: "✓", False: "✗", None: "·"}
        rows = [(signs[result.ok], result.rule, result.detail) for result in self.results]
        return titled("Right" if self.ok else "Wrong", table(("", "rule", "detail"), rows))


def inspect(
    schedule: Schedule,
    *,
    program: Program | None = None,
    peak_limit: float | None = None,
    plan: CommunicationPlan | None = None,
) -> Report:
    """Check every rule on a schedule.

    Args:
        schedule: any schedule, however wrong.
        program: its action lists; default: lowered from the schedule.
        peak_limit: maximum forwards that a worker may stash, in (stage x micro-batch) units; None: no limit.
        plan: the program's communication plan; default: made from the program.

    >>> from counterflow.schedule.schemes import chimera
    >>> inspect(chimera(stages=4, micro_batches=4)).ok
    True
    """
    results: dict[str, RuleResult] = {}
    subject = CheckSubject(schedule, program, peak_limit, plan=plan)
    for rule in RULES:
        broken = [name for name in rule.after if not results[name].ok]
        if not broken and rule.lowered and subject.program is None:
            subject.program = lower(schedule, recheck=False)
        if broken:
            results[rule.name] = RuleResult(rule.name, None, f"not checked, because '{broken[0]}' fails")
            continue
        detail = details(rule, subject)
        results[rule.name] = RuleResult(rule.name, not detail, detail)
    return Report(tuple(results.values()))


def check(
    schedule: Schedule | str,
    *,
    program: Program | None = None,
    peak_limit: float | None = None,
    **sizes: Unpack[Sizes],
) -> None:
    """Raise an error if the schedule breaks a rule; see ``inspect`` for the arguments.

    Args:
        schedule: a schedule, or the name of a scheme.
        program: as in ``inspect``.
        peak_limit: as in ``inspect``.
        sizes: options of the named scheme.

    Raises:
        DeadlockError: the workers wait for each other in a circle; the message shows it.
        ScheduleError: another rule is broken; the message says which, where, expected and got.
    """
    subject = CheckSubject(registry.schedule_of(schedule, sizes), program, peak_limit)
    for rule in RULES:
        if rule.lowered and subject.program is None:
            subject.program = lower(subject.schedule, recheck=False)
        require(subject, (rule,))


def checked_program(
    schedule: Schedule,
    *,
    replicas: int = 1,
    sync: Sync | str = Sync.EAGER_OPT,
    times: OpTimes | None = None,
    matching: Matching = Matching.ORDER,
    shared: Shared = NOTHING_SHARED,
    ends: Ends = WITH_A_BARRIER,
) -> Program:
    """The action lists of a schedule that may be hand-made, checked; see ``lower`` for the arguments.

    Raises:
        DeadlockError: the workers wait for each other in a circle; the message shows it.
        ScheduleError: another rule is broken.
        ConfigError: replicas below 1, an unknown sync mode.
    """
    require(CheckSubject(schedule), (rule for rule in RULES if not rule.lowered))
    return lower(
        schedule,
        replicas=replicas,
        sync=sync,
        times=times,
        matching=matching,
        shared=shared,
        ends=ends,
    )
