"""Schedules for the page: built, moved, timed, proved, written; and the files that the page has given.

Invariant: a schedule that was built is kept for the next request, as the simulator keeps its model, so that a
slider only fills in numbers.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from counterflow.common.number_texts import byte_size, compact
from counterflow.common.plurals import plural
from counterflow.drawing import Chart, chart_of, draw_charts, order_chart
from counterflow.drawing.page import page_data
from counterflow.drawing.time_units import AmountUnit, time_unit
from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.checker import inspect
from counterflow.program.lists import circle_of_ops
from counterflow.program.player import accelerated, load_numba
from counterflow.program.program_report import checked
from counterflow.schedule import registry
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.schedule.scheme import DEPTH
from counterflow.simulation import Cause, Costs, Simulation, simulate
from counterflow.simulation.model_share import CostsOf
from counterflow.simulation.op_costs import per_stage

from .requests import Check, Download, LookRequest, Move, RequestCosts, ScheduleReference, limits_of
from .saved_plans import SavedPlan, written

MOST_OPS = 40_000
"""Ops of a schedule that the page shows; ``counterflow show`` draws larger ones."""

_CACHED = 32
"""Schedules, and files, that are kept."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Known:
    schedule: Schedule
    by_scheme: bool  # unchanged, so it always passes the checker
    planned: Costs | None = None  # costs that came with a plan's file

    def costs(self, subject: ScheduleReference) -> Costs:
        """Costs that the simulator takes.

        Raises:
            ConfigError: what is given as costs are none.
        """
        if subject.costs is None:
            return self.planned or Costs()
        return subject.costs.of_stages(self.schedule.placement)

    def recomputed(self, subject: ScheduleReference) -> _Known:
        """The same with recomputations if the costs recompute whole stages."""
        kind = self.planned.recompute if self.planned else None
        if subject.costs is not None:
            kind = subject.costs.model_dump()["recompute"]
        if kind != Recompute.STAGE:
            return self
        return replace(self, schedule=with_recomputations(self.schedule))


@dataclass(frozen=True, slots=True)
class _Shown:
    schedule: Schedule
    costs: Costs
    unit: CostsOf | None  # of the given costs; None: the costs of a plan
    chart: Chart
    data: dict[str, Any]


