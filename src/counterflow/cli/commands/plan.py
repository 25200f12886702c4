"""``counterflow plan``: which scheme, depth, width and micro-batch to train a model with on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from counterflow.errors import ConfigError
from counterflow.planning.cost.device_placement import Arrangement
from counterflow.planning.inputs import files
from counterflow.planning.orders import SYNTHESIZED, Orders, compute_orders, with_orders
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.found import Found, Plan
from counterflow.planning.search.search import search
from counterflow.planning.task import EXAMPLES, Task, load_example
from counterflow.planning.why import why
from counterflow.schedule.formats import dumps

from ..options.flags import JsonFlag
from ..options.wanted import PlanLimits
from ..output.console import note, print_json, writing
from ..output.search_bar import order_bar, search_bar

_INPUTS = "What is planned: an example, files, or both: files take its place"
_ORDERS = "Computed orders"
_OUTPUT = "Output"


def plan(
    *,
    example: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A paper's run; see --list.", rich_help_panel=_INPUTS),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model: layers by kind.", rich_help_panel=_INPUTS)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What each kind of layer costs on a device.", rich_help_panel=_INPUTS
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Nodes, devices, memory and links.", rich_help_panel=_INPUTS),
    ] = None,
    mini_batch: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES", help="Samples of an update, of all replicas.", rich_help_panel=_INPUTS
        ),
    ] = None,
    limits: PlanLimits,
    synthesize: Annotated[
        bool,
        typer.Option(
            "--synthesize",
            help="Compute orders for the best plans; one that wins is a plan like any other.",
            rich_help_panel=_ORDERS,
        ),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="How long to look for them, in all. Default 30.", rich_help_panel=_ORDERS),
    ] = None,
    moves: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="So many moves of the search for each, in place of --seconds: the same on every machine.",
            rich_help_panel=_ORDERS,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Show the N best plans of all, not the best of every scheme.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.toml",
            help="Write the best plan as a config for 'counterflow train'.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    save_inputs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write model.toml, profile.toml and cluster.toml there, to edit; plan nothing.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the examples.", rich_help_panel=_OUTPUT)
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Choose scheme, depth, width, micro-batch and recomputation for a model on a cluster, by simulation."""
    if listed:
        _list(as_json)
        return
    if not synthesize and (seconds is not None or moves is not None):
        raise ConfigError(f"--{'moves' if seconds is None else 'seconds'}: only with --synthesize")
    task = _task(example, model, profile, cluster, mini_batch)
    if save_inputs is not None:
        _save(task, save_inputs)
        return
    constraints = limits.constraints()
    with search_bar("planning") as report:
        found = search(
            task.model,
            task.profile,
            task.cluster,
            task.mini_batch,
            constraints,
            count=top or 1,
            progress=report,
        )
    found, orders = _ordered(found, constraints, seconds, moves) if synthesize else (found, None)
    explained = why(found)
    written = None if out is None else _write(task, found.best[0], out)
    if as_json:
        from counterflow.planning.report import planned

        print_json(planned(task, found, explained, orders))
        return
    from ..output.plan_tables import print_plans

    print_plans(task, found, explained, top, orders)
    if out is not None:
        beside = f", its order in {written}" if written else ""
        note(f"The best plan is in {out}{beside}; run it: counterflow train {out}")
        if not found.best[0].play.schedule.synchronous:
            note("It works without a flush, on late weights: a step may learn less than one with a flush")
        best = found.best[0].play.configuration
        if best.arrangement is not Arrangement.PIPELINE_INSIDE or best.nodes:
            note(
                "train puts its workers on the devices that [plan] lists: start the ranks node by node, as "
                "torchrun and Slurm do"
            )


def _ordered(
    found: Found, constraints: Constraints, seconds: float | None, moves: int | None
) -> tuple[Found, Orders]:
    """What was found, with orders computed for the best plans."""
    limit = 30.0 if seconds is None else seconds
    with order_bar(None if moves is not None else limit) as told:
        orders = compute_orders(found, constraints, seconds=limit, moves=moves, progress=told)
    if orders.stopped:
        note("Stopped: these are the best orders so far.")
    return with_orders(found, orders), orders


def _task(
    example: str | None,
    model: Path | None,
    profile: Path | None,
    cluster: Path | None,
    mini_batch: int | None,
) -> Task:
    """What is planned.

    Raises:
        ConfigError: neither an example nor all that one has.
    """
    given: dict[str, Any] = {}
    readers: dict[str, tuple[Path | None, Callable[[Path], Any]]] = {
        "model": (model, files.load_model),
        "profile": (profile, files.load_profile),
        "cluster": (cluster, files.load_cluster),
    }
    for name, (path, read) in readers.items():
        if path is not None:
            given[name] = read(path)
    if mini_batch is not None:
        given["mini_batch"] = mini_batch
    return Task.of(example, given, _nothing_to_plan)


def _nothing_to_plan(missing: list[str]) -> str:
    flags = ", ".join("--" + name.replace("_", "-") for name in missing)
    return (
        f"nothing to plan: give --example NAME (see --list), or also {flags}; "
        "--example NAME --save-inputs DIR writes files to start from"
    )


def _list(as_json: bool) -> None:
    known = [load_example(name) for name in EXAMPLES]
    if as_json:
        from counterflow.planning.report import Examples

        print_json(Examples.of(examples=known))
        return
    width = max(len(name) for name in EXAMPLES)
    for each in known:
        typer.echo(f"{each.name:<{width}}  {each.about}, mini-batch {each.mini_batch:,}")


def _save(task: Task, folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "profile", "cluster"):
        path = folder / f"{name}.toml"
        with writing(path):
            path.write_text(files.dumps(getattr(task, name)), encoding="utf-8")
    names = " ".join(f"--{name} {folder / f'{name}.toml'}" for name in ("model", "profile", "cluster"))
    note(f"Edit and plan: counterflow plan {names} --mini-batch {task.mini_batch}")


def _write(task: Task, best: Plan, path: Path) -> Path | None:
    """The plan's config, and a computed order beside it: its file, None where a scheme makes the order."""
    from counterflow.train.planned import planned_config

    beside = None
    if best.play.configuration.scheme == SYNTHESIZED:
        beside = path.with_name(f"{path.stem}.schedule.json")
        with writing(beside):
            beside.write_text(dumps(best.play.schedule), encoding="utf-8")
    config = planned_config(task.model, task.profile, task.cluster, best.play.prediction(), beside)
    with writing(path):
        path.write_text(config.to_toml(), encoding="utf-8")
    return beside
