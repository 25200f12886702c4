"""``counterflow compare``: every scheme with the same workers and the same model, fastest first."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from counterflow.fields import asked
from counterflow.planning.comparison import STAGES_A_WORKER, Compared, Comparison
from counterflow.planning.comparison import compare as compared
from counterflow.simulation.model_share import CostsOf

from ..options.flags import JsonFlag, ModelCostOptions, Record, bytes_of
from ..output.console import WIDE, byte_size, console, note, number, print_json, table_of
from ..output.search_bar import search_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(Record):
    """Sizes that all schemes have in common."""

    panel: ClassVar[str] = "Size, the same for all schemes"

    workers: int = asked(MISSING, "Number of workers.", metavar="P")
    micro_batches: int = asked(MISSING, "Micro-batches of a mini-batch.", metavar="N")
    schemes: list[str] | None = asked(
        None, "Only this scheme; may be repeated.", metavar="NAME", name="scheme"
    )
    stages_a_worker: int = asked(STAGES_A_WORKER, "Maximum stages of one pipe on a worker.", metavar="NUMBER")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits(Record):
    """Limits on what a worker holds."""

    panel: ClassVar[str] = "Limits of each worker"

    peak: float | None = asked(
        None,
        "Maximum activations, in units of one micro-batch of a worker's share; 1F1B stashes P.",
        metavar="NUMBER",
    )
    memory: str | None = asked(
        None, "Maximum bytes of a worker; needs --weight-bytes and the others below.", metavar="BYTES"
    )

    def memory_bytes(self) -> float | None:
        """The limit in bytes, one number for all workers."""
        found = None if self.memory is None else bytes_of("memory", self.memory)
        if isinstance(found, tuple):
            raise typer.BadParameter("one number for all workers", param_hint="--memory")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Record):
    """What is computed in addition, and how it is shown."""

    panel: ClassVar[str] = "Output"

    seconds: float = asked(
        20.0,
        "Time limit, in seconds, for computed orders, which are listed with the schemes; 0: compute none.",
        least=0.0,
    )
    moves: int | None = asked(
        None,
        "Search budget in moves, instead of --seconds: the same orders on every machine.",
        least=0,
    )
    every: bool = asked(False, "List every option of every scheme, not only its best.", name="all")
    out: Path | None = asked(None, "Draw the table into FILE: .png, .svg or .pdf.", metavar="FILE")


def compare(
    *, size: Size, limits: WorkerLimits, costs: ModelCostOptions, output: Listing, as_json: JsonFlag = False
) -> None:
    """Compare all schemes for the same model: step, bubbles, activations and copies of the weights."""
    out = output.out
    if out is not None:
        from counterflow.drawing.saving import require_form

        require_form(out)
    with search_bar("comparing") as report:
        found = compared(
            costs=costs.costs(),
            costs_of=costs.costs_of,
            peak=limits.peak,
            memory_bytes=limits.memory_bytes(),
            seconds=output.seconds,
            moves=output.moves,
            report=report,
            **asdict(size),
        )
    if out is not None:
        _draw(found, out)
    if as_json:
        from counterflow.planning.comparison_report import ComparisonShown

        print_json(ComparisonShown.model_validate(found))
    else:
        _print(found, found.rows if output.every else found.best)
    if out is not None:
        note(f"Wrote {out}")


def _print(found: Comparison, rows: tuple[Compared, ...]) -> None:
    from rich.text import Text

    out = console(WIDE)
    unit = found.costs.time_unit
    out.print(Text(f"{found.workers} workers · {found.micro_batches} micro-batches", style="bold"))
    out.print(Text(_told_costs(found), style="dim"))
    columns = ["scheme", f"step {unit}", "over best", "bubbles", "activations", "weights"]
    sized = found.costs.memory is not None
    table = table_of(*columns, *(["peak memory"] if sized else []), "", left=("scheme", ""))
    least = rows[0].step if rows else 1.0
    for row in rows:
        over = row.step / least - 1
        cells = [row.name, number(row.step), "" if over < 5e-4 else f"{over:.1%}", f"{row.bubble_ratio:.1%}"]
        cells += [number(row.activations), number(row.weights)]
        if row.peak_bytes is not None:
            cells.append(byte_size(row.peak_bytes))
        table.add_row(*cells, row.remark)
    if rows:
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
