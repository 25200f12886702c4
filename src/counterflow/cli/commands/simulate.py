"""``counterflow simulate``: predict the time, bubbles and memory of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterflow.common.number_texts import byte_size
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, Simulation
from counterflow.simulation import simulate as play
from counterflow.simulation.cost_texts import COSTS
from counterflow.simulation.model_share import CostsOf
from counterflow.simulation.order_options import shorter

from ..options.flags import CostOptions, JsonFlag, SchemeOptions, SubjectArgument
from ..options.subject_argument import is_file, periods_for_steady, schedule_of, warn_if_wrong
from ..options.wording import flag_of
from ..output.console import (
    WIDE,
    bubble_causes,
    console,
    heading,
    merge_equal_rows,
    note,
    number,
    numbers,
    print_json,
    table_of,
)

if TYPE_CHECKING:
    from counterflow.papers.formulas import FormulaValue

GROUP_FROM = 17
"""Number of workers from which neighbours with the same figures share a row."""


def simulate(
    subject: SubjectArgument,
    options: SchemeOptions,
    costs: CostOptions,
    *,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="Also print the times of every op.", rich_help_panel="Output"),
    ] = False,
    messages: Annotated[
        bool,
        typer.Option("--messages", help="Also print the times of every message.", rich_help_panel="Output"),
    ] = False,
    formulas: Annotated[
        bool,
        typer.Option(
            "--formulas",
            help="Also print the papers' formulas for it, beside the simulated values.",
            rich_help_panel="Output",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict the time, bubbles and memory of a schedule."""
    schedule = schedule_of(subject, options)
    warn_if_wrong(subject, schedule)
    result = play(schedule, costs.of_stages(schedule.placement))
    for text in costs.without_effect(schedule):
        note(f"Note: {text}")
    if not is_file(subject) and (shorter_result := shorter(result)) is not None:
        spans = f"{number(shorter_result.makespan)} instead of {number(result.makespan)}"
        note(f"Note: {_changed(schedule, shorter_result.schedule)} takes {spans} in the same memory.")
    published = _formulas(result) if formulas else None
    if as_json:
        from counterflow.simulation.report import simulated

        shown = _shown_costs(result, costs)
        print_json(simulated(result, shown, timeline=timeline, messages=messages, formulas=published))
        return
    tables = [_workers(result), _summary(result, played_from_file=is_file(subject))]
    if published:
        tables.append(_published(result, published))
    if timeline:
        tables.append(_ops(result))
    if messages:
        tables.append(_messages(result))
    _print(result, costs, tables)


def _changed(schedule: Schedule, target: Schedule) -> str:
    old, new = dict(schedule.options), dict(target.options)
    turned_off = [flag_of(name, False) for name in old if name not in new]
    return " ".join([*(flag_of(name, v) for name, v in new.items() if old.get(name) != v), *turned_off])


def _print(result: Simulation, costs: CostOptions, tables: list[Any]) -> None:
    from rich.text import Text

    out = console(WIDE)
    out.print(Text(heading(result.schedule), style="bold"))
    out.print(Text(f"{_extent(result.schedule)}\n{_paid(result, costs)}", style="dim"))
    for table in tables:
        out.print(table)


def _summary(result: Simulation, *, played_from_file: bool) -> Any:
    from rich.table import Table

    summary = Table.grid(padding=(0, 2))
    unit = result.costs.time_unit
    summary.add_row("makespan", f"[bold]{number(result.makespan)}[/] {unit}")
    if result.steady_step is not None:
        steady, clipped = number(result.steady_step), number(result.steady_step_clipped or 0.0)
        more = f"; clipped by the global norm {clipped}" if clipped != steady else ""
        summary.add_row("steady step", f"[bold]{steady}[/] {unit}  [dim]without a barrier{more}[/]")
    summary.add_row("bubble ratio", f"[bold]{result.bubble_ratio:.2%}[/]")
    if causes := bubble_causes(result):
        summary.add_row("bubbles by cause", causes)
    if not result.schedule.synchronous:
        summary.add_row("steady bubble ratio", _steady(result, played_from_file))
    return summary


def _extent(schedule: Schedule) -> str:
    counts = {
        "worker": schedule.workers,
        "stage": schedule.stages,
        "pipe": schedule.pipes,
        "micro-batch": schedule.micro_batches,
    }
    ends = {"micro-batch": "es"}
    shown = [f"{n:,} {word}{ends.get(word, 's') if n != 1 else ''}" for word, n in counts.items()]
    if not schedule.synchronous:
        updates = "1 update" if schedule.periods == 1 else f"{schedule.periods} updates"
        shown[-1] += f" an update, {updates}"
    return " · ".join(shown)


