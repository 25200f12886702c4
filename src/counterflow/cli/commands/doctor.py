"""``counterflow doctor``: what this machine has, and whether a pipeline runs and is right on it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterflow import __version__, schemes
from counterflow.errors import CounterflowError
from counterflow.runtime.transport.kinds import kinds

from ..options.flags import JsonFlag
from ..output.console import WIDE, console, note, print_json, sign_of

if TYPE_CHECKING:
    from counterflow.measure.health import Finding

_TIMEOUT_SECONDS = 60.0
"""Seconds that a worker of the test waits for another."""


def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Folder for results of runs. Default: the working folder."),
    ] = None,
    *,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Train a tiny model on two workers.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Report what this machine has, and train a tiny model on two workers; exit 1 if something is wrong."""
    from counterflow.measure.health import Doctor, findings

    results = findings(folder)
    if test:
        if not as_json:
            note("Training a tiny model on two workers …")
        results += _tests()
    ok = not any(finding.ok is False for finding in results)
    if as_json:
        print_json(Doctor(version=__version__, ok=ok, findings=results))
    else:
        _print(results, ok=ok)
    if not ok:
        raise typer.Exit(1)


def _tests() -> Iterable[Finding]:
    from counterflow.measure.health import Finding, gpus
    from counterflow.training.trial import small_trial

    trial = small_trial(schemes.chimera(stages=2, micro_batches=2), steps=1)
    for kind in kinds(trains=True):
        if kind.gpu_each and gpus() < 2:
            continue
        began = time.perf_counter()
        try:
            agreement = trial.verify(
                transport=kind.name,
                timeout_seconds=_TIMEOUT_SECONDS,
                device="cuda" if kind.gpu_each else "cpu",
            )
        except CounterflowError as error:
            yield Finding(
                f"training over {kind}", str(error), ok=False, advice="see docs/several-machines.md"
            )
            continue
        largest = max(agreement.loss_error, agreement.gradient_error, agreement.weight_error)
        seconds = time.perf_counter() - began
        figures = f"{seconds:.1f} s, largest error {largest:.1e}"
        advice = "" if agreement.ok else "the numbers are wrong: do not train here, and report it"
        yield Finding(f"training over {kind}", figures, ok=agreement.ok, advice=advice)


def _print(results: list[Finding], *, ok: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console(WIDE)
    out.print(Text(f"counterflow {__version__}", style="bold"))
    grid = Table.grid(padding=(0, 2))
    for finding in results:
        sign, style = sign_of(out, finding.ok)
        text = Text(finding.found)
        if finding.advice:
            text.append(f"; {finding.advice}", style)
        grid.add_row(Text(sign, style), finding.about, text)
    out.print(grid)
    wrong = sum(finding.ok is False for finding in results)
    if ok:
        out.print(Text("Nothing is wrong here.", style="green"))
    else:
        out.print(Text(f"{wrong} {'things are' if wrong > 1 else 'thing is'} wrong here.", style="bold red"))
