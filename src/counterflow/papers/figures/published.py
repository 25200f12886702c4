"""A published figure as data: the schemes that compete, their restrictions, and the published values.

Invariant: a description contains statements of the paper, and assumptions if it says nothing, never a
prediction; ``reproduction.py`` makes predictions with the planner. Every known miss has its reason here, and
a published value on which a constant was fitted is marked.
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
"""Maximum relative difference between a predicted ratio and the published one."""

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Micro-batches that the papers try, in samples."""


class Use(StrEnum):
    """The use of a published value."""

    FIT = "fit"
    TEST = "test"


class Quantity(StrEnum):
    """The quantity of a published value."""

    SPEEDUP = "speed-up"
    """Throughput of the figure's subject over that of another scheme, averaged over the runs."""
    EFFICIENCY = "parallel efficiency"
    """Throughput per device of the subject in the last run over that in the first."""
    BEST = "best configuration"


@dataclass(frozen=True, slots=True)
class Stated:
    """A configuration that a paper states, as far as it does; None leaves a part open.

    Attributes:
        depth: D.
        replicas: W; it follows from D and the devices, and is stated if the figure is about finding it.
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
    """A scheme with the choices that the paper allows.

    Attributes:
        label: name in the paper.
        scheme: the scheme's name.
        options: (name, values) pairs: the only values of an option.
        depths: values of D.
        samples: values of B.
        recompute: kinds of recomputation.
        arrangements: arrangements of its workers on devices.
        largest: whether it takes the largest micro-batch that fits at each depth, and then the best depth.
        stated: its best configuration according to the paper; None if the paper does not say.
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
        """Constraints on its plan; with ``at_stated`` also those of the configuration that the paper
        states.
        """
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
        label: label of the competitor.
        quantity: the quantity.
        value: the ratio; None for a configuration, which is the competitor's ``stated``.
        runs: labels of its runs; the mean, if there are several.
        use: whether a constant was fitted on it.
        miss: why the prediction misses it by more than ``TOLERANCE``; empty if it does not.
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
        name: name for ``counterflow reproduce``.
        title: the paper, the figure.
        setting: one line: model, devices, mini-batch.
        subject: label of the competitor that is compared with the others.
        competitors: in the figure's order.
        runs: the figure's axis.
        published: published values.
        assumptions: assumptions if the paper says nothing, and interpretations of its words.

    Raises:
        ValueError: a published value names an unknown competitor or run, or lacks its value.
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
