"""``counterflow export``: a scheme's schedule as a file that the other commands accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options.flags import SchemeOptions
from ..options.subject import build
from ..output.console import note, writing


def export(
    scheme: Annotated[
        str,
        typer.Argument(metavar="SCHEME", help="See 'counterflow schemes'.", show_default=False),
    ],
    options: SchemeOptions,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The file to write; without it the text goes to stdout.",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Write a schedule file, which check, simulate and show read like a scheme."""
    from counterflow.schedule.formats import dumps  # noqa: PLC0415

    schedule = build(scheme, options.given())
    text = dumps(schedule)
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    with writing(out):
        out.write_text(text, encoding="utf-8")
    note(f"Wrote {out}: {schedule}")
