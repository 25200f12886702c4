"""``counterflow synthesize``: the best order for a placement, costs and limits, with a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from counterflow.errors import ConfigError
from counterflow.planning.inputs.files import load_cluster, load_model, load_profile
from counterflow.planning.orders import play_one_by_one
from counterflow.planning.play import Play
from counterflow.planning.predict import Predictor
from counterflow.schedule.formats import dumps
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement
from counterflow.schedule.scheme import MOST_OPS
from counterflow.schedule.workload import Workload, plain
from counterflow.synthesis import Limit, Objective, Synthesis
from counterflow.synthesis import synthesize as compute

from ..options.flags import CostOptions, JsonFlag, bytes_of, numbers_of
from ..options.placements import placement_of
from ..output.console import byte_size, console, note, number, print_json, writing
from ..output.search_bar import order_bar

_WORK = "Work: what is ordered"
_LIMITS = "Limits: one number for all workers (4), or one a worker (4,4,3,3)"
_PROFILE = "Profile: measured costs in place of those above, as 'counterflow plan' takes them"
_SEARCH = "Search"


def synthesize(
    costs: CostOptions,
    *,
    placement: Annotated[
        str,
        typer.Option(
            metavar="NAME|TABLE|FILE",
            help="straight: stage s on worker s; loop: on s mod workers; vee: down and up again; wave: "
            "several of these; two-way: one pipe down and one up. Or your own: the worker of each stage, "
            "0,1,1,0, with / between pipes; or a JSON file with such lists, or a schedule.",
            rich_help_panel=_WORK,
            show_default=False,
        ),
    ],
    micro_batches: Annotated[
        int,
        typer.Option(
            metavar="N", help="Micro-batches of a mini-batch.", rich_help_panel=_WORK, show_default=False
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(metavar="P", help="Workers; a table has its own.", rich_help_panel=_WORK),
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages of a worker in a loop. Default 2.", rich_help_panel=_WORK)
    ] = None,
    waves: Annotated[
        int | None, typer.Option(help="Down-and-up passes of waves. Default 2.", rich_help_panel=_WORK)
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(help="Pairs of pipes, two ways. Default 1.", rich_help_panel=_WORK)
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split/--no-split",
            help="Whether input and weight gradients are ops of their own.",
            rich_help_panel=_WORK,
        ),
    ] = True,
    peak: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Most forwards that a worker stashes, until their weight gradients are made.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Most bytes of a worker; needs bytes of stages, or a profile.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    objective: Annotated[
        Objective,
        typer.Option(
            metavar="NAME",
            help="makespan of one step, or steady: what a step adds without a barrier.",
            rich_help_panel=_SEARCH,
        ),
    ] = Objective.MAKESPAN,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="How long to look for it.", rich_help_panel=_SEARCH)
    ] = 30.0,
    moves: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="So many moves of the search in place of --seconds: the same on every machine.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.", rich_help_panel=_SEARCH)] = 0,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model.", rich_help_panel=_PROFILE)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What its layers cost.", rich_help_panel=_PROFILE)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Devices and links.", rich_help_panel=_PROFILE)
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(metavar="SAMPLES", help="Samples of a micro-batch.", rich_help_panel=_PROFILE),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the schedule, for check, show, simulate, train and verify.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute the best order for any placement, costs and memory, and how far from the best it can be."""
    placed = placement_of(placement, workers, chunks=chunks, waves=waves, pairs=pairs)
    workload = _workload(placed, micro_batches, split=split)
    peaks = None if peak is None else numbers_of("peak", peak)
    most = None if memory is None else bytes_of("memory", memory)
    files = {"model": model, "profile": profile, "cluster": cluster, "micro_batch_size": micro_batch_size}
    if any(value is not None for value in files.values()):
        played = _profiled(workload, costs, files)
        spent = played.costs
        if peaks is None and most is None:
            most = tuple(u - room for u, room in zip(played.usable_bytes, played.beside, strict=True))
    else:
        spent = costs.costs()
    with order_bar(None if moves is not None else seconds) as report:
        found = compute(
            workload,
            spent,
            peak=peaks,
            memory_bytes=most,
            objective=objective,
            seconds=seconds,
            moves=moves,
            seed=seed,
            report=report,
        )
    if found.stopped:
        note("Stopped: this is the best so far.")
    if out is not None:
        with writing(out):
            out.write_text(dumps(found.schedule), encoding="utf-8")
    if as_json:
        from counterflow.synthesis.report import Synthesized

        print_json(Synthesized.model_validate(found))
        return
    _print(found, placement, (peaks, most))
    if out is not None:
        note(f"Wrote {out}; look at it: counterflow show {out}")


