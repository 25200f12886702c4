"""``counterflow show``: draw the timeline of a schedule or a run in the terminal or into files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from counterflow.common.cli_fields import cli_field
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.program.actions import Matching
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Simulation, simulate
from counterflow.simulation.model_share import CostsOf

from ..options.flags import CostOptions, OptionRecord, SchemeOptions, schemes_from
from ..options.subject_argument import (
    FileFormat,
    as_text,
    build_beside,
    is_file,
    is_run,
    load,
    schedule_of,
    warn_if_wrong,
)
from ..options.wording import flag
from ..output.console import console, heading, note, writing


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingOptions(OptionRecord):
    """Options of the drawing."""

    panel: ClassVar[str] = "Output"

    out: list[Path] | None = cli_field(
        None,
        "Draw into FILE: .png .svg .pdf .html .trace.json (Perfetto), or write it as torch's .csv; "
        "may be repeated. Default: draw in the terminal.",
        metavar="FILE",
    )
    compare: str | None = cli_field(
        None,
        "A second schedule on the same time axis: a scheme, which takes the same options as far as it has "
        "them; a file; or a scheme with options of its own in quotes. Beside a run: predicted (the "
        "default), or another run.",
        metavar="OTHER",
    )
    form: FileFormat | None = cli_field(
        None, "Print the schedule instead, as a schedule file (json) or torch's (csv).", name="format"
    )
    memory: bool = cli_field(
        False, "Also draw each worker's memory over time: bytes if any are given, else activations."
    )
    messages: bool = cli_field(False, "Also draw every message as an arrow; needs --out.")
    communication: bool = cli_field(
        False,
        "Draw the communication plan instead: communicators, and the receive buffer of each message. Into "
        ".png, .svg or .pdf; '--format json' has its proofs.",
    )
    matching: Matching = cli_field(
        Matching.ORDER,
        "With --communication, how a transport matches messages: by their order (NCCL), or by tag (Gloo), "
        "whose receives are posted earlier.",
    )


def show(
    ctx: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            autocompletion=schemes_from,
            metavar="SCHEME|FILE|RUN_DIR",
            help="A scheme, a schedule file, or the folder of a run (see 'counterflow train').",
            show_default=False,
        ),
    ],
    options: SchemeOptions,
    costs: CostOptions,
    output: DrawingOptions,
) -> None:
    """Draw the timeline of a schedule or a run: in the terminal, or into files."""
    from counterflow.drawing import draw, draw_terminal
    from counterflow.drawing.saving import CHARTS, require_form

    out, form, memory, messages = output.out or (), output.form, output.memory, output.messages
    if messages and (is_run(subject) or not out):
        why = "a run's messages are not measured" if is_run(subject) else "the terminal draws no arrows"
        raise ConfigError(f"--messages: {why}; " + ("leave it out" if is_run(subject) else "add --out FILE"))
    if output.matching is not Matching.ORDER and not output.communication:
        raise ConfigError("--matching: add --communication; timelines do not depend on it")
    if output.communication:
        _show_communication(subject, options, output)
        return
    if is_run(subject):
        _show_run(subject, output, [*options.set_values(), *costs.set_values()])
        return
    schedule = schedule_of(subject, options)
    warn_if_wrong(subject, schedule)
    result = simulate(schedule, costs.of_stages(schedule.placement))
    compared_result = None
    if output.compare is not None:
        compared_result = _compared_simulation(ctx, output.compare, schedule, options, costs)
        if costs.costs_of is CostsOf.STAGE:
            _note_other_model(schedule, compared_result.schedule)
    for text in costs.without_effect(schedule, *([compared_result.schedule] if compared_result else [])):
        note(f"Note: {text}")
    if form is not None:
        typer.echo(as_text(schedule, form), nl=False)
    elif not out:
        draw_terminal(result, console(), compare=compared_result, memory=memory)
    for path in out:
        ending = require_form(path, (*CHARTS, ".csv"))
        with writing(path):
            if ending == ".csv":
                path.write_text(as_text(schedule, FileFormat.CSV), encoding="utf-8")
            else:
                draw(result, path, compare=compared_result, memory=memory, messages=messages)
        note(f"Wrote {path}")


def _show_communication(subject: str, options: SchemeOptions, output: DrawingOptions) -> None:
    from counterflow.drawing.communication import draw_plan, plan_lines
    from counterflow.program.checker import checked_program
    from counterflow.program.communication.certificate import certificate
    from counterflow.program.communication.communication_plan import communication_plan

    excluded = {"--compare": output.compare, "--memory": output.memory, "--messages": output.messages}
    if used := [name for name, value in excluded.items() if value]:
        raise ConfigError(f"--communication draws the plan alone; leave out {', '.join(used)}")
    if is_run(subject):
        raise ConfigError(f"--communication: {subject} is a run; name the schedule in it, schedule.json")
    if output.form is FileFormat.CSV:
        raise ConfigError("--communication: a plan is printed as json; torch's csv has no buffers")
    schedule = schedule_of(subject, options)
    program = checked_program(schedule, matching=output.matching)
    plan = communication_plan(program)
    if output.form is not None:
        typer.echo(json.dumps(certificate(program, plan)))
    elif not output.out:
        typer.echo(heading(schedule))
        for line in plan_lines(program, plan):
            typer.echo(line)
    for path in output.out or ():
        with writing(path):
            draw_plan(program, plan, path)
        note(f"Wrote {path}")


def _show_run(subject: str, output: DrawingOptions, names: Sequence[str]) -> None:
    from counterflow.drawing import draw_charts, print_charts
    from counterflow.training.folder import read_timeline

    if output.form is not None:
        raise ConfigError(f"--format: {subject} is a run; its folder has the schedule, schedule.json")
    if names:
        raise ConfigError(
            f"{subject} is a run, whose schedule and costs are known: leave out {', '.join(map(flag, names))}"
        )
    compare, memory = output.compare, output.memory
    charts = read_timeline(Path(subject)).charts(memory=memory)
    if compare not in (None, "predicted"):
        if not is_run(compare):
            raise ConfigError(
                f"--compare {compare}: a run is compared with 'predicted' or with the folder of another run"
            )
        charts[1] = read_timeline(Path(compare)).charts(memory=memory)[0]
    if not output.out:
        print_charts(charts, console())
    for path in output.out or ():
        with writing(path):
            draw_charts(charts, path)
        note(f"Wrote {path}")


def _compared_simulation(
    ctx: typer.Context, text: str, first: Schedule, options: SchemeOptions, costs: CostOptions
) -> Simulation:
    try:
        words = [text] if is_file(text) else shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--compare {text!r}: {error}") from None
    if not words:
        raise ConfigError("--compare '': name a scheme or a file")
    if len(words) == 1:
        (name,) = words
        schedule = load(name) if is_file(name) else build_beside(first, name, options.set_values())
        warn_if_wrong(name, schedule)
        return simulate(schedule, costs.of_stages(schedule.placement))
    # The same flags as this command's own, read by the same parser.
    with ctx.command.make_context(f"{ctx.info_name} --compare", words, parent=ctx.parent) as inner:
        values = dict(inner.params)
        sources = {name: inner.get_parameter_source(name) for name in values}
    for parameter in DrawingOptions.parameters():
        source = sources[parameter.name]
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--compare {text!r}: {flag(parameter.name)} belongs outside the quotes")
    schedule = schedule_of(values["subject"], SchemeOptions.pop_from(values))
    warn_if_wrong(values["subject"], schedule)
    compared_costs = CostOptions.pop_from(values)
    return simulate(schedule, costs.but(compared_costs).of_stages(schedule.placement))


def _note_other_model(first: Schedule, second: Schedule) -> None:
    if first.stages != second.stages:
        note(
            f"Note: {first.scheme} has {plural(first.stages, 'stage')}, {second.scheme} {second.stages}, "
            "and costs are "
            "those of one stage, so these are two models;\n"
            "for one model give costs of a worker's share of it: --costs-of worker"
        )
