"""``counterflow plan``: which scheme, depth, width and micro-batch to train a model with on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from counterflow.common.cli_fields import cli_field
from counterflow.errors import ConfigError
from counterflow.planning.by_length import AtLength, plans_by_length
from counterflow.planning.cost.device_placement import Arrangement
from counterflow.planning.inputs import input_files
from counterflow.planning.inputs.model import USER_MODELS
from counterflow.planning.orders import SYNTHESIZED, Orders, compute_orders, with_orders
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.search.search_result import Plan, SearchResult
from counterflow.planning.task import EXAMPLES, PlanningTask, load_example
from counterflow.planning.why import why
from counterflow.schedule.formats import dumps
from counterflow.schedule.placement import looped

from ..options.flags import JsonFlag, OptionRecord
from ..options.plan_limits import PlanLimits
from ..output.console import note, print_json, writing
from ..output.search_bar import order_bar, search_bar
from ..output.visible import echo


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs(OptionRecord):
    """Inputs of a planning task."""

    panel: ClassVar[str] = "Input: an example, files, or both; a file replaces that part of the example"

    example: str | None = cli_field(None, "A run of a paper; --list names them.", metavar="NAME")
    model: Path | None = cli_field(None, "Layers of the model, by kind.", metavar="FILE")
    profile: Path | None = cli_field(None, "What each kind of layer costs on a device.", metavar="FILE")
    cluster: Path | None = cli_field(None, "Nodes, devices, memory and links of the cluster.", metavar="FILE")
    mini_batch: int | None = cli_field(None, "Samples of one update, over all replicas.", metavar="SAMPLES")

    def task(self) -> PlanningTask:
        """The planning task.

        Raises:
            ConfigError: neither an example nor everything that an example contains is given.
        """
        readers: dict[str, Callable[[Any], Any]] = {
            "model": input_files.load_model,
            "profile": input_files.load_profile,
            "cluster": input_files.load_cluster,
            "mini_batch": int,
        }
        values = {name: getattr(self, name) for name in readers}
        read = {name: readers[name](value) for name, value in values.items() if value is not None}
        return PlanningTask.of(self.example, read, _nothing_to_plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering(OptionRecord):
    """Options of the search for orders."""

    panel: ClassVar[str] = "Computed orders"

    synthesize: bool = cli_field(
        False, "Compute orders for the best plans; a faster order is listed as a plan."
    )
    seconds: float | None = cli_field(
        None, "Search time limit, in seconds, for all orders. Default 30.", least=0.0
    )
    moves: int | None = cli_field(
        None,
        "Search budget of each order in moves, instead of --seconds: the same result on every machine.",
        least=0,
    )

    def check(self) -> None:
        """Refuse search options if no orders are computed."""
        if not self.synthesize and (self.seconds is not None or self.moves is not None):
            raise ConfigError(f"--{'moves' if self.seconds is None else 'seconds'}: only with --synthesize")

    def ordered(self, result: SearchResult, constraints: Constraints) -> tuple[SearchResult, Orders | None]:
        """The plans found, with computed orders for the best ones if these are asked for."""
        if not self.synthesize:
            return result, None
        limit = 30.0 if self.seconds is None else self.seconds
        with order_bar(None if self.moves is not None else limit) as report:
            orders = compute_orders(result, constraints, seconds=limit, moves=self.moves, progress=report)
        if orders.stopped:
            note("Stopped: these are the best orders so far.")
        return with_orders(result, orders), orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(OptionRecord):
    """Options of the output."""

    panel: ClassVar[str] = "Output"

    top: int | None = cli_field(
        None, "Show the N best plans of all, not the best of every scheme.", metavar="N", least=1
    )
    out: Path | None = cli_field(
        None, "Write the best plan as a config for 'counterflow train'.", metavar="PLAN.toml"
    )
    save_inputs: Path | None = cli_field(
        None, "Write model.toml, profile.toml and cluster.toml there, to edit; plan nothing.", metavar="DIR"
    )
    by_length: bool = cli_field(
        False, "Also plan other lengths of the sequence: from which one slices win, and by what."
    )
    layout: bool = cli_field(
        False, "Print only the best plan's layout, for Megatron-LM's --pipeline-model-parallel-layout."
    )
    listed: bool = cli_field(False, "List the examples.", name="list")


def plan(
    *, inputs: PlanInputs, limits: PlanLimits, ordering: Ordering, output: Results, as_json: JsonFlag = False
) -> None:
    """Choose scheme, depth, width, micro-batch and recomputation for a model on a cluster, by simulation."""
    if output.listed:
        _list(as_json)
        return
    ordering.check()
    task = inputs.task()
    if output.save_inputs is not None:
        _save(task, output.save_inputs)
        return
    constraints = limits.constraints(task.model)
    with search_bar("planning") as report:
        result = search(
            task.model,
            task.profile,
            task.cluster,
            task.mini_batch,
            constraints,
            count=output.top or 1,
            progress=report,
        )
    result, orders = ordering.ordered(result, constraints)
    explained = why(result)
    by_length: tuple[AtLength, ...] = ()
    if output.by_length:
        with search_bar("planning other lengths") as report:
            by_length = plans_by_length(task, constraints, progress=report)
    out, best = output.out, result.best[0]
    written = None if out is None else _write(task, best, out)
    if as_json:
        from counterflow.planning.plan_report import planned

        print_json(planned(task, result, explained, orders, by_length))
        return
    if output.layout:
        _print_layout(best)
    else:
        from ..output.plan_tables import print_plans

        print_plans(task, result, explained, output.top, orders=orders, by_length=by_length)
    if out is not None:
        _note_written(best, out, written)
    elif task.model.source in USER_MODELS and not task.model.train:
        _note_call(best)


def _print_layout(best: Plan) -> None:
    layout = best.layout
    if layout is None:
        raise ConfigError(
            f"model {best.play.inputs.model.name}: has no layout, as its first and last layer are not "
            "each the only one of its kind, like an embedding and a head; --json has the cuts"
        )
    schedule = best.play.schedule
    placement = schedule.placement
    echo(str(layout))
    if placement != looped(schedule.workers, schedule.stages // schedule.workers):
        note(
            f"{schedule.scheme} places stages in its own way; Megatron-LM places stage k on rank k % "
            f"{schedule.workers}, so there the same stages are another pipeline"
        )


def _note_call(best: Plan) -> None:
    options = best.pipeline_options
    schedule = options.pop("schedule")
    named = "".join(f", {name}={value!r}" for name, value in options.items())
    plan = best.play.configuration
    workers = best.play.schedule.workers * plan.replicas
    shown = repr(schedule) if isinstance(schedule, str) else "schedule"
    note(
        f"Run it on {workers} worker{'s' * (workers != 1)}: cf.Pipeline(model, loss, {shown}{named}, "
        "example=inputs, optimizer=optimizer)"
    )


def _note_written(best: Plan, out: Path, order: Path | None) -> None:
    order_text = f", its order in {order}" if order else ""
    note(f"The best plan is in {out}{order_text}; run it: counterflow train {out}")
    if not best.play.schedule.synchronous:
        note("It is asynchronous and works on older weights: a step may learn less than a synchronous one")
    chosen = best.play.configuration
    if chosen.arrangement is not Arrangement.PIPELINE_INSIDE or chosen.nodes:
        note(
            "train puts its workers on the devices that [plan] lists: start the ranks node by node, as "
            "torchrun and Slurm do"
        )


def _nothing_to_plan(missing: list[str]) -> str:
    flags = ", ".join("--" + name.replace("_", "-") for name in missing)
    return (
        f"nothing to plan: give --example NAME (see --list), or also {flags}; "
        "--example NAME --save-inputs DIR writes files to start from"
    )


def _list(as_json: bool) -> None:
    known = [load_example(name) for name in EXAMPLES]
    if as_json:
        from counterflow.planning.plan_report import Examples

        print_json(Examples.of(examples=known))
        return
    width = max(len(name) for name in EXAMPLES)
    for example in known:
        echo(f"{example.name:<{width}}  {example.about}, mini-batch {example.mini_batch:,}")


def _save(task: PlanningTask, folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "profile", "cluster"):
        path = folder / f"{name}.toml"
        with writing(path):
            path.write_text(input_files.dumps(getattr(task, name)), encoding="utf-8")
    names = " ".join(f"--{name} {folder / f'{name}.toml'}" for name in ("model", "profile", "cluster"))
    note(f"Edit and plan: counterflow plan {names} --mini-batch {task.mini_batch}")


def _write(task: PlanningTask, best: Plan, path: Path) -> Path | None:
    """Write the plan's config and, next to it, a computed order. Returns the order's file, or None if a
    scheme makes the order.
    """
    from counterflow.training.planned import planned_config

    order_path = None
    if best.play.configuration.scheme == SYNTHESIZED:
        order_path = path.with_name(f"{path.stem}.schedule.json")
        with writing(order_path):
            order_path.write_text(dumps(best.play.schedule), encoding="utf-8")
    config = planned_config(task.model, task.profile, task.cluster, best.play.prediction(), order_path)
    with writing(path):
        path.write_text(config.to_toml(), encoding="utf-8")
    return order_path
