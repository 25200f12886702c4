"""What the page may ask, as pydantic models: form only; whether it makes sense the other rooms say."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

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


class Asked(BaseModel):
    """A part of a request; an unknown key is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Costs(Asked):
    """Costs as a form has them: texts in the commands' own words; None or empty: not given."""

    costs_of: Annotated[CostsOf, Field(strict=False)] | None = None

    def costs(self) -> Costs:
        """The costs as they were given.

        Raises:
            ConfigError: a text says no number, or a negative one.
        """
        given = {name: getattr(self, name) for name in COSTS}
        return costs_from(read({name: value for name, value in given.items() if value not in (None, "")}))

    def of_stages(self, placement: Placement) -> Costs:
        """What the simulator is fed with: costs of the stages of this placement.

        Raises:
            ConfigError: as ``costs``, or costs by stage where they are given for something else.
        """
        return of_stages(self.costs(), placement, self.costs_of or CostsOf.STAGE)


_FORMS: dict[type, Any] = {str: Text, int: Annotated[int, Field(le=10**6)]}


def _form(kind: type) -> Any:
    """What a form may send for a cost."""
    return _FORMS.get(kind, Annotated[kind, Field(strict=False)] if issubclass(kind, Enum) else kind)


if TYPE_CHECKING:
    CostsAsked = _Costs
else:
    _FIELDS = {name: (_form(one.asked.kind) | None, None) for name, one in COSTS.items()}
    CostsAsked = create_model("CostsAsked", __base__=_Costs, **_FIELDS)


class Move(Asked):
    """An op taken out of a worker's order and put in again elsewhere; places count from 0."""

    worker: Count
    start: Count
    stop: Count


class Subject(Asked):
    """A schedule: of a scheme, or a file that the server was given; with moves made to it, and its costs.

    Without costs, those that the file came with, which are a plan's, or the usual ones.
    """

    scheme: Annotated[str, Field(max_length=100)] | None = None
    options: Annotated[dict[Annotated[str, Field(max_length=100)], Option], Field(max_length=50)] = {}
    file: Annotated[str, Field(max_length=100)] | None = None
    moves: Annotated[list[Move], Field(max_length=1000)] = []
    costs: CostsAsked | None = None


class Look(Asked):
    """Schedules to be timed and drawn on one axis, each with its own costs."""

    subjects: Annotated[list[Subject], Field(min_length=1, max_length=2)]
    peak: Text | None = None
    memory: Text | None = None
    messages: bool = False


class Check(Asked):
    """A schedule to be proved; ``peak`` is the most activations that a worker may stash."""

    subject: Subject
    peak: Text | None = None


class Download(Look):
    """Request for the looked-at schedules as a file."""

    form: Literal["schedule", "csv", "png", "svg", "pdf", "html", "trace"]


class File(Asked):
    """A schedule file's text; ``like`` is a file whose costs, if a plan's, it has too."""

    name: Annotated[str, Field(max_length=300)]
    text: str
    like: Annotated[str, Field(max_length=100)] | None = None


class Order(Asked):
    """An order to be computed for a schedule's workload."""

    subject: Subject
    peak: Text | None = None
    memory: Text | None = None
    objective: Literal["makespan", "steady"] = "makespan"
    split: bool | None = None
    seconds: Annotated[float, Field(ge=0, le=600)] = 20.0


class CompareAsked(Asked):
    """Request to compare all schemes for one model on a given number of workers."""

    workers: Annotated[int, Field(ge=1, le=64)]
    micro_batches: Annotated[int, Field(ge=1, le=256)]
    costs: CostsAsked = CostsAsked()
    peak: Annotated[float, Field(ge=0, le=MOST_COST)] | None = None
    memory: Text | None = None
    seconds: Annotated[float, Field(ge=0, le=600)] = 10.0

    def memory_bytes(self) -> float | None:
        """The limit in bytes, read from its text.

        Raises:
            ConfigError: the text says no number, or several.
        """
        found = bytes_of("memory", self.memory) if self.memory else None
        if isinstance(found, tuple):
            raise ConfigError(f"memory: {len(found)} numbers; give one for all workers")
        return found


class PlanFile(Asked):
    """A user's own file."""

    name: Annotated[str, Field(max_length=300)]
    text: str


class PlanAsked(Asked):
    """A model on a cluster to be planned: a paper's example or the user's files, and what is changed."""

    example: Annotated[str, Field(max_length=100)] | None = None
    model: PlanFile | None = None
    profile: PlanFile | None = None
    cluster: PlanFile | None = None
    mini_batch: Annotated[int, Field(ge=1, le=10**9)] | None = None
    stale: bool = False
    link_speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    memory: Annotated[float, Field(gt=0, le=1e6)] = 1.0


class PlanFound(Asked):
    """One of the plans that a search found, by its place in the list."""

    job: Annotated[str, Field(max_length=100)]
    plan: Count


class JobAsked(Asked):
    """A search that was begun; ``stop`` has it end with what it found."""

    job: Annotated[str, Field(max_length=100)]
    stop: bool = False


class RunSeen(Asked):
    """A run, and what of it the page has."""

    name: Annotated[str, Field(max_length=1000)]
    metrics: Annotated[str, Field(max_length=200)] = ""


class RunsAsked(Asked):
    """Runs to be followed side by side, and the timelines and the list of runs that the page has."""

    runs: Annotated[list[RunSeen], Field(min_length=1, max_length=8)]
    timeline: Annotated[str, Field(max_length=2000)] = ""
    listed: Annotated[str, Field(max_length=200)] = ""


class Work(Asked):
    """Input of a search process: one of the three requests, with the schedule's text for an order.

    ``planned`` contains a plan's costs for the schedule, in the format of ``kept.py``.
    """

    order: Order | None = None
    plan: PlanAsked | None = None
    compare: CompareAsked | None = None
    schedule: str | None = None
    planned: str | None = None


def limits_of(peak: str | None, memory: str | None, schedule: Schedule) -> dict[str, Any]:
    """Limits of a worker as texts, read.

    Raises:
        ConfigError: one is no number, negative, or not one a worker.
    """
    found = {
        "peak": numbers_of("peak", peak) if peak else None,
        "memory_bytes": bytes_of("memory", memory) if memory else None,
    }
    for name, value in found.items():
        for one in value if isinstance(value, tuple) else (value or 0.0,):
            if not 0 <= one <= MOST_COST:
                raise ConfigError(f"{name}={one}: must be 0 or more, and at most {MOST_COST:g}")
        if isinstance(value, tuple) and len(value) != schedule.workers:
            raise ConfigError(
                f"{name}: {len(value)} numbers for {schedule.workers} workers; give one, or one a worker"
            )
    return found
