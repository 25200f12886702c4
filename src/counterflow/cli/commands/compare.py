"""``counterflow compare``: every scheme with the same workers and the same model, fastest first."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from counterflow.common.cli_fields import cli_field
from counterflow.common.number_texts import byte_size
from counterflow.common.plurals import plural
from counterflow.planning.compared import Compared
from counterflow.planning.comparison_sweep import Sweep, Swept, compare_over, parse_sweep
from counterflow.planning.prediction import distance_text
from counterflow.planning.scheme_comparison import STAGES_A_WORKER, Comparison
from counterflow.planning.scheme_comparison import compare as compared
from counterflow.simulation.model_share import CostsOf

from ..options.flags import JsonFlag, ModelCostOptions, OptionRecord, bytes_of
from ..options.profile_files import ProfileFiles, refuse_costs
from ..output.console import WIDE, console, note, number, print_json, table_of
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

    synchronous: bool = cli_field(
        False, "Only synchronous schemes, whose numbers equal those of one process."
    )
    peak: float | None = cli_field(
        None,
        "Maximum activations, in units of one micro-batch of a worker's share; 1F1B stashes P.",
        metavar="NUMBER",
    )
    copies: float | None = cli_field(
        None,
        "Maximum copies of a worker's share of the weights, versions counted; 1: only one.",
        metavar="NUMBER",
    )
    memory: str | None = cli_field(
        None,
        "Maximum bytes of a worker, weights and activations together; needs --weight-bytes and the others "
        "below, or --profile, with which it is by default the memory of a device.",
        metavar="BYTES",
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
    sweep: str | None = cli_field(
        None,
        "Compare over several values of workers, micro-batches or p2p, as in p2p=0,0.1,0.2.",
        metavar="NAME=VALUES",
    )
    out: Path | None = cli_field(None, "Draw the table into FILE: .png, .svg or .pdf.", metavar="FILE")


def compare(
    *,
    size: ModelSize,
    limits: WorkerLimits,
    costs: ModelCostOptions,
    profiled: ProfileFiles,
    output: ListingOptions,
    as_json: JsonFlag = False,
) -> None:
    """Compare all schemes for the same model: step, bubbles, activations and copies of the weights."""
    out = output.out
    if out is not None:
        from counterflow.drawing.saving import require_form

        require_form(out)
    arguments: dict[str, Any] = {
        **asdict(size),
        **_costs(costs, profiled),
        "synchronous": limits.synchronous,
        "peak": limits.peak,
        "copies": limits.copies,
        "memory_bytes": limits.memory_bytes(),
        "seconds": output.seconds,
        "moves": output.moves,
    }
    if output.sweep is not None:
        _sweep(parse_sweep(output.sweep), arguments, out, as_json=as_json)
        return
    with search_bar("comparing") as report:
        comparison = compared(report=report, **arguments)
    if out is not None:
        _draw(comparison, out)
    if as_json:
        from counterflow.planning.comparison_report import ComparisonShown

        print_json(ComparisonShown.model_validate(comparison))
    else:
        _print(comparison, comparison.rows if output.all_options else comparison.listed)
    if out is not None:
        note(f"Wrote {out}")


def _costs(costs: ModelCostOptions, profiled: ProfileFiles) -> dict[str, Any]:
    if not profiled.has_values:
        return {"costs": costs.costs(), "costs_of": costs.costs_of}
    refuse_costs(costs.set_values())
    return profiled.read()._asdict()


def _sweep(sweep: Sweep, arguments: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    with search_bar("comparing") as report:
        swept = compare_over(sweep, report=report, **arguments)
    if out is not None:
        from counterflow.drawing.sweep import draw_sweep

        draw_sweep(
            {
                name: [None if row is None else row.bubble_ratio for row in rows]
                for name, rows in swept.by_scheme.items()
            },
            sweep.values,
            out,
            title=f"bubbles by {sweep.title}",
            label=sweep.title,
        )
    if as_json:
        from counterflow.planning.comparison_report import SweepShown

        print_json(SweepShown.model_validate(swept))
    else:
        _print_sweep(swept)
    if out is not None:
        note(f"Wrote {out}")


def _print_sweep(swept: Swept) -> None:
    from rich.text import Text

    out = console(WIDE)
    out.print(Text(f"Bubbles of the fastest schedule of each scheme, by {swept.sweep.title}", style="bold"))
    table = table_of("scheme", *map(number, swept.sweep.values), text_columns=("scheme",), pad_edge=False)
    for name, rows in swept.by_scheme.items():
        table.add_row(name, *("–" if row is None else f"{row.bubble_ratio:.1%}" for row in rows))
    out.print(table)
    out.print(Text("–: no schedule of this size within the limits", style="dim"))


_NARROW = 96
"""Columns below which the table omits the distance from the best if it has bytes."""


def _print(comparison: Comparison, rows: tuple[Compared, ...]) -> None:
    from rich.text import Text

    out = console(WIDE)
    unit = "ms" if comparison.profiled else comparison.costs.time_unit
    scale = 1e3 if comparison.profiled else 1.0
    size = f"{plural(comparison.workers, 'worker')} · {plural(comparison.micro_batches, 'micro-batch')}"
    out.print(Text(size, style="bold"))
    out.print(Text(_cost_text(comparison), style="dim"))
    sized = any(row.peak_bytes is not None for row in rows)
    over = not sized or out.width >= _NARROW
    columns = ["scheme", f"step {unit}", *["over"] * over, "bubbles", "activations", "weights"]
    table = table_of(*columns, *["memory"] * sized, text_columns=("scheme",), pad_edge=False)
    least = rows[0].step if rows else 1.0
    for row in rows:
        distance = row.step / least - 1
        table.add_row(
            ", ".join(filter(None, [row.name, row.mark])),
            f"{scale * row.step:.5g}{distance_text(row.step, row.step_range, scale)}",
            *["" if distance < 5e-4 else f"{distance:.1%}"] * over,
            f"{row.bubble_ratio:.1%}",
            f"{row.activations:.5g}",
            f"{row.weights:.4g}",
            *[byte_size(row.peak_bytes or 0.0)] * sized,
        )
    if rows:
        out.print(table)
    for line in _below(comparison, rows):
        out.print(Text(line, style="dim"))


_MARKS = {
    "async": "async: asynchronous, computes with older weights",
    "proved": "proved: no order of these stages within these limits is better",
    "≤": "≤: at most so far from the best order of these stages within these limits",
}
"""Meaning of the marks of rows."""


def _cost_text(comparison: Comparison) -> str:
    if comparison.profiled:
        return comparison.profiled
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
        lines += [f"  {row.name}: {_needs(row)}" for row in comparison.too_large[:3]]
    elif comparison.too_large:
        known = {row.scheme for row in rows}
        names = dict.fromkeys(row.scheme for row in comparison.too_large if row.scheme not in known)
        more = f", among them all of {', '.join(names)}" if names else ""
        counted = len(comparison.too_large)
        lines.append(f"{counted} schedule{'s need' if counted > 1 else ' needs'} more than the limits{more}.")
    if rows:
        lines += [
            "activations: the most that a worker holds, in those of its share for a micro-batch",
            "weights: copies of a worker's share of the model, versions included",
        ]
        lines += [text for mark, text in _MARKS.items() if any(row.mark.startswith(mark) for row in rows)]
    baseline = comparison.baseline
    if baseline is not None and not any(row.name == baseline.name for row in rows):
        lines.append(f"The baseline, {baseline.name}, is beyond the limits: {_needs(baseline)}")
    absent: dict[str, list[str]] = {}
    for name, reason in comparison.left_out:
        absent.setdefault(reason, []).append(name)
    lines += [
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no schedule of this size: {reason}"
        for reason, names in absent.items()
    ]
    return lines


def _needs(row: Compared) -> str:
    needs = f"{number(row.activations)} activations, weights {number(row.weights)} times"
    return needs if row.peak_bytes is None else f"{needs}, {byte_size(row.peak_bytes)}"


def _draw(comparison: Comparison, path: Path) -> None:
    from counterflow.drawing.ranking import Ranked, draw_ranking

    unit = comparison.costs.time_unit
    rows = [
        Ranked(row.name, row.step, row.bubble_ratio, row.activations, row.weights, row.synchronous)
        for row in comparison.listed
    ]
    title = f"{plural(comparison.workers, 'worker')}, {plural(comparison.micro_batches, 'micro-batch')}"
    draw_ranking(rows, path, title=title, about=_cost_text(comparison), unit=unit)
