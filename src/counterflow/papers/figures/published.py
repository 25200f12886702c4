"""A published figure as data: the schemes that compete, their restrictions, and the published values.

Invariant: a description contains statements of the paper, and assumptions if it says nothing, never a
prediction; ``reproduction.py`` makes predictions with the planner. Every known miss has its cause here, with
the change of the description that shows it, and a published value on which a constant was fitted is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from counterflow.planning.cost.device_placement import Arrangement
from counterflow.planning.cost.stages import Cutting
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.task import PlanningTask
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import Recompute, Sync

TOLERANCE = 0.10
"""Maximum relative difference between a predicted value and the published one."""

_OF_DEPTH: Mapping[OptionValue, Callable[[int], int]] = {
    "D": lambda depth: depth,
    "D/2": lambda depth: depth // 2,
}

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Micro-batches that the papers try, in samples."""


class PublishedUse(StrEnum):
    """The use of a published value."""

    FIT = "fit"
    TEST = "test"


class Quantity(StrEnum):
    """The quantity of a published value."""

    SPEEDUP = "speed-up"
    """Throughput of ``label`` over that of ``over``, averaged over the runs."""
    EFFICIENCY = "parallel efficiency"
    """Throughput per device of ``label`` in the last run over that in the first; compared by what is lost."""
    SCALING = "strong scaling"
    """Throughput of ``label`` in the last run over that in the first."""
    SAVING = "memory saved"
    """Share of the peak memory of ``over``, averaged over workers, that ``label`` does not need; compared by
    what is left.
    """
    VARIANCE = "variance of memory"
    """Variance over workers of the peak memory of ``label``, in GB², averaged over the runs."""
    BATCH = "largest batch"
    """Largest micro-batch of ``label`` that fits, over that of ``over``."""
    BEST = "best configuration"
    """Whether the planner chooses what the paper states of ``label``, in every run."""
    FITS = "fits"
    """Whether ``label`` fits into the devices, in every run: 1 or 0."""
    UNFIT = "runs out of memory"
    """Number of the runs in which ``label`` does not fit into the devices."""
    BELOW = "runs with less memory"
    """Number of the runs in which the largest peak of ``label`` is below that of ``over``."""
    FASTER = "order of throughput"
    """Labels from the highest throughput to the lowest, in every run."""
    LARGER = "order of memory"
    """Labels from the largest peak memory to the smallest, in every run."""


RATIOS = (Quantity.SPEEDUP, Quantity.SCALING, Quantity.SAVING, Quantity.VARIANCE, Quantity.BATCH)
"""Quantities that are compared by their relative difference."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A configuration that a paper states, as far as it does; None leaves a part open.

    Attributes:
        depth: D.
        replicas: W; it follows from D and the devices, and is stated if the figure is about finding it.
        samples: B, samples of a micro-batch.
        recompute: whether activations are recomputed.
        options: (name, value) pairs of the scheme's options.
    """

    depth: int | None = None
    replicas: int | None = None
    samples: int | None = None
    recompute: bool | None = None
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __str__(self) -> str:
        parts = (("D", self.depth), ("W", self.replicas), ("B", self.samples), *self.options)
        shown = [f"{name}={value}" for name, value in parts if value is not None]
        if self.recompute is not None:
            shown.append("recompute" if self.recompute else "no recompute")
        return " ".join(shown)

    def with_statement(self, more: Stated) -> Stated:
        """The configuration with the parts that ``more`` states in their place.

        >>> str(Stated(4, samples=4).with_statement(Stated(samples=8)))
        'D=4 B=8'
        """
        parts = {part.name: getattr(more, part.name) for part in fields(more)}
        return replace(self, **{name: value for name, value in parts.items() if value not in (None, ())})


