"""``counterflow lint``: do the sends and receives of any system end, and which change ends a hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterflow.common.plurals import plural
from counterflow.lint.calls import CommunicatorScope

from ..options.flags import JsonFlag
from ..output.console import WIDE, bullet, console, note, number, print_json, sign_of, writing

if TYPE_CHECKING:
    from rich.text import Text

    from counterflow.lint.mending import Fix
    from counterflow.lint.stalls import Stalls
    from counterflow.lint.verdicts import RuleVerdict
    from counterflow.lint.waiting import WaitPlay


class RuleName(StrEnum):
    """A rule of a transport, as an option has it."""

    EAGER = "eager"
    RENDEZVOUS = "rendezvous"
    NCCL = "nccl"
    ONE_QUEUE = "one-queue"
    BLOCKING = "blocking"
    FIRST_USE = "first-use"


def lint(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="torch's schedule with communication (CSV, or the rows that it prints), recorded calls "
            "(JSON; see docs/lint.md), a schedule file (see 'counterflow export'), or the dumps of torch's "
            "flight recorder, one a rank, or their folder.",
            show_default=False,
        ),
    ],
    *,
    communicators: Annotated[
        CommunicatorScope | None,
        typer.Option(
            help="Communicators of a schedule: one of the group, as torch has for a group bound to a device; "
            "one a pair of ranks, as otherwise; or one an edge, sender to receiver. Default: group for "
            "torch's schedules, edge for those of Counterflow.",
            show_default=False,
            metavar="group|pair|edge",
        ),
    ] = None,
    rule: Annotated[
        list[RuleName] | None,
        typer.Option(
            help="Rule of a transport: eager, rendezvous, nccl, one-queue, blocking, first-use; may be "
            "repeated. Default: all that apply.",
            show_default=False,
            metavar="RULE",
        ),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of dumps: the schedule that ran, for the op and stage of each rank; torch's, or one of "
            "Counterflow.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the circle into a file: .png .svg .pdf.",
            show_default=False,
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether the sends and receives of any system end, and name the smallest change that ends a hang.

    Exit 1 with the circle in which the ranks wait if a rule is broken.
    """
    from counterflow.lint.reading import read_subject
    from counterflow.lint.verdicts import lint as verdict_of
    from counterflow.lint.verdicts import with_remarks
    from counterflow.lint.waiting import TransportRule

    if out is not None:
        from counterflow.drawing.saving import require_form

        require_form(out)
    subject = read_subject(files, communicators, schedule)
    rules = None if not rule else [TransportRule[name.name] for name in RuleName if name in rule]
    if subject.places and rules is None:
        rules = [TransportRule.NCCL]
    verdict = replace(verdict_of(subject.lists, rules, further=subject.findings), places=subject.places)
    if subject.remark:
        verdict = with_remarks(verdict, subject.remark)
    if as_json:
        from counterflow.lint.lint_report import linted

        print_json(linted(verdict))
    else:
        _print(" ".join(map(str, files)), verdict)
    if out is not None:
        _draw(verdict, out)
    if not verdict.ok:
        raise typer.Exit(1)


def _draw(verdict: RuleVerdict, out: Path) -> None:
    from counterflow.lint.picture import draw_circle

    stuck = [finding.play for finding in verdict.findings if finding.play and not finding.play.ok]
    if not stuck:
        note(f"{out}: not written, because the lists end")
        return
    with writing(out):
        draw_circle(verdict.lists, _worst(stuck), out)
    note(f"Wrote {out}")


def _worst(stuck: list[WaitPlay]) -> WaitPlay:
    from counterflow.lint.waiting import TransportRule

    return next((play for play in stuck if play.rule is TransportRule.NCCL), stuck[0])


def _print(name: str, verdict: RuleVerdict) -> None:
    from rich.text import Text

    from counterflow.lint.circle_words import circle_lines, waits_shown

    out = console(WIDE)
    lists = verdict.lists
    size = f"{plural(len(lists.ranks), 'rank')}, {plural(lists.calls, 'call')}"
    out.print(Text(f"{name}: {lists.form}, {size}", style="bold"))
    shown: dict[tuple[str, ...], str] = {}
    for finding in verdict.findings:
        lines = list(finding.faults)
        if finding.play is not None and not finding.ok:
            lines = circle_lines(waits_shown(lists, finding.play), closed=finding.play.closed)
        same = shown.setdefault(tuple(lines), finding.rule) if lines else finding.rule
        title = Text.assemble(sign_of(out, finding.ok), f" {finding.rule}")
        out.print(title if same == finding.rule else title.append(f": as with {same}"))
        if same == finding.rule:
            for line in lines:
                out.print(Text(f"    {line}"))
    if verdict.places:
        out.print(Text("\n    ".join(["Where each rank is:", *map(str, verdict.places)])))
    for text in (*(f"{bullet(out)} {remark}" for remark in verdict.remarks), *_stalls(verdict.stalls)):
        out.print(Text(text, style="yellow"))
    for fix, about in ((verdict.first_fix, "for NCCL's order alone"), (verdict.fix, "for all rules")):
        if fix is not None:
            _print_fix(out.print, fix, about if verdict.first_fix is not None else "")
    broken = sum(not finding.ok for finding in verdict.findings)
    total = len(verdict.findings)
    if not broken:
        out.print(Text(f"Right: all {total} rules hold.", style="green"))
        return
    out.print(Text(f"Wrong: {broken} of {total} rules broken.", style="bold red"))


def _print_fix(print_text: Callable[[Text], None], fix: Fix, about: str) -> None:
    from rich.text import Text

    title = (
        f"Smallest change {about}".rstrip() if len(fix.changes) == 1 else f"Fewest changes {about}".rstrip()
    )
    under = f"the changed lists end under {plural(len(fix.rules), 'rule')}"
    if len(fix.changes) == 1:
        print_text(Text(f"{title}: {fix.changes[0]} ({under})", style="cyan"))
        return
    print_text(Text(f"{title} ({under}):", style="cyan"))
    for change in fix.changes:
        print_text(Text(f"    {change}", style="cyan"))


def _stalls(stalls: Stalls | None) -> list[str]:
    if stalls is None:
        return []
    first = (
        f"No hang, but calls wait behind others: {number(stalls.makespan)} forwards' time instead of "
        f"{number(stalls.eager)}"
    )
    if stalls.by_edge and stalls.by_edge < stalls.makespan:
        first += f"; {number(stalls.by_edge)} with a communicator for each sender and receiver"
    lines = [
        f"    rank {stall.rank}: {stall.call} waits {number(stall.seconds)} behind {stall.behind}"
        for stall in stalls.longest
    ]
    return [f"{first}:", *lines]
