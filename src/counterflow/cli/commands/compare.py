"""``counterflow compare``: every scheme on so many workers, for the same model, the quickest first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from counterflow.planning.comparison import STAGES_A_WORKER, Compared, Comparison
from counterflow.planning.comparison import compare as compared
from counterflow.simulation.model_share import CostsOf

from ..options.flags import JsonFlag, ModelCostOptions, bytes_of
from ..output.console import WIDE, byte_size, console, note, number, print_json
from ..output.search_bar import search_bar

_SIZE = "Size: the same for all schemes"
_LIMITS = "Limits of each worker"
_OUTPUT = "Output"


def compare(
    costs: ModelCostOptions,
    *,
    workers: Annotated[
        int, typer.Option(metavar="P", help="Workers.", rich_help_panel=_SIZE, show_default=False)
    ],
    micro_batches: Annotated[
        int,
        typer.Option(
            metavar="N", help="Micro-batches of a mini-batch.", rich_help_panel=_SIZE, show_default=False
        ),
    ],
    scheme: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this scheme; may be repeated.", rich_help_panel=_SIZE),
    ] = None,
    stages_a_worker: Annotated[
        int,
        typer.Option(metavar="NUMBER", help="Most stages of one pipe on a worker.", rich_help_panel=_SIZE),
    ] = STAGES_A_WORKER,
    costs_of: Annotated[
        str,
        typer.Option(
            metavar="worker|model",
            help="What costs are given for: a worker's share of the model, or the whole model.",
            rich_help_panel=_SIZE,
        ),
    ] = CostsOf.WORKER.value,
    peak: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Maximum activations, in those of a worker's share for one micro-batch; 1F1B holds P.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Maximum bytes; needs --weight-bytes and others.", rich_help_panel=_LIMITS
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Time limit for computing orders of our own, which are listed beside the schemes; 0: none.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 20.0,
    moves: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Search budget in moves in place of --seconds: the same orders on every machine.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Every option of every scheme, not the best.", rich_help_panel=_OUTPUT),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.", rich_help_panel=_OUTPUT),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare all schemes for the same model: step, bubbles, activations and copies of the weights."""
    if out is not None:
        from counterflow.drawing.bars import require_form

        require_form(out)
    with search_bar("comparing") as report:
        found = compared(
            workers,
            micro_batches,
            costs.costs(),
            costs_of=costs_of,
            schemes=scheme,
            peak=peak,
            memory_bytes=None if memory is None else _bytes(memory),
            stages_a_worker=stages_a_worker,
            seconds=seconds,
            moves=moves,
            report=report,
        )
    if out is not None:
        _draw(found, out)
    if as_json:
        from counterflow.planning.comparison_report import ComparisonShown

        print_json(ComparisonShown.model_validate(found))
    else:
        _print(found, found.rows if every else found.best)
    if out is not None:
        note(f"Wrote {out}")


def _bytes(text: str) -> float:
    found = bytes_of("memory", text)
    if isinstance(found, tuple):
        raise typer.BadParameter("one number for all workers", param_hint="--memory")
    return found


def _print(found: Comparison, rows: tuple[Compared, ...]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console(WIDE)
    unit = found.costs.time_unit
    out.print(Text(f"{found.workers} workers · {found.micro_batches} micro-batches", style="bold"))
    out.print(Text(_told_costs(found), style="dim"))
    columns = ["scheme", f"step {unit}", "over best", "bubbles", "activations", "weights"]
    sized = found.costs.memory is not None
    table = Table(*columns, *(["peak memory"] if sized else []), "", box=box.SIMPLE_HEAD)
    for column in table.columns[1 : len(columns) + sized]:
        column.justify = "right"
    least = rows[0].step if rows else 1.0
    for row in rows:
        over = row.step / least - 1
        cells = [row.name, number(row.step), "" if over < 5e-4 else f"{over:.1%}", f"{row.bubble_ratio:.1%}"]
        cells += [number(row.activations), number(row.weights)]
        if row.peak_bytes is not None:
            cells.append(byte_size(row.peak_bytes))
        table.add_row(*cells, row.remark)
    out.print(table)
    for line in _below(found, rows):
        out.print(Text(line, style="dim"))


def _told_costs(found: Comparison) -> str:
    costs, unit = found.costs, found.costs.time_unit
    whose = "a worker's share of the model" if found.costs_of is CostsOf.WORKER else "the whole model"
    shown = [
        f"forward {number(_one(costs.forward))} {unit}",
        f"backward {number(_one(costs.backward))} {unit}",
    ]
    if isinstance(costs.p2p, (int, float)):
        shown.append(f"message {number(costs.p2p)} {unit}")
    return f"{' · '.join(shown)} · of {whose}"


def _one(value: Any) -> float:
    return float(value)


def _below(found: Comparison, rows: tuple[Compared, ...]) -> list[str]:
    lines = []
    if not rows:
        lines.append("No schedule keeps the limits; the smallest ones need:")
        lines += [
            f"  {row.name}: {number(row.activations)} activations"
            + (f", {byte_size(row.peak_bytes)}" if row.peak_bytes is not None else "")
            for row in found.too_large[:3]
        ]
    elif found.too_large:
        known = {row.scheme for row in rows}
        names = dict.fromkeys(row.scheme for row in found.too_large if row.scheme not in known)
        more = f", among them all of {', '.join(names)}" if names else ""
        counted = len(found.too_large)
        lines.append(f"{counted} schedule{'s need' if counted > 1 else ' needs'} more than the limits{more}.")
    if rows:
        lines.append(
            "activations: the most that a worker holds, in those of its share of the model for a micro-batch"
        )
        lines.append("weights: copies of a worker's share of the model, versions included")
    lines += [f"{name} has no schedule of this size: {reason}" for name, reason in found.left_out]
    return lines


def _draw(found: Comparison, path: Path) -> None:
    from counterflow.drawing.ranking import Ranked, draw_ranking

    unit = found.costs.time_unit
    rows = [
        Ranked(row.name, row.step, row.bubble_ratio, row.activations, row.weights, row.synchronous)
        for row in found.best
    ]
    title = f"{found.workers} workers, {found.micro_batches} micro-batches"
    draw_ranking(rows, path, title=title, about=_told_costs(found), unit=unit)
