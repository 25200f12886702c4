"""``counterflow export``: a schedule as a file that the other commands accept, or that torch reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options.flags import SchemeOptions, SubjectArgument
from ..options.subject_argument import FileFormat, as_text, schedule_of
from ..output.console import note, writing


def export(
    subject: SubjectArgument,
    options: SchemeOptions,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write; a FILE.csv is written in torch's CSV. Default: stdout.",
            rich_help_panel="Output",
        ),
    ] = None,
    form: Annotated[
        FileFormat | None,
        typer.Option(
            "--format",
            help="json, or csv as torch.distributed.pipelining reads it. Default: FILE's suffix, or json.",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Write a schedule file, which check, simulate and show accept in place of a scheme."""
    schedule = schedule_of(subject, options)
    text = as_text(
        schedule, form or (FileFormat.CSV if out is not None and out.suffix == ".csv" else FileFormat.JSON)
    )
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    with writing(out):
        out.write_text(text, encoding="utf-8")
    note(f"Wrote {out}: {schedule}")
