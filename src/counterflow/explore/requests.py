"""Requests of the page, as pydantic models. They check form only; the packages that answer check meaning."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.placement import Placement
from counterflow.simulation import Costs
from counterflow.simulation.cost_texts import COSTS, bytes_of, costs_from, numbers_of, read
from counterflow.simulation.model_share import CostsOf, of_stages
from counterflow.simulation.op_costs import MOST_COST

Text = Annotated[str, Field(max_length=20_000)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Option = Annotated[int, Field(ge=-(10**18), le=10**18)] | Annotated[str, Field(max_length=200)] | bool


class RequestModel(BaseModel):
    """A part of a request; an unknown key is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Costs(RequestModel):
    costs_of: Annotated[CostsOf, Field(strict=False)] | None = None

    def costs(self) -> Costs:
        """The costs as they were given.

        Raises:
            ConfigError: a text says no number, or a negative one.
        """
        texts = {name: getattr(self, name) for name in COSTS}
        return costs_from(read({name: value for name, value in texts.items() if value not in (None, "")}))

    def of_stages(self, placement: Placement) -> Costs:
        """Costs of the stages of this placement, as the simulator takes them.

        Raises:
            ConfigError: as ``costs``, or costs by stage where they are given for something else.
        """
        return of_stages(self.costs(), placement, self.costs_of or CostsOf.STAGE)


_FORMS: dict[type, Any] = {str: Text, int: Annotated[int, Field(le=10**6)]}


def _form(kind: type) -> Any:
    return _FORMS.get(kind, Annotated[kind, Field(strict=False)] if issubclass(kind, Enum) else kind)


if TYPE_CHECKING:
    RequestCosts = _Costs
else:
    _FIELDS = {name: (_form(cost.spec.kind) | None, None) for name, cost in COSTS.items()}
    RequestCosts = create_model("RequestCosts", __base__=_Costs, **_FIELDS)


class Move(RequestModel):
    """An op taken out of a worker's order and put in again elsewhere; places count from 0."""

    worker: Count
    start: Count
    stop: Count


class ScheduleReference(RequestModel):
    """A schedule: of a scheme, or a file that the server was given; with moves made to it, and its costs.

    Without costs, those that the file came with, which are a plan's, or the usual ones.
    """

    scheme: Annotated[str, Field(max_length=100)] | None = None
    options: Annotated[dict[Annotated[str, Field(max_length=100)], Option], Field(max_length=50)] = {}
    file: Annotated[str, Field(max_length=100)] | None = None
    moves: Annotated[list[Move], Field(max_length=1000)] = []
    costs: RequestCosts | None = None


class LookRequest(RequestModel):
    """Schedules to be timed and drawn on one axis, each with its own costs."""

    subjects: Annotated[list[ScheduleReference], Field(min_length=1, max_length=2)]
    peak: Text | None = None
    memory: Text | None = None
    messages: bool = False


class Check(RequestModel):
    """A schedule to be proved; ``peak`` is the most activations that a worker may stash."""

    subject: ScheduleReference
    peak: Text | None = None


class Download(LookRequest):
    """Request for the looked-at schedules as a file."""

    form: Literal["schedule", "csv", "png", "svg", "pdf", "html", "trace"]


class File(RequestModel):
    """A schedule file's text; ``like`` is a file whose costs, if a plan's, it has too."""

    name: Annotated[str, Field(max_length=300)]
    text: str
    like: Annotated[str, Field(max_length=100)] | None = None


class OrderRequest(RequestModel):
    """An order to be computed for a schedule's workload."""

    subject: ScheduleReference
    peak: Text | None = None
    memory: Text | None = None
    objective: Literal["makespan", "steady"] = "makespan"
    split: bool | None = None
    seconds: Annotated[float, Field(ge=0, le=600)] = 20.0


class CompareRequest(RequestModel):
    """Request to compare all schemes for one model on a given number of workers."""

    workers: Annotated[int, Field(ge=1, le=64)]
    micro_batches: Annotated[int, Field(ge=1, le=256)]
    costs: RequestCosts = RequestCosts()
    peak: Annotated[float, Field(ge=0, le=MOST_COST)] | None = None
    memory: Text | None = None
    seconds: Annotated[float, Field(ge=0, le=600)] = 10.0

    def memory_bytes(self) -> float | None:
        """The limit in bytes, read from its text.

        Raises:
            ConfigError: the text says no number, or several.
        """
        limit = bytes_of("memory", self.memory) if self.memory else None
        if isinstance(limit, tuple):
            raise ConfigError(f"memory: {len(limit)} numbers; give one for all workers")
        return limit


class PlanFile(RequestModel):
    """A user's own file."""

    name: Annotated[str, Field(max_length=300)]
    text: str


class PlanRequest(RequestModel):
    """A model on a cluster to be planned: a paper's example or the user's files, and what is changed."""

    example: Annotated[str, Field(max_length=100)] | None = None
    model: PlanFile | None = None
    profile: PlanFile | None = None
    cluster: PlanFile | None = None
    mini_batch: Annotated[int, Field(ge=1, le=10**9)] | None = None
    stale: bool = False
    link_speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    memory: Annotated[float, Field(gt=0, le=1e6)] = 1.0


class PlanReference(RequestModel):
    """One of the plans that a search found, by its place in the list."""

    job: Annotated[str, Field(max_length=100)]
    plan: Count


class JobRequest(RequestModel):
    """A search that was begun; ``stop`` has it end with what it found."""

    job: Annotated[str, Field(max_length=100)]
    stop: bool = False


class RunReference(RequestModel):
    """A run, and what of it the page has."""

    name: Annotated[str, Field(max_length=1000)]
    metrics: Annotated[str, Field(max_length=200)] = ""


class RunsRequest(RequestModel):
    """Runs to be followed side by side, and the timelines and the list of runs that the page has."""

    runs: Annotated[list[RunReference], Field(min_length=1, max_length=8)]
    timeline: Annotated[str, Field(max_length=2000)] = ""
    listed: Annotated[str, Field(max_length=200)] = ""


class SearchInput(RequestModel):
    """Input of a search process: one of the three requests, with the schedule's text for an order.

    ``planned`` contains a plan's costs for the schedule, in the format of ``saved_plans.py``.
    """

    order: OrderRequest | None = None
    plan: PlanRequest | None = None
    compare: CompareRequest | None = None
    schedule: str | None = None
    planned: str | None = None


def limits_of(peak: str | None, memory: str | None, schedule: Schedule) -> dict[str, Any]:
    """Limits of a worker as texts, read.

    Raises:
        ConfigError: one is no number, negative, or not one a worker.
    """
    limits = {
        "peak": numbers_of("peak", peak) if peak else None,
        "memory_bytes": bytes_of("memory", memory) if memory else None,
    }
    for name, value in limits.items():
        for number in value if isinstance(value, tuple) else (value or 0.0,):
            if not 0 <= number <= MOST_COST:
                raise ConfigError(f"{name}={number}: must be 0 or more, and at most {MOST_COST:g}")
        if isinstance(value, tuple) and len(value) != schedule.workers:
            raise ConfigError(
                f"{name}: {plural(len(value), 'number')} for {plural(schedule.workers, 'worker')}; give "
                "one, or one a worker"
            )
    return limits
