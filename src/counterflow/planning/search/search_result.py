"""Results of a search: plans, candidates that do not fit, and statistics of every scheme's candidates.

The search itself is in ``search.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from counterflow.common.html import titled
from counterflow.common.number_texts import byte_size
from counterflow.schedule import registry
from counterflow.schedule.ir import OpKind
from counterflow.schedule.modes import Recompute, Sync

from ..inputs.cluster import Cluster
from ..play import Play
from ..prediction import Configuration, Prediction, ranking
from .space import Omission

TOLERANCE = 0.02
"""Share of a step within which plans count as equally fast: planned steps miss measured ones by more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate that fits, with its simulated step.

    Attributes:
        seconds: seconds of one step.
        place: its place in the space, whatever its cuts; the first of two equal plans is taken.
        play: the simulated candidate.
    """

    seconds: float
    place: int
    play: Play

    @property
    def layout(self) -> str | None:
        """Its stages as a layout of Megatron-LM; None where the model has none."""
        cuts = self.play.stages.cuts
        layout = self.play.inputs.model.layout(cuts)
        return None if layout is None else str(layout)

    @property
    def prediction(self) -> Prediction:
        """The prediction as a record."""
        return self.play.prediction()

    @property
    def pipeline_options(self) -> dict[str, Any]:
        """Keyword arguments of ``Pipeline`` with which it runs the plan: schedule, cuts, and others that
        differ from their defaults.
        """
        plan = self.play.configuration
        options: dict[str, Any] = {
            "schedule": self.play.schedule if registry.find(plan.scheme) is None else _text(plan),
            "cuts": list(self.play.stages.cuts),
        }
        if plan.recompute is not Recompute.NONE:
            options["recompute"] = plan.recompute.value
        if plan.replicas > 1 and plan.sync is not Sync.EAGER_OPT:
            options["sync"] = plan.sync.value
        if plan.zero_stage:
            options["zero_stage"] = plan.zero_stage
        return options

    @property
    def complexity(self) -> tuple[int, int, bool, int, float]:
        """Copies of the weights, stages, split backwards, recomputation, and memory: less is simpler."""
        schedule = self.play.schedule
        return (
            schedule.pipes,
            schedule.stages,
            any(op.kind is OpKind.INPUT_GRADIENT for op in schedule.ops()),
            [*Recompute].index(self.play.configuration.recompute),
            max(worker.total for worker in self.play.memory),
        )


def _text(plan: Configuration) -> str:
    return f"{plan.scheme}({', '.join(f'{name}={value}' for name, value in plan.options)})"


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A candidate that does not fit.

    Attributes:
        scheme: its scheme.
        candidate: the candidate.
        needed_bytes: minimum memory of the fullest worker, without the reserve.
        worker: this worker; if devices differ, the one with the largest excess.
        usable_bytes: memory that it can use.
    """

    scheme: str
    candidate: Configuration
    needed_bytes: float
    worker: int
    usable_bytes: float

    @property
    def excess_bytes(self) -> float:
        """Bytes that this worker lacks."""
        return self.needed_bytes - self.usable_bytes


@dataclass(slots=True)
class Rejections:
    """Numbers of a scheme's candidates by outcome, which a search counts.

    Attributes:
        scheme: name of the scheme.
        candidates: all of them; one whose layers are cut by two rules counts twice.
        too_large: candidates that do not fit, unless they were known to be slower before.
        slower: candidates whose bound exceeds the best found, so they were never simulated.
        simulated: candidates that were simulated, in each sync mode.
        closest: the one of those that do not fit that needs the least memory; None if all fit.
    """

    scheme: str
    candidates: int = 0
    too_large: int = 0
    slower: int = 0
    simulated: int = 0
    closest: TooLarge | None = None

    def refuse(self, candidate: TooLarge) -> None:
        """Count a candidate that does not fit."""
        self.too_large += 1
        if self.closest is None or candidate.excess_bytes < self.closest.excess_bytes:
            self.closest = candidate


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: the best plans of all, best first.
        of_schemes: the best plan of every scheme that has one, best first.
        rejections: by scheme.
        omissions: parts of the space without a candidate.
        in_more_memory: the best candidate that was refused for memory alone and would beat all plans.
        mini_batch: samples of a step.
        usable_bytes: memory of a device without the reserve.
    """

    best: tuple[Plan, ...]
    of_schemes: tuple[Plan, ...]
    rejections: tuple[Rejections, ...]
    omissions: tuple[Omission, ...]
    in_more_memory: Plan | None
    mini_batch: int
    usable_bytes: float

    def simplest(self, tolerance: float = TOLERANCE) -> Plan:
        """The simplest of the plans of all schemes that are as fast as the best.

        Fewer copies of the weights are simpler, then fewer stages, complete backwards, no recomputation, and
        less memory.

        Args:
            tolerance: share of the best step by which a plan may be slower.
        """
        limit = (1 + tolerance) * self.of_schemes[0].seconds
        return min(
            (plan for plan in self.of_schemes if plan.seconds <= limit), key=lambda plan: plan.complexity
        )

    def _repr_html_(self) -> str:
        plans = [plan.play.prediction() for plan in self.of_schemes]
        return titled(f"Mini-batch {self.mini_batch:,}: the best plan of each scheme", ranking(plans))


def nothing_fits(cluster: Cluster, tallies: Mapping[str, Rejections], omissions: Iterable[Omission]) -> str:
    """Text about the memory that each scheme would need, if no candidate fits."""
    reasons = [f"  {omission.what}: {omission.reason}" for omission in omissions]
    if not tallies:
        return "\n".join(["no plan meets the constraints", *reasons])
    lines = [
        f"no plan fits: a device of cluster {cluster.name} has {byte_size(cluster.usable_bytes)} for it"
        + (f" ({byte_size(cluster.reserve_bytes)} are reserved)" if cluster.reserve_bytes else "")
    ]
    for name, tally in tallies.items():
        if tally.closest is not None:
            closest = tally.closest
            of = f" on worker {closest.worker}, which has {byte_size(closest.usable_bytes)}"
            need = f"  {name}: needs at least {byte_size(closest.needed_bytes)}"
            lines.append(need + (of if cluster.kinds else ""))
    return "\n".join([*lines, *reasons])
