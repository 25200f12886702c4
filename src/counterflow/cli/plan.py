"""``counterflow plan``: which scheme, depth, width and micro-batch to train a model with on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute, Sync

from .flags import JsonFlag
from .output import WIDE, byte_size, console, note, number, print_json, writing
from .search_bar import search_bar, without_collections

if TYPE_CHECKING:
    from counterflow.papers.examples import Example
    from counterflow.plan.predict import Configuration, Parts, Prediction
    from counterflow.plan.search import Found, Plan
    from counterflow.plan.why import Why

_INPUTS = "What is planned: an example, files, or both: files take its place"
_LIMITS = "What a plan has to be: may be repeated; not given: all is tried"
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
    scheme: Annotated[
        list[str] | None, typer.Option(help="Only this scheme.", rich_help_panel=_LIMITS)
    ] = None,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Only schemes that flush.", rich_help_panel=_LIMITS)
    ] = False,
    depth: Annotated[
        list[int] | None,
        typer.Option(metavar="D", help="Only this many workers a replica.", rich_help_panel=_LIMITS),
    ] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            metavar="SAMPLES", help="Only micro-batches of this many samples.", rich_help_panel=_LIMITS
        ),
    ] = None,
    also_micro_batch: Annotated[
        list[int] | None,
        typer.Option(metavar="SAMPLES", help="This size besides powers of two.", rich_help_panel=_LIMITS),
    ] = None,
    recompute: Annotated[
        list[Recompute] | None,
        typer.Option(metavar="MODE", help="Only none, stage or layer.", rich_help_panel=_LIMITS),
    ] = None,
    sync: Annotated[
        list[Sync] | None,
        typer.Option(metavar="MODE", help="Only end, eager or eager-opt.", rich_help_panel=_LIMITS),
    ] = None,
    even: Annotated[
        bool,
        typer.Option("--even", help="Equally many blocks a stage, not equal cost.", rich_help_panel=_LIMITS),
    ] = False,
    more_updates: Annotated[
        bool,
        typer.Option(
            "--more-updates",
            help="Also several updates in a mini-batch, of schemes that update after every micro-batch.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
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
    from counterflow.plan.device_placement import Arrangement  # noqa: PLC0415  (numpy and pydantic take a while)
    from counterflow.plan.search import search  # noqa: PLC0415
    from counterflow.plan.space import Constraints  # noqa: PLC0415
    from counterflow.plan.stages import Cutting  # noqa: PLC0415
    from counterflow.plan.why import why  # noqa: PLC0415

    if listed:
        _list(as_json)
        return
    task = _task(example, model, profile, cluster, mini_batch)
    if save_inputs is not None:
        _save(task, save_inputs)
        return
    constraints = Constraints(
        schemes=tuple(scheme) if scheme else None,
        synchronous=synchronous,
        depths=tuple(depth) if depth else None,
        samples=tuple(micro_batch) if micro_batch else None,
        more_samples=tuple(also_micro_batch or ()),
        recompute=tuple(recompute or Recompute),
        sync=tuple(sync or Sync),
        arrangements=tuple(Arrangement),
        cuts=Cutting.EVEN if even else Cutting.BALANCED,
        more_updates=more_updates,
    )
    with search_bar("planning") as report, without_collections():
        found = search(
            task.model,
            task.profile,
            task.cluster,
            task.mini_batch,
            constraints,
            count=top or 1,
            progress=report,
        )
        explained = why(found)
    if out is not None:
        _write(task, found.best[0], out)
    if as_json:
        from counterflow.papers.step_times import plan_with_form_json  # noqa: PLC0415
        from counterflow.plan.report import as_json as data  # noqa: PLC0415

        from .results import Planned  # noqa: PLC0415

        head = {"model": task.model.name, "profile": task.profile.name, "cluster": task.cluster.name}
        print_json(Planned.model_validate(head | data(found, explained, plan_with_form_json)))
        return
    _print(task, found, explained, top)
    if out is not None:
        note(f"The best plan is in {out}; run it: counterflow train {out}")
        if not found.best[0].play.schedule.synchronous:
            note("It works without a flush, on late weights; for a plan that flushes: --synchronous")
        if found.best[0].play.configuration.arrangement is not Arrangement.PIPELINE_INSIDE:
            note(
                "Its step is that of workers on the devices that [plan] lists: start the ranks in that order"
            )


def _task(
    example: str | None,
    model: Path | None,
    profile: Path | None,
    cluster: Path | None,
    mini_batch: int | None,
) -> Example:
    """What is planned.

    Raises:
        ConfigError: neither an example nor all that one has.
    """
    from counterflow.papers import examples  # noqa: PLC0415
    from counterflow.plan import files  # noqa: PLC0415

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
    if example is not None:
        return replace(examples.example(example), **given)
    missing = [flag for flag in (*readers, "mini_batch") if flag not in given]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"nothing to plan: give --example NAME (see --list), or also {flags}; "
            "--example NAME --save-inputs DIR writes files to start from"
        )
    return examples.Example("", "", source="", **given)


def _list(as_json: bool) -> None:
    from counterflow.papers.examples import EXAMPLES, example  # noqa: PLC0415

    known = [example(name) for name in EXAMPLES]
    if as_json:
        shown = [
            {"name": e.name, "about": e.about, "mini_batch": e.mini_batch, "source": e.source} for e in known
        ]
        from .results import Examples  # noqa: PLC0415

        print_json(Examples.model_validate({"examples": shown}))
        return
    width = max(len(name) for name in EXAMPLES)
    for each in known:
        typer.echo(f"{each.name:<{width}}  {each.about}, mini-batch {each.mini_batch:,}")


def _save(task: Example, folder: Path) -> None:
    from counterflow.plan import files  # noqa: PLC0415

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "profile", "cluster"):
        path = folder / f"{name}.toml"
        with writing(path):
            path.write_text(files.dumps(getattr(task, name)), encoding="utf-8")
    names = " ".join(f"--{name} {folder / f'{name}.toml'}" for name in ("model", "profile", "cluster"))
    note(f"Edit and plan: counterflow plan {names} --mini-batch {task.mini_batch}")


def _write(task: Example, best: Plan, path: Path) -> None:
    from counterflow.train.planned import planned_config  # noqa: PLC0415

    config = planned_config(task.model, task.profile, task.cluster, best.play.prediction())
    with writing(path):
        path.write_text(config.to_toml(), encoding="utf-8")


def _print(task: Example, found: Found, explained: Why, top: int | None) -> None:
    from rich.text import Text  # noqa: PLC0415

    out = console(WIDE)
    cluster = task.cluster
    out.print(Text(f"{task.model.name} on {cluster.name}", style="bold"))
    nodes = f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''}"
    devices = f"{nodes} of {cluster.devices}" if cluster.devices > 1 else nodes
    about = (
        f"{devices}, {task.profile.machine} · mini-batch {found.mini_batch:,} samples · "
        f"{byte_size(found.usable_bytes)} a device"
    )
    if cluster.reserve_bytes:
        about += f", {byte_size(cluster.reserve_bytes)} more reserved"
    out.print(Text(about, style="dim"))
    plans = found.best if top else found.of_schemes
    predictions = [each.play.prediction() for each in plans]
    out.print(_ranking(plans, width=out.width, with_arrangement=cluster.devices > 1))
    best = found.best[0].play.prediction()
    for line in _of_best(found.best[0]):
        out.print(Text(line))
    out.print()
    for line in _explained(explained, best):
        out.print(Text(line))
    out.print(_rejected(found))
    for omission in found.omissions:
        out.print(Text(f"{omission.what}: {omission.reason}", style="dim"))
    often = dict.fromkeys(p.configuration.scheme for p in predictions if p.updates > 1)
    for scheme in often:
        told = f"{scheme} updates after every micro-batch: several times in a mini-batch."
        out.print(Text(told, style="dim"))


_ROOM = 128
"""Columns that all of the ranking takes; in fewer, what the best plan's line tells is left out."""