class Schedules:
    """Schedules that the page may name: of schemes, and of the files that it sent."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, _Known] = OrderedDict()
        self._built: OrderedDict[str, Schedule] = OrderedDict()
        self._lock = Lock()

    # -- which schedule

    def add(self, text: str, name: str, like: str | None = None) -> dict[str, Any]:
        """Take a schedule file's text, with a plan's costs if the file ``like`` has them; its key.

        Raises:
            ConfigError: it is none, or too large to be shown.
        """
        planned = None if like is None else self.find(ScheduleReference(file=like)).planned
        return self._added(loads(text, name), name, planned)

    def add_planned(self, plan: SavedPlan, name: str) -> dict[str, Any]:
        """Add a plan's schedule with the costs of the plan; the page's data of it.

        Raises:
            ConfigError: the schedule is too large to be shown.
        """
        return self._added(plan.schedule, name, plan.costs)

    def _added(self, schedule: Schedule, name: str, planned: Costs | None) -> dict[str, Any]:
        _refuse_large(sum(map(len, schedule.orders)), name)
        unique = dumps(schedule) + ("" if planned is None else written(planned))
        key = hashlib.sha256(unique.encode()).hexdigest()[:16]
        with self._lock:
            _keep(self._files, key, _Known(schedule, by_scheme=False, planned=planned))
        return {"file": key, "workers": schedule.workers, "scheme": schedule.scheme}

    def find(self, subject: ScheduleReference) -> _Known:
        """The schedule that is meant.

        Raises:
            ConfigError: there is none such, or a move leads nowhere.
        """
        with self._lock:
            if subject.file is None:
                first = _Known(self._of_scheme(subject), by_scheme=True)
            elif subject.file in self._files:
                first = self._files[subject.file]
            else:
                raise ConfigError(f"file {subject.file}: is no longer known to this server; open it again")
            first = first.recomputed(subject)
            if not subject.moves:
                return first
            key = f"{subject.model_dump_json(exclude={'costs'})} {first.schedule.workload.recomputes}"
            if key not in self._built:
                _keep(self._built, key, moved(first.schedule, subject.moves))
            return replace(first, schedule=self._built[key], by_scheme=False)

    def _of_scheme(self, subject: ScheduleReference) -> Schedule:
        if subject.scheme is None:
            raise ConfigError("no schedule: give a scheme or a file")
        key = subject.model_dump_json(exclude={"costs", "moves"})
        if key not in self._built:
            _keep(self._built, key, build(subject.scheme, subject.options))
        return self._built[key]

    # -- what is said of it

    def look(self, request: LookRequest) -> dict[str, Any]:
        """Schedules timed and drawn on one axis, with what there is to say of each.

        Raises:
            ConfigError: what is asked makes no sense.
        """
        shown = [self._shown(index, request) for index in range(len(request.subjects))]
        return {
            "picture": page_data([item.chart for item in shown]),
            "subjects": [item.data for item in shown],
            "note": _note(shown),
        }

    def charts(self, request: LookRequest) -> list[Chart]:
        """Charts of the requested schedules."""
        return [self._shown(index, request).chart for index in range(len(request.subjects))]

    def _shown(self, index: int, request: LookRequest) -> _Shown:
        subject = request.subjects[index]
        try:
            known = self.find(subject)
            costs = known.costs(subject)
            subject_costs = subject.costs or (None if known.planned else RequestCosts())
            unit = None if subject_costs is None else subject_costs.costs_of or CostsOf.STAGE
            return _Shown(known.schedule, costs, unit, *self._timed(known, costs, request))
        except ConfigError as error:
            raise ConfigError(f"second schedule: {error}") if index else error from None

    def _timed(self, known: _Known, costs: Costs, request: LookRequest) -> tuple[Chart, dict[str, Any]]:
        schedule = known.schedule
        limits = limits_of(request.peak, request.memory, schedule)
        data: dict[str, Any] = {
            "heading": str(schedule),
            "own": known.by_scheme,
            "workers": schedule.workers,
            "ops": sum(map(len, schedule.orders)),
            "synchronous": schedule.synchronous,
            "edges": [len(order) for order in schedule.orders],
        }
        try:
            result = simulate(schedule, costs)
        except ScheduleError as error:
            return replace(order_chart(schedule, costs), circle=_circle(schedule)), data | {
                "fails": str(error)
            }
        chart = chart_of(result, memory=True, messages=request.messages)
        in_bytes = result.memory is not None
        limit = limits["memory_bytes"] if in_bytes else limits["peak"]
        worker_limits = _limits_by_worker(limit, schedule.workers)
        chart = replace(chart, slack=result.slack, limit=worker_limits)
        return chart, data | _figures(result, chart, worker_limits)

    def check(self, request: Check) -> dict[str, Any]:
        """The checker's rules on a schedule."""
        schedule = self.find(request.subject).schedule
        peak = limits_of(request.peak, None, schedule)["peak"]
        if isinstance(peak, tuple):
            raise ConfigError("peak: the checker takes one number for all workers")
        return checked(schedule, inspect(schedule, peak_limit=peak)).model_dump(mode="json")

    # -- as a file

    def download(self, request: Download) -> tuple[bytes, str, str]:
        """Requested schedules as a file: bytes, media type and name."""
        schedule = self.find(request.subjects[0]).schedule
        name = "".join(c if c.isalnum() else "-" for c in schedule.scheme)[:40] or "schedule"
        if request.form == "schedule":
            return dumps(schedule).encode(), "application/json", f"{name}.schedule.json"
        charts = self.charts(request)
        if request.form == "csv":
            return _csv(charts).encode(), "text/csv", f"{name}.csv"
        suffix, media = _FORMS[request.form]
        with tempfile.TemporaryDirectory() as folder, self._lock:  # matplotlib draws one at a time
            path = Path(folder) / f"{name}{suffix}"
            draw_charts(charts, path)
            return path.read_bytes(), media, path.name


_FORMS = {
    "png": (".png", "image/png"),
    "svg": (".svg", "image/svg+xml"),
    "pdf": (".pdf", "application/pdf"),
    "html": (".html", "text/html"),
    "trace": (".trace.json", "application/json"),
}


def warm() -> None:
    """Load what the first picture needs, so that it comes as quickly as the next ones."""
    load_numba()
    Schedules().look(
        LookRequest(subjects=[ScheduleReference(scheme="dapple", options={"stages": 2, "micro_batches": 2})])
    )


def _note(shown: Sequence[_Shown]) -> str:
    parts = []
    planned = sum(item.costs.ops is not None for item in shown)
    if len(shown) == 2 and planned == 1:
        parts.append("Only one of the two has a plan's costs, so these may be two models.")
    elif len(shown) == 2 and not planned and not math.isclose(*map(_model_seconds, shown)):
        took = [
            time_unit(seconds, in_forwards=item.chart.in_forwards).text(seconds)
            for item, seconds in zip(shown, map(_model_seconds, shown), strict=True)
        ]
        schemes = [item.schedule.scheme for item in shown]
        parts.append(
            f"These are two models: with one micro-batch, all stages compute {took[0]} in {schemes[0]} and "
            f"{took[1]} in {schemes[1]}."
        )
    large = [item for item in shown if item.schedule.stages != item.schedule.workers]
    if any(item.unit is CostsOf.STAGE or item.costs.memory is None for item in large):
        what = "Costs and activations" if any(item.unit is CostsOf.STAGE for item in large) else "Activations"
        sizes = (
            f"{schedule.scheme} has {plural(schedule.stages, 'stage')} on "
            f"{plural(schedule.workers, 'worker')}"
            for schedule in (item.schedule for item in large)
        )
        parts.append(f"{what} are those of one stage, and {' and '.join(sizes)}.")
    return " ".join(parts)