def _workload(placement: Placement, micro_batches: int, *, split: bool) -> Workload:
    if micro_batches < 1:
        raise ConfigError(f"--micro-batches {micro_batches}: must be 1 or more")
    ops = placement.stages * micro_batches * (3 if split else 2)
    if ops > MOST_OPS:
        raise ConfigError(
            f"{placement.stages} stages and {micro_batches} micro-batches are {ops:,} ops, and at most "
            f"{MOST_OPS:,} are ordered; choose smaller numbers"
        )
    return plain(placement, micro_batches, split=split, pipe_of=lambda m: m % placement.pipes)


def _profiled(workload: Workload, costs: CostOptions, files: dict[str, Any]) -> Play:
    """The measured costs of a model's stages, cut so that they are balanced."""
    missing = [name for name, value in files.items() if value is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"measured costs need a model, a profile, a cluster and a size: also give {flags}")
    given = costs.given()
    replicas, recompute = given.pop("replicas", 1), given.pop("recompute", Recompute.NONE)
    if given:
        name = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{name}: the profile has all costs; leave it out, or leave out --profile")
    predictor = Predictor(
        load_model(files["model"]), load_profile(files["profile"]), load_cluster(files["cluster"])
    )
    return play_one_by_one(
        predictor, workload, replicas=replicas, samples=files["micro_batch_size"], recompute=recompute
    )


def _print(found: Synthesis, placement: str, limits: tuple[Limit | None, Limit | None]) -> None:
    from rich.markup import escape
    from rich.table import Table

    schedule, unit = found.schedule, found.costs.time_unit
    out = console()
    out.print(
        f"[bold]Order for {schedule.workers} workers, {schedule.stages} stages ({escape(placement)}), "
        f"{schedule.micro_batches} micro-batches[/]"
    )
    peak, memory = limits
    limited = [
        *([f"at most {_each(peak, number)} activations a worker"] if peak is not None else []),
        *([f"at most {_each(memory, byte_size)} a worker"] if memory is not None else []),
    ]
    out.print(f"[dim]{'; '.join(limited) or 'memory without limit'} · made small: {found.objective}[/]")
    table = Table.grid(padding=(0, 2))
    table.add_row("makespan", f"[bold]{number(found.makespan)}[/] {unit}")
    table.add_row("steady step", f"[bold]{number(found.steady)}[/] {unit}  [dim]without a barrier[/]")
    table.add_row("lower bound", f"{number(found.lower_bound)} {unit}  [dim]{escape(found.bound.reason)}[/]")
    told = "none: no order is better" if found.proved else f"{found.gap:.2%} could be saved at most"
    table.add_row("gap", told)
    table.add_row("found by", escape(found.method))
    if found.named is None:
        table.add_row("named schemes", "none has this workload within the limits")
    else:
        name, value = found.named
        table.add_row("best named", f"{number(value)} {unit}  {escape(name)}; saved: {found.gain or 0:.2%}")
    table.add_row("peak", f"{', '.join(number(p) for p in found.peak)} activations by worker")
    table.add_row("idle", f"{', '.join(number(max(i, 0.0)) for i in found.idle)} {unit} by worker")
    out.print(table)


def _each(limit: Limit, told: Any) -> str:
    return str(told(limit)) if isinstance(limit, (int, float)) else ", ".join(told(one) for one in limit)
