"""A published figure described as data: who competes where, under which restrictions, and what was measured.

Invariant: a description holds what the paper says and what is assumed where it says nothing, never a
prediction; ``reproduction.py`` makes those with the planner. Every known miss has its reason here, and a
published value that a constant was fitted on is marked so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from counterflow.planning.cost.device_placement import Arrangement
from counterflow.planning.cost.stages import Cutting
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.task import Task
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import Recompute

TOLERANCE = 0.10
"""What a predicted ratio may differ by from the published one."""

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Micro-batches that the papers try, in samples."""


class Use(StrEnum):
    """What a published value is for."""

    FIT = "fit"
    TEST = "test"


class Quantity(StrEnum):
    """What a published value is."""

    SPEEDUP = "speed-up"
    """Throughput of the figure's subject over that of another scheme, the mean over the runs."""
    EFFICIENCY = "parallel efficiency"
    """Throughput a device of the subject in the last run over that in the first one."""
    BEST = "best configuration"


@dataclass(frozen=True, slots=True)
class Stated:
    """A configuration that a paper states, as far as it does; None leaves a part open.

    Attributes:
        depth: D.
        replicas: W; it follows from D and the devices, and is stated where the figure's point is to find it.
        samples: B, samples of a micro-batch.
        recompute: whether activations are recomputed.
    """

    depth: int | None = None
    replicas: int | None = None
    samples: int | None = None
    recompute: bool | None = None

    def __str__(self) -> str:
        parts = (("D", self.depth), ("W", self.replicas), ("B", self.samples))
        shown = [f"{name}={value}" for name, value in parts if value is not None]
        if self.recompute is not None:
            shown.append("recompute" if self.recompute else "no recompute")
        return " ".join(shown)


@dataclass(frozen=True, slots=True)
class Competitor:
    """A scheme with what the paper lets it choose.

    Attributes:
        label: what the paper calls it.
        scheme: the scheme's name.
        options: (name, values) pairs: the only values that an option takes.
        depths: D may be one of these.
        samples: B may be one of these.
        recompute: what may be computed again.
        arrangements: which devices its workers may be on.
        largest: whether it takes the largest micro-batch that fits at each depth, and then the best depth.
        stated: the configuration that the paper says is its best; None where it says nothing.
    """

    label: str
    scheme: str
    options: tuple[tuple[str, tuple[OptionValue, ...]], ...] = ()
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    samples: tuple[int, ...] = POWERS
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.STAGE)
    arrangements: tuple[Arrangement, ...] = tuple(Arrangement)
    largest: bool = False
    stated: Stated | None = None

    def constraints(self, *, at_stated: bool = False) -> Constraints:
        """What a plan of it has to be; with ``at_stated`` also what the paper says of its configuration."""
        depths, samples, recompute = self.depths, self.samples, self.recompute
        if at_stated and self.stated is not None:
            depths = depths if self.stated.depth is None else (self.stated.depth,)
            samples = samples if self.stated.samples is None else (self.stated.samples,)
            if self.stated.recompute is not None:
                recompute = tuple(r for r in recompute if (r is not Recompute.NONE) == self.stated.recompute)
        return Constraints(
            schemes=(self.scheme,),
            depths=depths,
            samples=samples,
            recompute=recompute,
            arrangements=self.arrangements,
            cuts=Cutting.EVEN,
            zero_stages=(0,),
            options=self.options,
            more_updates=True,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One point of the figure's axis.

    Attributes:
        label: the axis's text, for example ``64 nodes``.
        task: the model, its costs, the cluster and the mini-batch.
    """

    label: str
    task: Callable[[], Task]


@dataclass(frozen=True, slots=True)
class Published:
    """A value that a paper publishes.

    Attributes:
        label: the competitor it is about.
        quantity: what it is.
        value: the ratio; None for a configuration, which is the competitor's ``stated``.
        runs: labels of the runs that it is of; the mean, if there are several.
        use: whether a constant was fitted on it.
        miss: why the prediction misses it by more than ``TOLERANCE``; empty where it does not.
    """

    label: str
    quantity: Quantity
    value: float | None
    runs: tuple[str, ...]
    use: Use = Use.TEST
    miss: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a paper.

    Attributes:
        name: what ``counterflow reproduce`` knows it by.
        title: the paper, the figure.
        setting: one line: model, devices, mini-batch.
        subject: label of the competitor that is compared with the others.
        competitors: in the figure's order.
        runs: the figure's axis.
        published: what the paper says of it.
        assumptions: what is assumed where the paper says nothing, and how its words are read.

    Raises:
        ValueError: a published value names a competitor or run that is not there, or lacks its value.
    """

    name: str
    title: str
    setting: str
    subject: str
    competitors: tuple[Competitor, ...]
    runs: tuple[Run, ...]
    published: tuple[Published, ...]
    assumptions: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        labels = {each.label: each for each in self.competitors}
        runs = {run.label for run in self.runs}
        if self.subject not in labels:
            raise ValueError(f"{self.name}: no competitor {self.subject!r}")
        for value in self.published:
            if value.label not in labels or not value.runs or not runs.issuperset(value.runs):
                raise ValueError(f"{self.name}: no such competitor or run: {value}")
            known = labels[value.label].stated if value.quantity is Quantity.BEST else value.value
            if known is None:
                raise ValueError(f"{self.name}: {value.label}: nothing is published there")

    def competitor(self, label: str) -> Competitor:
        """The competitor of that label."""
        return next(each for each in self.competitors if each.label == label)