def _model_seconds(item: _Shown) -> float:
    both = ("forward", item.costs.forward), ("backward", item.costs.backward)
    return sum(sum(per_stage(name, value, item.schedule.stages)) for name, value in both)


def build(name: str, options: dict[str, int | str | bool]) -> Schedule:
    """The schedule of a scheme; workers said as another scheme says them are understood.

    Raises:
        ConfigError: an unknown scheme, an option that is missing, illegal or none of its; too large.
    """
    scheme = registry.scheme(name)
    for depth in DEPTH:
        if type(options.get(depth)) is int:
            scheme.refuse_too_large({**options, scheme.depth: options[depth]}, MOST_OPS)
    schedule = registry.build(name, options, accelerated)
    _refuse_large(sum(map(len, schedule.orders)), scheme.name)
    return schedule


def moved(schedule: Schedule, moves: Sequence[Move]) -> Schedule:
    """The schedule with ops taken out of their workers' orders and put in elsewhere in them.

    Raises:
        ConfigError: a move of a worker or an op that is not there.
    """
    orders: list[list[Op]] = [list(order) for order in schedule.orders]
    for number, move in enumerate(moves, 1):
        if move.worker >= len(orders):
            raise ConfigError(f"move {number}: worker {move.worker}, but there are {len(orders)}")
        order = orders[move.worker]
        if max(move.start, move.stop) >= len(order):
            raise ConfigError(f"move {number}: worker {move.worker} has {len(order)} ops, counted from 0")
        order.insert(move.stop, order.pop(move.start))
    return replace(schedule, orders=tuple(map(tuple, orders)))


def _refuse_large(ops: int, name: str) -> None:
    if ops > MOST_OPS:
        raise ConfigError(
            f"{name}: {ops:,} ops, and the page shows at most {MOST_OPS:,}; counterflow show draws more"
        )


def _keep(cache: OrderedDict[str, _T], key: str, value: _T) -> None:
    cache[key] = value
    while len(cache) > _CACHED:
        cache.popitem(last=False)


def _circle(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    try:
        return tuple(circle_of_ops(OpGraph(schedule)))
    except ScheduleError:  # something is made nowhere
        return ()


def _limits_by_worker(limit: float | tuple[float, ...] | None, workers: int) -> tuple[float, ...] | None:
    if limit is None:
        return None
    return limit if isinstance(limit, tuple) else (limit,) * workers


def _figures(result: Simulation, chart: Chart, limit: tuple[float, ...] | None) -> dict[str, Any]:
    unit = time_unit(result.makespan, in_forwards=chart.in_forwards)
    rows = list(_workers(result, chart, limit))
    figures = [["makespan", unit.text(result.makespan)]]
    if result.steady_step is not None:
        figures.append(["steady step", unit.text(result.steady_step)])
    figures.append(["bubble ratio", f"{100 * result.bubble_ratio:.1f} %"])
    if result.steady_bubble_ratio is not None:
        figures.append(["steady bubble ratio", f"{100 * result.steady_bubble_ratio:.1f} %"])
    assert chart.memory is not None
    figures.append(["peak of a worker", chart.memory.unit.text(chart.memory.peak)])
    total = result.makespan * result.schedule.workers or 1.0
    causes = [
        [cause.value, sum(gap.end - gap.start for gap in result.gaps if gap.cause is cause) / total]
        for cause in Cause
    ]
    return {"makespan": result.makespan, "figures": figures, "causes": causes, "rows": rows}


def _workers(result: Simulation, chart: Chart, limit: tuple[float, ...] | None) -> Iterator[dict[str, Any]]:
    unit = time_unit(result.makespan, in_forwards=chart.in_forwards)
    memory, share = chart.memory, result.schedule.workers / result.schedule.stages
    assert memory is not None
    for worker, use in enumerate(memory.workers):
        over = limit is not None and use.peak > limit[worker]
        yield {
            "worker": str(worker),
            "busy": unit.text(result.busy[worker]),
            "idle": unit.text(max(0.0, result.idle[worker])),
            "bubbles": f"{100 * max(0.0, result.idle[worker]) / (result.makespan or 1.0):.1f} %",
            "activations": compact(result.peak_activations[worker]),
            "copies": compact(result.weight_copies[worker] * share),
            "of_share": "" if share == 1 else compact(result.peak_activations[worker] * share),
            "memory": byte_size(use.peak) if memory.unit is AmountUnit.BYTES else "",
            "over": over,
        }


def _csv(charts: Sequence[Chart]) -> str:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["schedule", "worker", "op", "what", "stage", "start", "end"])
    for chart in charts:
        for box in chart.boxes:
            table.writerow([chart.heading, box.worker, box.op, box.what, box.stage, box.start, box.end])
    return text.getvalue()
