"""``counterflow check``: the checker's verdict on a schedule, rule by rule."""

from __future__ import annotations

from typing import Annotated

import typer

from counterflow.common.plurals import plural
from counterflow.program.checker import Report, inspect

from ..options.flags import JsonFlag, SchemeOptions, SubjectArgument
from ..options.subject_argument import schedule_of
from ..output.console import WIDE, bullet, console, heading, print_json, sign_of


def check(
    subject: SubjectArgument,
    options: SchemeOptions,
    *,
    peak_limit: Annotated[
        float | None,
        typer.Option(
            help="Maximum activations that a worker stashes, in stages × micro-batches. Default: no limit.",
            show_default=False,
            min=0,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether a schedule is right, rule by rule; exit 1 with the reason if it is not."""
    schedule = schedule_of(subject, options)
    report = inspect(schedule, peak_limit=peak_limit)
    if as_json:
        from counterflow.program.program_report import checked

        print_json(checked(schedule, report))
    else:
        ops = sum(map(len, schedule.orders))
        _print(f"{heading(schedule)}: {plural(schedule.workers, 'worker')}, {plural(ops, 'op')}", report)
    if not report.ok:
        raise typer.Exit(1)


def _print(title: str, report: Report) -> None:
    from rich.text import Text

    out = console(WIDE)
    out.print(Text(title, style="bold"))
    for result in report.results:
        if result.ok is None:
            continue
        out.print(Text.assemble(sign_of(out, result.ok), f" {result.rule}"))
        if result.detail:
            for line in result.detail.splitlines():
                out.print(Text(f"    {line}", style="" if not result.ok else "dim"))
    unknown = sum(result.ok is None for result in report.results)
    if unknown:
        rules = f"{unknown} rule{'s' if unknown > 1 else ''}"
        remark = f"{bullet(out)} {rules} skipped, because a rule above fails; --json lists them"
        out.print(Text(remark, style="yellow"))
    broken = sum(result.ok is False for result in report.results)
    total = len(report.results)
    if report.ok:
        out.print(Text(f"Right: all {total} rules hold.", style="green"))
        return
    more = f", {unknown} skipped" if unknown else ""
    out.print(Text(f"Wrong: {broken} of {total} rules broken{more}.", style="bold red"))