def _ranking(plans: Sequence[Plan], *, width: int, with_arrangement: bool) -> Any:
    from counterflow.papers.step_times import beside  # noqa: PLC0415
    from counterflow.plan.report import choices  # noqa: PLC0415

    whole = width >= _ROOM + (18 if with_arrangement else 0)
    cells: dict[str, Callable[[Prediction], str]] = {
        "scheme": lambda p: p.configuration.scheme,
        "options": lambda p: choices(p.configuration),
        "D": lambda p: str(p.workers),
        "W": lambda p: str(p.configuration.replicas),
        "B": lambda p: str(p.configuration.samples),
        "N": lambda p: str(p.micro_batches),
        "recompute": lambda p: p.configuration.recompute.value,
        "sync": lambda p: p.configuration.sync.value,
        "devices": lambda p: p.configuration.arrangement.value,
        "step": lambda p: _seconds(p.step_seconds),
        "samples/s": lambda p: number(round(p.samples_per_second, 1)),
        "bubbles": lambda p: f"{p.bubble_ratio:.1%}",
        "peak memory": lambda p: byte_size(max(p.peak_bytes)),
    }
    if not (whole and with_arrangement):
        del cells["devices"]
    if not whole:
        del cells["sync"]
    beyond = ("closed form",) if whole else ()
    table = _table(*cells, *beyond, left=("scheme", "options", "recompute", "sync", "devices"))
    for plan in plans:
        prediction = plan.play.prediction()
        form = beside(plan.play) if whole else None
        difference = form and form.difference(plan.seconds)
        shown = ("" if difference is None else f"{difference:+.1%}",) if whole else ()
        table.add_row(*(cell(prediction) for cell in cells.values()), *shown)
    return table


