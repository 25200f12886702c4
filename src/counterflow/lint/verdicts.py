"""Verdict on lists of calls: each rule, the circle in which ranks wait, and the changes that break it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .calls import CallLists
from .flight_places import DumpPlace
from .mending import Fix, fix_of
from .pairing import is_crossed, pairing_faults, without_lone_calls
from .splitting import large_batches, split_batches
from .stalls import Stalls, stalls_of
from .waiting import TransportRule, WaitPlay, play, rules_of

PAIRED = "each send meets its receive"
"""Name of the rule that messages pair up."""

_MOST_FAULTS = 8


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Result of a rule.

    Attributes:
        rule: name of the rule.
        ok: True if it holds.
        faults: what breaks it, in words, of rules other than those of transports.
        play: the play of a rule of a transport; None: another rule.
    """

    rule: str
    ok: bool
    faults: tuple[str, ...] = ()
    play: WaitPlay | None = None


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """Verdict on lists.

    Attributes:
        lists: the lists as they are launched, large batches in parts.
        findings: result of each rule.
        fix: changes after which the lists end under all rules that were asked for; None: not needed, or none.
        first_fix: changes for NCCL's order alone if those for all rules are more; None: none.
        stalls: time lost behind other calls if all lists end; None: less than one percent.
        remarks: what else a reader should know.
        places: of dumps, the place of each rank.
    """

    lists: CallLists
    findings: tuple[LintFinding, ...]
    fix: Fix | None = None
    first_fix: Fix | None = None
    stalls: Stalls | None = None
    remarks: tuple[str, ...] = ()
    places: tuple[DumpPlace, ...] = ()

    @property
    def ok(self) -> bool:
        """True if all rules hold."""
        return all(finding.ok for finding in self.findings)


def lint(
    lists: CallLists,
    rules: Sequence[TransportRule] | None = None,
    *,
    further: Sequence[LintFinding] = (),
    mend: bool = True,
) -> RuleVerdict:
    """Check lists under the rules of transports.

    Args:
        lists: the lists of all ranks.
        rules: the rules; None: all that apply.
        further: results of rules of the ops, which come first.
        mend: whether changes that break a circle are searched, and lost time is measured.
    """
    rules = rules_of(lists) if rules is None else tuple(rules)
    if lists.partial:
        lists = without_lone_calls(lists)
    launched = split_batches(lists)
    faults = tuple(pairing_faults(lists))
    shown = (*faults[:_MOST_FAULTS], f"… and {len(faults) - _MOST_FAULTS} more")[: len(faults)]
    findings = [*further, LintFinding(PAIRED, not faults, shown)]
    for rule in rules:
        result = play(launched, rule)
        findings.append(LintFinding(rule.value, result.ok, play=result))
    stuck = [f.play for f in findings if f.play is not None and not f.play.ok]
    fix, first_fix, stalls = None, None, None
    crossed = any(map(is_crossed, faults))
    if mend and (stuck or crossed) and all(result.closed for result in stuck):
        fix = fix_of(lists, rules)
        ordinary = tuple(rule for rule in rules if rule in (TransportRule.EAGER, TransportRule.NCCL))
        if TransportRule.NCCL in rules and set(ordinary) != set(rules):
            alone = fix_of(lists, ordinary)
            first_fix = None if alone is None or (fix and alone.changes == fix.changes) else alone
    elif mend and not stuck and not faults and any(step.seconds for row in lists.ranks for step in row):
        stalls = stalls_of(launched)
    return RuleVerdict(launched, tuple(findings), fix, first_fix, stalls, tuple(large_batches(lists)))


def with_remarks(verdict: RuleVerdict, *remarks: str) -> RuleVerdict:
    """The verdict with further remarks."""
    return replace(verdict, remarks=(*verdict.remarks, *remarks))
