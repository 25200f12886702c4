"""``counterflow compare``: every scheme with the same workers and the same model, fastest first."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from counterflow.common.cli_fields import cli_field
from counterflow.common.plurals import plural
from counterflow.planning.scheme_comparison import STAGES_A_WORKER, Compared, Comparison
from counterflow.planning.scheme_comparison import compare as compared
from counterflow.simulation.model_share import CostsOf

from ..options.flags import JsonFlag, ModelCostOptions, OptionRecord, bytes_of
from ..output.console import WIDE, byte_size, console, note, number, print_json, table_of
from ..output.search_bar import search_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize(OptionRecord):
    """Sizes that all schemes have in common."""

    panel: ClassVar[str] = "Size, the same for all schemes"

    workers: int = cli_field(MISSING, "Number of workers.", metavar="P")
    micro_batches: int = cli_field(MISSING, "Micro-batches of a mini-batch.", metavar="N")
    schemes: list[str] | None = cli_field(
        None, "Only this scheme; may be repeated.", metavar="NAME", name="scheme"
    )
    stages_a_worker: int = cli_field(
        STAGES_A_WORKER, "Maximum stages of one pipe on a worker.", metavar="NUMBER"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits(OptionRecord):
    """Limits on what a worker holds."""

    panel: ClassVar[str] = "Limits of each worker"

    peak: float | None = cli_field(
        None,
        "Maximum activations, in units of one micro-batch of a worker's share; 1F1B stashes P.",
        metavar="NUMBER",
    )
    memory: str | None = cli_field(
        None, "Maximum bytes of a worker; needs --weight-bytes and the others below.", metavar="BYTES"
    )

    def memory_bytes(self) -> float | None:
        """The limit in bytes, one number for all workers."""
        limit = None if self.memory is None else bytes_of("memory", self.memory)
        if isinstance(limit, tuple):
            raise typer.BadParameter("one number for all workers", param_hint="--memory")
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingOptions(OptionRecord):
    """Additional computations and the form of the output."""

    panel: ClassVar[str] = "Output"

    seconds: float = cli_field(
        20.0,
        "Time limit, in seconds, for computed orders, which are listed with the schemes; 0: compute none.",
        least=0.0,
    )
    moves: int | None = cli_field(
        None,
        "Search budget in moves, instead of --seconds: the same orders on every machine.",
        least=0,
    )
    all_options: bool = cli_field(False, "List every option of every scheme, not only its best.", name="all")
    out: Path | None = cli_field(None, "Draw the table into FILE: .png, .svg or .pdf.", metavar="FILE")


def compare(
    *,
    size: ModelSize,
    limits: WorkerLimits,
    costs: ModelCostOptions,
    output: ListingOptions,
    as_json: JsonFlag = False,
) -> None:
    """Compare all schemes for the same model: step, bubbles, activations and copies of the weights."""
    out = output.out
    if out is not None:
        from counterflow.drawing.saving import require_form

        require_form(out)
    with search_bar("comparing") as report:
        comparison = compared(
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
        _draw(comparison, out)
    if as_json:
        from counterflow.planning.comparison_report import ComparisonShown

        print_json(ComparisonShown.model_validate(comparison))
    else:
        _print(comparison, comparison.rows if output.all_options else comparison.best)
    if out is not None:
        note(f"Wrote {out}")


def _print(comparison: Comparison, rows: tuple[Compared, ...]) -> None:
    from rich.text import Text

    out = console(WIDE)
    unit = comparison.costs.time_unit
    out.print(
        Text(
            f"{plural(comparison.workers, 'worker')} · {plural(comparison.micro_batches, 'micro-batch')}",
            style="bold",
        )
    )
    out.print(Text(_told_costs(comparison), style="dim"))
    columns = ["scheme", f"step {unit}", "over best", "bubbles", "activations", "weights"]
    sized = comparison.costs.memory is not None
    table = table_of(*columns, *(["peak memory"] if sized else []), "", text_columns=("scheme", ""))
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
    for line in _below(comparison, rows):
        out.print(Text(line, style="dim"))


def _told_costs(comparison: Comparison) -> str:
    costs, unit = comparison.costs, comparison.costs.time_unit
    whose = "a worker's share of the model" if comparison.costs_of is CostsOf.WORKER else "the whole model"
    shown = [
        f"forward {number(_number_of(costs.forward))} {unit}",
        f"backward {number(_number_of(costs.backward))} {unit}",
    ]
    if isinstance(costs.p2p, (int, float)):
        shown.append(f"message {number(costs.p2p)} {unit}")
    return f"{' · '.join(shown)} · of {whose}"


def _number_of(value: Any) -> float:
    return float(value)


def _below(comparison: Comparison, rows: tuple[Compared, ...]) -> list[str]:
    lines = []
    if not rows:
        lines.append("No schedule keeps the limits; the smallest ones need:")
        lines += [
            f"  {row.name}: {number(row.activations)} activations"
            + (f", {byte_size(row.peak_bytes)}" if row.peak_bytes is not None else "")
            for row in comparison.too_large[:3]
        ]
    elif comparison.too_large:
        known = {row.scheme for row in rows}
        names = dict.fromkeys(row.scheme for row in comparison.too_large if row.scheme not in known)
        more = f", among them all of {', '.join(names)}" if names else ""
        counted = len(comparison.too_large)
        lines.append(f"{counted} schedule{'s need' if counted > 1 else ' needs'} more than the limits{more}.")
    if rows:
        lines.append(
            "activations: the most that a worker holds, in those of its share of the model for a micro-batch"
        )
        lines.append("weights: copies of a worker's share of the model, versions included")
    lines += [f"{name} has no schedule of this size: {reason}" for name, reason in comparison.left_out]
    return lines


def _draw(comparison: Comparison, path: Path) -> None:
    from counterflow.drawing.ranking import Ranked, draw_ranking

    unit = comparison.costs.time_unit
    rows = [
        Ranked(row.name, row.step, row.bubble_ratio, row.activations, row.weights, row.synchronous)
        for row in comparison.best
    ]
    title = f"{plural(comparison.workers, 'worker')}, {plural(comparison.micro_batches, 'micro-batch')}"
    draw_ranking(rows, path, title=title, about=_told_costs(comparison), unit=unit)
