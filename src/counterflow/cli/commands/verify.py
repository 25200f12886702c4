"""``counterflow verify``: one process against the pipeline, on this machine."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterflow.errors import ConfigError
from counterflow.program.check import checked_program
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.program.segments import segments
from counterflow.runtime.transport.kinds import kind_of, kinds
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.testing import STRICT_LOCAL

from ..options.flags import JsonFlag, SchemeOptions, SubjectArgument
from ..options.subject import schedule_of
from ..output.console import WIDE, console, note, print_json

if TYPE_CHECKING:
    from counterflow.verify.agreement import Agreement


class Dtype(Enum):
    """Precisions in which numbers have to agree."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Bfloat16(Enum):
    """How layers compute in bfloat16."""

    AUTOCAST = "autocast"
    COMPUTE_DTYPE = "compute-dtype"


Where = StrEnum("Where", {kind.name: kind.name for kind in kinds()})  # type: ignore[misc]
"""What carries the workers' messages."""


_PANEL = "How it is run"


def verify(
    subject: SubjectArgument,
    options: SchemeOptions,
    *,
    replicas: Annotated[int, typer.Option(help="W: pipeline groups.", min=1, rich_help_panel=_PANEL)] = 1,
    recompute: Annotated[
        Recompute, typer.Option(help="What backwards compute again.", rich_help_panel=_PANEL)
    ] = Recompute.NONE,
    sync_mode: Annotated[
        Sync, typer.Option(help="When gradients of copies are summed.", rich_help_panel=_PANEL)
    ] = Sync.EAGER_OPT,
    barrier: Annotated[
        bool,
        typer.Option(
            "--barrier/--no-barrier",
            help="Whether each step ends on all workers before the next; without, gradients are not clipped.",
            rich_help_panel=_PANEL,
        ),
    ] = True,
    transport: Annotated[
        Where,
        typer.Option(
            help="; ".join(f"{kind}: {kind.about}" for kind in kinds()) + ".",
            rich_help_panel=_PANEL,
        ),
    ] = Where(STRICT_LOCAL.name),
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Precision of weights. Default float64; with --bfloat16 float32.", rich_help_panel=_PANEL
        ),
    ] = None,
    bfloat16: Annotated[
        Bfloat16 | None,
        typer.Option(
            help="Let layers compute in bfloat16, by either option of a Pipeline; one process does likewise.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Updates to compare. Default 3; without a flush 3 more than the warm-up, and a flush before "
            "the last 2.",
            min=1,
            max=1000,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data and dropout.", rich_help_panel=_PANEL)] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Train a small model with one process and with the pipeline, and compare the numbers."""
    schedule = schedule_of(subject, options)
    if bfloat16 is not None and dtype is Dtype.FLOAT64:
        raise ConfigError("--bfloat16 is for weights in float32; leave out --dtype float64")
    dtype = dtype or (Dtype.FLOAT64 if bfloat16 is None else Dtype.FLOAT32)
    refuse_what_cannot_run(schedule)
    if schedule.synchronous:
        checked_program(schedule, replicas=replicas, sync=sync_mode)
        steps = steps or 3
    else:
        steps = steps or segments(schedule, replicas=replicas).last + 5
    workers = schedule.workers * replicas
    if not as_json:
        kind = "threads" if kind_of(transport.value).threads else "processes"
        note(f"Training with one process, then with {workers} workers ({kind}), {steps} updates each …")
    found = _compared(
        schedule,
        transport,
        replicas=replicas,
        steps=steps,
        seed=seed,
        dtype=dtype,
        recompute=recompute,
        sync=sync_mode,
        bfloat16=bfloat16,
        **({} if barrier else {"barrier": False, "clip_norm": None}),
    )
    if as_json:
        from counterflow.verify.report import Verified

        print_json(Verified.of(schedule=schedule, workers=workers, ok=found.ok, **asdict(found)))
    else:
        _print(schedule, workers, found, dtype.value if bfloat16 is None else f"bfloat16 by {bfloat16.value}")
    if not found.ok:
        raise typer.Exit(1)


def _compared(
    schedule: Schedule,
    transport: Where,
    *,
    replicas: int,
    steps: int,
    seed: int,
    dtype: Dtype,
    bfloat16: Bfloat16 | None,
    **options: Any,
) -> Agreement:
    from counterflow.train.trial import small_trial

    tied: bool | None = None
    if bfloat16 is not None:
        options[bfloat16.value.replace("-", "_")] = "bfloat16"
        if schedule.stages == 1:
            tied = False  # one cast of a weight would have the gradients of both its uses, rounded
    trial = small_trial(schedule, replicas=replicas, steps=steps, seed=seed, dtype=dtype.value, tied=tied)
    return trial.verify(
        transport=transport.value,
        flush_after=() if schedule.synchronous else (steps - 3,),
        seed=seed,
        **options,
    )


def _print(schedule: Schedule, workers: int, found: Agreement, precision: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console(WIDE)
    out.print(Text(f"{schedule}: {workers:,} workers against one process, {precision}", style="bold"))
    table = Table("", "largest relative error", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    rows = {
        "loss": found.loss_error,
        "gradient norm": found.norm_error,
        "gradients": found.gradient_error,
        "weights": found.weight_error,
    }
    for name, error in rows.items():
        style = "" if error <= found.tolerance else "bold red"
        table.add_row(name, Text(f"{error:.1e}", style=style))
    out.print(table)
    if found.ok:
        out.print(Text(f"They agree: all errors are within {found.tolerance:g}.", style="green"))
    else:
        out.print(Text(f"They differ: errors must be within {found.tolerance:g}.", style="bold red"))