def _of_best(found: Plan) -> Iterator[str]:
    """What the table has no room for: memory by worker, cuts, closed form, notes."""
    from counterflow.papers.step_times import beside  # noqa: PLC0415

    best, form = found.play.prediction(), beside(found.play)
    difference = form and form.difference(found.seconds)
    plan = best.configuration
    yield (
        f"Best plan: {best.schedule}, {plan.replicas} replica{'s' if plan.replicas > 1 else ''}, "
        f"micro-batches of {plan.samples}, recompute {plan.recompute.value}, sync {plan.sync.value}, devices "
        f"{plan.arrangement.value}"
    )
    runs: list[tuple[int, int, str]] = []
    for worker, size in enumerate(map(byte_size, best.peak_bytes)):
        if runs and runs[-1][2] == size:
            runs[-1] = (runs[-1][0], worker, size)
        else:
            runs.append((worker, worker, size))
    shown = (f"{a}–{b}: {size}" if a != b else f"{a}: {size}" for a, b, size in runs)
    yield "  peak memory by worker   " + ", ".join(shown)
    if isinstance(plan.cuts, tuple) and plan.cuts:
        yield f"  stages begin at layers  0, {', '.join(map(str, plan.cuts))}"
    if form is not None and difference is not None:
        yield (
            f"  closed form             {_seconds(form.seconds)} ({form.source}), "
            f"{difference:+.1%} from the simulation"
        )
    for text in best.notes:
        yield f"  note                    {text}"


_PART_WORDS = {
    "compute": "compute",
    "imbalance": "stage imbalance",
    "bubbles": "schedule bubbles",
    "messages": "messages",
    "allreduce": "all-reduces",
    "update": "update",
    "shared_cores": "waiting for cores",
}


def _explained(explained: Why, best: Prediction) -> Iterator[str]:
    yield "Where its step goes"
    yield f"  {_parts(explained.parts)}"
    if explained.limit is not None:
        lost = getattr(explained.parts, explained.limit)
        yield (
            f"  What limits it most: {_PART_WORDS[explained.limit]}, {_seconds(lost)} of "
            f"{_seconds(best.step_seconds)} ({lost / best.step_seconds:.0%})"
        )
    larger = explained.in_more_memory
    if larger is not None and explained.needed_bytes is not None:
        other = larger.play.prediction()
        gain = best.step_seconds / other.step_seconds - 1
        yield (
            f"  Memory: with {byte_size(explained.needed_bytes)} a device in place of "
            f"{byte_size(best.usable_bytes)}, {_short(other)} would be {gain:.1%} faster"
        )
    else:
        yield "  Memory: no plan that needs more would be faster"
    if explained.second is None or explained.second_parts is None:
        return
    second = explained.second.play.prediction()
    ratio = second.step_seconds / best.step_seconds - 1
    yield f"The second, {_short(second)}, is {ratio:.1%} slower"
    yield f"  {_parts(explained.second_parts)}"
    for change in explained.break_evens:
        word = "slower" if change.times > 1 else "faster"
        times = change.times if change.times > 1 else 1 / change.times
        yield f"  It wins if {change.what} are {times:.3g} times {word}"
    if not explained.break_evens:
        yield "  Neither messages nor all-reduces 64 times faster or slower make it win"


def _parts(parts: Parts) -> str:
    shown = []
    total = sum(getattr(parts, name) for name in _PART_WORDS)
    for name, word in _PART_WORDS.items():
        value = getattr(parts, name)
        if abs(value) > 5e-4 * total:
            shown.append(f"{word} {_seconds(value)}")
    return " + ".join(shown)


def _short(prediction: Prediction) -> str:
    plan = prediction.configuration
    return f"{plan.scheme} (D={prediction.workers}, W={plan.replicas}, {_rest(plan)})"


def _rest(plan: Configuration) -> str:
    """Micro-batch, options and recomputation of a configuration."""
    from counterflow.plan.report import choices  # noqa: PLC0415

    again = f"recompute {plan.recompute.value}" if plan.recompute is not Recompute.NONE else ""
    return ", ".join(filter(None, [f"B={plan.samples}", choices(plan), again]))


def _rejected(found: Found) -> Any:
    table = _table(
        "scheme",
        "tried",
        "too large",
        "slower by bound",
        "simulated",
        "smallest that is too large",
        left=("scheme", "smallest that is too large"),
    )
    for scheme, rejected in found.rejections.items():
        closest = rejected.closest
        shown = ""
        if closest is not None:
            plan = closest.candidate
            options = dict(plan.options)
            workers = options.get("stages", options.get("workers"))
            shown = (
                f"D={workers}, {_rest(plan)}: "
                f"worker {closest.worker} needs at least {byte_size(closest.needed_bytes)} "
                f"of {byte_size(found.usable_bytes)}"
            )
        table.add_row(
            scheme,
            f"{rejected.candidates:,}",
            f"{rejected.too_large:,}",
            f"{rejected.slower:,}",
            f"{rejected.simulated:,}",
            shown,
        )
    return table


def _table(*columns: str, left: tuple[str, ...]) -> Any:
    from rich import box  # noqa: PLC0415  (not for --json)
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{1000 * value:.4g} ms"