def _paid(result: Simulation, costs: CostOptions) -> str:
    unit = result.costs.time_unit
    words = {
        "p2p": "message",
        "overlap": "overlapping",
        "sync_mode": "sync mode",
        "optimizer_bytes": "optimizer",
    }
    shown = []
    paid = _shown_costs(result, costs)
    if paid.keys() >= {"input_gradient", "weight_gradient"} and not _has_backwards(result):
        del paid["backward"]  # nothing takes so long
    for name, value in paid.items():
        word = words.get(name, name.replace("_", " "))
        metavar = COSTS[name].spec.metavar
        if metavar == "SECONDS":
            shown.append(f"{word} {numbers(value)} {unit}")
        elif metavar == "BYTES":
            sizes = value if isinstance(value, tuple) else (value,)
            shown.append(f"{word.replace(' bytes', 's')} {', '.join(map(byte_size, sizes))}")
        elif name == "overlap":
            shown.append("messages overlap compute" if value else "messages stop compute")
        else:
            shown.append(f"{word} {value if isinstance(value, str) else numbers(value)}")
    if costs.costs_of is not CostsOf.STAGE:
        shown.append(f"of a stage, given for a {costs.costs_of}")
    return " · ".join(shown)


def _has_backwards(result: Simulation) -> bool:
    return any(len(op.kind.makes) > 1 for op in result.schedule.ops())


def _workers(result: Simulation) -> Any:
    unit = result.costs.time_unit
    columns = [f"busy {unit}", f"idle {unit}", "bubble", "peak activations", "weight copies"]
    share = result.schedule.workers / result.schedule.stages
    span = result.makespan or 1.0
    rows = [
        [
            number(busy),
            number(max(idle, 0.0)),
            f"{max(idle, 0.0) / span:.1%}",
            number(peak),
            number(copies * share),
        ]
        for busy, idle, peak, copies in zip(
            result.busy, result.idle, result.peak_activations, result.weight_copies, strict=True
        )
    ]
    if result.memory is not None:
        columns.append("peak memory")
        for row, use in zip(rows, result.memory, strict=True):
            row.append(byte_size(use.peak))
    table = table_of("worker", *columns, text_columns=())
    named = [(str(worker), row) for worker, row in enumerate(rows)]
    for name, row in named if len(rows) < GROUP_FROM else merge_equal_rows(rows):
        table.add_row(name, *row)
    return table


def _steady(result: Simulation, played_from_file: bool) -> str:
    if result.steady_bubble_ratio is not None:
        return f"[bold]{result.steady_bubble_ratio:.2%}[/]  [dim]after the warm-up, before the drain[/]"
    needed = None if played_from_file else periods_for_steady(result.schedule)
    more = f"; simulate {needed} or more (--periods {needed})" if needed else ""
    played = result.schedule.periods
    return f"none: no steady part in {played} period{'s' if played > 1 else ''}{more}"


def _formulas(result: Simulation) -> tuple[FormulaValue, ...]:
    from counterflow.papers.formulas import formulas_of

    formulas = formulas_of(result)
    if not formulas:
        note(f"Note: no formula of Chimera, MixPipe, Hanayo or WPipe applies to {result.schedule}.")
    return formulas


def _published(result: Simulation, formulas: Sequence[FormulaValue]) -> Any:
    from rich.console import Group
    from rich.text import Text

    names = ("source", "quantity")
    table = table_of(*names, "value", "simulated", "difference", text_columns=names)
    for formula in formulas:
        simulated = "unknown" if formula.simulated is None else number(formula.simulated)
        difference = "" if formula.difference is None else f"{formula.difference:+.1%}"
        table.add_row(formula.source, formula.quantity, number(formula.value), simulated, difference)
    lines = [f"Times in {result.costs.time_unit}."]
    for formula in formulas:
        lines.append(f"{formula.source}, {formula.quantity}: {formula.formula}")
        lines += [f"  assumes: {text}" for text in formula.unmet]
    return Group(table, Text("\n".join(lines), style="dim"))


def _ops(result: Simulation) -> Any:
    unit = result.costs.time_unit
    columns = ("worker", "op", "pipe", "stage", "micro-batches", f"start {unit}", f"end {unit}")
    table = table_of(*columns, text_columns=())
    for span in result.timeline:
        op = span.op
        batches = ", ".join(map(str, op.micro_batches))
        if op.parts > 1:
            batches += f" (part {op.part + 1} of {op.parts})"
        table.add_row(
            str(span.worker),
            op.kind.value,
            str(op.pipe),
            str(op.stage),
            batches,
            number(span.start),
            number(span.end),
        )
    return table


def _messages(result: Simulation) -> Any:
    unit = result.costs.time_unit
    table = table_of("from", "to", "made by", "for", f"start {unit}", f"end {unit}", text_columns=())
    for m in result.messages:
        workers = (str(m.sender), str(m.receiver))
        table.add_row(*workers, str(m.maker), str(m.taker), number(m.start), number(m.end))
    return table


def _shown_costs(result: Simulation, costs: CostOptions) -> dict[str, Any]:
    shown = {}
    for name in dict.fromkeys(("forward", "backward", "p2p", *costs.set_values())):
        cost = COSTS[name]
        shown[name] = getattr(result.costs if cost.record is Costs else result.costs.memory, cost.field)
    return shown