@dataclass(frozen=True, slots=True)
class Competitor:
    """A scheme with the choices that the paper allows.

    Attributes:
        label: name in the paper.
        scheme: the scheme's name.
        options: (name, values) pairs: the only values of an option; ``D`` and ``D/2`` are those of the depth.
        depths: values of D.
        samples: values of B.
        recompute: kinds of recomputation.
        sync: modes of gradient sums.
        arrangements: arrangements of its workers on devices.
        cuts: how layers are cut.
        largest: whether it takes the largest micro-batch that fits at each depth, and then the best depth.
        stated: its configuration according to the paper; None if the paper does not say.
        stated_by_run: (run, configuration) pairs: what the paper states of one run in addition.
        change: changes of the task for this scheme alone (``figure_changes.py``), which show causes of
            misses.
    """

    label: str
    scheme: str
    options: tuple[tuple[str, tuple[OptionValue, ...]], ...] = ()
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    samples: tuple[int, ...] = POWERS
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.STAGE)
    sync: tuple[Sync, ...] = tuple(Sync)
    arrangements: tuple[Arrangement, ...] = tuple(Arrangement)
    cuts: Cutting = Cutting.EVEN
    largest: bool = False
    stated: Stated | None = None
    stated_by_run: tuple[tuple[str, Stated], ...] = ()
    change: Mapping[str, Any] = field(default_factory=dict)

    def statement(self, run: str) -> Stated | None:
        """The configuration that the paper states for a run."""
        run_statement = dict(self.stated_by_run).get(run)
        if run_statement is None or self.stated is None:
            return run_statement or self.stated
        return self.stated.with_statement(run_statement)

    @property
    def by_depth(self) -> bool:
        """True if the values of an option depend on the depth."""
        return any(value in _OF_DEPTH for _, values in self.options for value in values)

    def at_depth(self, depth: int) -> Competitor:
        """The competitor with one depth, and its options' values at it.

        >>> mixpipe = Competitor("MixPipe", "mixpipe", (("injected", (2, "D/2", "max")),))
        >>> mixpipe.at_depth(16).options
        (('injected', (2, 8, 'max')),)
        """
        options = tuple(
            (
                name,
                tuple(
                    dict.fromkeys(
                        _OF_DEPTH[value](depth) if value in _OF_DEPTH else value for value in values
                    )
                ),
            )
            for name, values in self.options
        )
        return replace(self, depths=(depth,), options=options)

    def constraints(self, stated: Stated | None = None) -> Constraints:
        """Constraints on its plan, with those of a stated configuration."""
        depths, samples, recompute, options = self.depths, self.samples, self.recompute, dict(self.options)
        if stated is not None:
            depths = depths if stated.depth is None else (stated.depth,)
            samples = samples if stated.samples is None else (stated.samples,)
            options |= {name: (value,) for name, value in stated.options}
            if stated.recompute is not None:
                recompute = tuple(r for r in recompute if (r is not Recompute.NONE) == stated.recompute)
        return Constraints(
            schemes=(self.scheme,),
            depths=depths,
            samples=samples,
            recompute=recompute,
            sync=self.sync,
            arrangements=self.arrangements,
            cuts=self.cuts,
            zero_stages=(0,),
            options=tuple(options.items()),
            more_updates=True,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One point of the figure's axis.

    Attributes:
        label: the axis's text, for example ``64 nodes``.
        task: the model, its costs, the cluster and the mini-batch.
        micro_batches: N; the mini-batch follows from it, and is not the task's. None: the task's.
        depth: D of all competitors; None: each its own.
        samples: B of all competitors; None: each its own.
    """

    label: str
    task: Callable[[], PlanningTask]
    micro_batches: int | None = None
    depth: int | None = None
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class MissCause:
    """Reason for a prediction that misses a published value.

    Attributes:
        text: the cause.
        change: what was changed in the description to show it.
        figure: the figure with that change; None: it cannot be varied.
    """

    text: str
    change: str = ""
    figure: Callable[[], Figure] | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """A value that a paper publishes.

    Attributes:
        label: label of the competitor whose value it is.
        quantity: the quantity.
        runs: labels of its runs; the mean, if there are several.
        value: the number; 1 or 0 for ``FITS``; None for an order and a configuration.
        over: label of the competitor that it is compared with.
        order: the labels of an order, the highest value first.
        use: whether a constant was fitted on it.
        source: the paper's section.
        cause: why the prediction misses it; None if it does not.
        needs: what the paper does not say, but the prediction rests on; empty: nothing.
    """

    label: str
    quantity: Quantity
    runs: tuple[str, ...]
    value: float | None = None
    over: str = ""
    order: tuple[str, ...] = ()
    use: PublishedUse = PublishedUse.TEST
    source: str = ""
    cause: MissCause | None = None
    needs: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the competitors that are compared."""
        return self.order or tuple(filter(None, (self.label, self.over)))


@dataclass(frozen=True, slots=True)
class Missing:
    """A published value that is not predicted, because something is unknown.

    Attributes:
        what: the quantity.
        value: what the paper publishes.
        needs: what is unknown.
        source: the paper's section.
    """

    what: str
    value: str
    needs: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a paper.

    Attributes:
        name: name for ``counterflow reproduce``.
        title: the paper, the figure.
        setting: one line: model, devices, mini-batch.
        competitors: in the figure's order.
        runs: the figure's axis.
        published: published values.
        statements: what the paper says of the setting, each with its section.
        assumptions: assumptions if the paper says nothing, and interpretations of its words.
        missing: published values that are not predicted.
        unlimited: whether devices have unlimited memory in the prediction, because memory itself is compared.

    Raises:
        ValueError: a published value names an unknown competitor or run, or lacks its value.
    """

    name: str
    title: str
    setting: str
    competitors: tuple[Competitor, ...]
    runs: tuple[Run, ...]
    published: tuple[Published, ...]
    statements: tuple[str, ...] = field(default=())
    assumptions: tuple[str, ...] = field(default=())
    missing: tuple[Missing, ...] = field(default=())
    unlimited: bool = False

    def __post_init__(self) -> None:
        labels = {competitor.label: competitor for competitor in self.competitors}
        runs = {run.label for run in self.runs}
        for value in self.published:
            if not labels.keys() >= {*value.labels} or not value.runs or not runs.issuperset(value.runs):
                raise ValueError(f"{self.name}: no such competitor or run: {value}")
            if value.quantity is Quantity.BEST:
                known = all(labels[value.label].statement(run) is not None for run in value.runs)
            else:
                known = value.value is not None or len(value.order) > 1
            if not known:
                raise ValueError(f"{self.name}: {value.label}: nothing is published there")

    def competitor(self, label: str) -> Competitor:
        """The competitor of that label."""
        return next(competitor for competitor in self.competitors if competitor.label == label)

    def run(self, label: str) -> Run:
        """The run of that label."""
        return next(run for run in self.runs if run.label == label)
