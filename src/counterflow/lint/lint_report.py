"""The linter's verdict as ``counterflow lint --json`` prints it. Nothing is printed here."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import Part, Result, describe

from .circle_words import WaitShown, waits_shown
from .flight_places import DumpPlace
from .mending import Fix
from .stalls import Stalls
from .verdicts import LintFinding, RuleVerdict


class FindingShown(Part):
    """A rule of the linter."""

    rule: Annotated[str, describe("name of the rule")]
    ok: Annotated[bool, describe("whether it holds")]
    faults: Annotated[list[str], describe("what breaks it, for people")]
    circle: Annotated[bool, describe("whether the waits are a circle; false: one waits for what never comes")]
    waits: Annotated[list[WaitShown], describe("the ranks that wait for each other, in order")]


class FixShown(Part):
    """Changes after which the lists end."""

    rules: Annotated[list[str], describe("rules under which the changed lists were played to their end")]
    changes: Annotated[list[str], describe("the changes, for people")]


class Linted(Result):
    """`counterflow lint`."""

    form: Annotated[str, describe("what the file contains")]
    ranks: Annotated[int, describe("ranks")]
    calls: Annotated[int, describe("sends and receives of all ranks")]
    ok: Annotated[bool, describe("whether all rules hold")]
    rules: Annotated[list[FindingShown], describe("result of each rule")]
    fix: Annotated[FixShown | None, describe("fewest changes for all rules; null: not needed, or none found")]
    ordinary_fix: Annotated[
        FixShown | None, describe("changes for eager sends and NCCL's order alone, if they are others")
    ]
    stalls: Annotated[Stalls | None, describe("time lost behind other calls; null: less than one percent")]
    remarks: Annotated[list[str], describe("remarks, for people")]
    places: Annotated[list[DumpPlace], describe("of dumps, where each rank is")]


def linted(verdict: RuleVerdict) -> Linted:
    """The verdict on lists."""
    return Linted.of(
        form=verdict.lists.form,
        ranks=len(verdict.lists.ranks),
        calls=verdict.lists.calls,
        ok=verdict.ok,
        rules=[_finding(verdict, finding) for finding in verdict.findings],
        fix=_fix(verdict.fix),
        ordinary_fix=_fix(verdict.first_fix),
        stalls=verdict.stalls,
        remarks=list(verdict.remarks),
        places=list(verdict.places),
    )


def _finding(verdict: RuleVerdict, finding: LintFinding) -> FindingShown:
    play = finding.play
    stuck = play is not None and not play.ok
    return FindingShown.of(
        rule=finding.rule,
        ok=finding.ok,
        faults=list(finding.faults),
        circle=bool(play and play.closed),
        waits=list(waits_shown(verdict.lists, play)) if play is not None and stuck else [],
    )


def _fix(fix: Fix | None) -> FixShown | None:
    if fix is None:
        return None
    return FixShown.of(rules=[rule.value for rule in fix.rules], changes=list(fix.changes))
