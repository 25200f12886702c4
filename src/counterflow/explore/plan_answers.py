"""Plans for the page: what ``counterflow plan`` finds, also on other links and with more memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from counterflow.common.number_texts import byte_size, compact
from counterflow.drawing import chart_of
from counterflow.drawing.page import page_data
from counterflow.drawing.time_units import time_unit
from counterflow.planning.inputs import input_files
from counterflow.planning.inputs.cluster import Cluster, Link
from counterflow.planning.plan_report import ExampleShown
from counterflow.planning.prediction import choices
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.node_orders import in_words
from counterflow.planning.search.search import search
from counterflow.planning.search.search_result import Plan
from counterflow.planning.task import EXAMPLES, PlanningTask, load_example
from counterflow.planning.why import why

from .requests import PlanRequest
from .saved_plans import SavedPlan, SavedPlans

FIRST = "hanayo-bert64"
"""The example that is planned where none is chosen: it takes a second."""

_MOST_OPS = 8_000
"""Ops of a plan whose picture is sent."""


def known() -> list[dict[str, Any]]:
    """The examples, the one to begin with first."""
    names = sorted(EXAMPLES, key=lambda name: name != FIRST)
    return [ExampleShown.model_validate(load_example(name)).model_dump() for name in names]


def task_of(request: PlanRequest) -> PlanningTask:
    """Planning task of a request: an example, with the user's files in place of the example's.

    Raises:
        ConfigError: an unknown example, a damaged file, or something is missing.
    """
    readers = {
        "model": input_files.read_model,
        "profile": input_files.read_profile,
        "cluster": input_files.read_cluster,
    }
    values: dict[str, Any] = {}
    for name, read in readers.items():
        file = getattr(request, name)
        if file is not None:
            values[name] = read(file.text, file.name)
    if request.mini_batch is not None:
        values["mini_batch"] = request.mini_batch
    return PlanningTask.of(
        request.example,
        values,
        lambda missing: f"nothing to plan: choose an example, or also give {', '.join(missing)}",
    )


def changed(cluster: Cluster, *, link_speed: float, memory: float) -> Cluster:
    """The cluster with its link speeds and memory sizes multiplied by given factors.

    Raises:
        ConfigError: the memory is smaller than what is reserved.
    """

    def faster(link: Link | None) -> Link | None:
        if link is None:
            return None
        return Link(link.latency_seconds / link_speed, link.seconds_per_byte / link_speed)

    names = ("inside", "between", "allreduce_inside", "allreduce_between")
    links: dict[str, Any] = {name: faster(getattr(cluster, name)) for name in names}
    kinds = tuple(
        replace(
            kind,
            memory_bytes=None if kind.memory_bytes is None else kind.memory_bytes * memory,
            inside=faster(kind.inside),
            between=faster(kind.between),
        )
        for kind in cluster.kinds
    )
    factors = [
        f"{what} x{times:g}" for what, times in (("links", link_speed), ("memory", memory)) if times != 1
    ]
    name = ", ".join([cluster.name, *factors])
    return replace(cluster, name=name, memory_bytes=cluster.memory_bytes * memory, kinds=kinds, **links)


def plan(request: PlanRequest, report: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], SavedPlans]:
    """The best plan of every scheme, its limit and its picture; and the record that the server stores.

    Args:
        request: request.
        report: callback for progress.

    Raises:
        ConfigError: the request is inconsistent.
        PlanError: no plan fits.
    """
    task = task_of(request)
    task = replace(task, cluster=changed(task.cluster, link_speed=request.link_speed, memory=request.memory))
    cluster = task.cluster
    result = search(
        task.model,
        task.profile,
        cluster,
        task.mini_batch,
        Constraints(stale=request.stale),
        count=1,
        progress=lambda done, of, what: report({"done": done, "of": of} | _search_progress(done, of, what)),
    )
    report({"said": "what would change the choice", "share": None})
    explained = why(result)
    larger = explained.in_more_memory
    devices = f"of {cluster.devices} device{'' if cluster.devices == 1 else 's'}"
    if cluster.kinds:
        devices = f"({in_words(tuple((kind.name, kind.nodes) for kind in cluster.kinds))})"
    shown = {
        "heading": f"{task.model.name} on {cluster.name}",
        "about": f"{cluster.nodes:,} node{'' if cluster.nodes == 1 else 's'} {devices}, "
        f"mini-batch {task.mini_batch:,}, "
        f"{byte_size(cluster.usable_bytes)} a device",
        "plans": [_row(plan) for plan in result.of_schemes],
        "changes": [
            f"{explained.second.play.configuration.scheme} wins if {change.what} take "
            f"{compact(change.times, 3)} times as long"
            for change in explained.break_evens
            if explained.second is not None
        ],
        "more_memory": larger
        and f"{larger.play.schedule.scheme} with {byte_size(larger.prediction.needed_bytes)} a device "
        f"would take {_seconds(larger.seconds)}",
        "rejected": [
            [r.scheme, str(r.candidates), str(r.too_large), str(r.slower), str(r.simulated)]
            for r in result.rejections
        ],
        "omitted": [f"{omission.what}: {omission.reason}" for omission in result.omissions],
    }
    plays = (plan.play for plan in result.of_schemes)
    plans = tuple(SavedPlan(play.schedule, play.costs, play.prediction()) for play in plays)
    return shown, SavedPlans(task, plans)


def _search_progress(done: int, of: int, what: str) -> dict[str, Any]:
    if what == "bounds":
        return {"said": "bounds of all candidates", "share": None}
    if done == of:
        return {"said": f"all {of:,} candidates decided; now what {what} would give", "share": None}
    return {"said": f"{done:,} of {of:,} candidates: {what}", "share": done / of}


def config_of(saved_plans: SavedPlans, number: int) -> str:
    """A plan as the config with which ``counterflow train`` runs it.

    Raises:
        ConfigError: the model does not say how it is made, or a config cannot say what was planned.
    """
    from counterflow.training.planned import planned_config  # noqa: PLC0415 - needed only to save a plan

    task, prediction = saved_plans.task, saved_plans.plans[number].prediction
    return planned_config(task.model, task.profile, task.cluster, prediction).to_toml()


def _row(plan: Plan) -> dict[str, Any]:
    prediction, parts = plan.play.prediction(), plan.play.parts()
    configuration = prediction.configuration
    limits = {name: getattr(parts, name) for name in type(parts).__slots__}
    schedule = plan.play.schedule
    return {
        "scheme": configuration.scheme,
        "schedule": prediction.schedule,
        "choices": choices(configuration),
        "workers": prediction.workers,
        "replicas": configuration.replicas,
        "samples": configuration.samples,
        "micro_batches": prediction.micro_batches,
        "recompute": configuration.recompute.value,
        "sync": configuration.sync.value,
        "step": prediction.step_text,
        "throughput": compact(prediction.samples_per_second),
        "bubbles": f"{100 * prediction.bubble_ratio:.1f} %",
        "memory": byte_size(max(prediction.peak_bytes)),
        "notes": list(prediction.notes),
        "parts": [
            [name.replace("_", " "), max(0.0, seconds) / (plan.seconds or 1.0), _seconds(seconds)]
            for name, seconds in limits.items()
        ],
        "picture": page_data([chart_of(plan.play.simulation, memory=True)])
        if sum(map(len, schedule.orders)) <= _MOST_OPS
        else None,
    }


def _seconds(seconds: float) -> str:
    return time_unit(seconds).text(seconds)
