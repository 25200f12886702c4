"""Every scheme with the same workers and the same model: step, bubbles, and each worker's memory.

Invariant: every row computes the same model. Costs are those of a worker's share of the model, of the whole
model (``simulation/model_share.py``) or of a profile, so a scheme with two stages per worker has stages half
as large. Depth, replicas and micro-batches for a cluster are chosen by ``search``, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal, NamedTuple

from counterflow.common.html import table, titled
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import parse_mode
from counterflow.schedule.placement import Placement, linear, wave
from counterflow.schedule.scheme import MICRO_BATCHES, MOST_OPS, PERIODS, SPLIT, Scheme
from counterflow.simulation import Costs
from counterflow.simulation.model_share import CostsOf, of_stages
from counterflow.synthesis import synthesize

from .compared import COMPUTED, Compared, computed_name
from .comparison_costs import ComparisonCosts, NumericCosts, ProfiledCosts
from .inputs.cluster import Cluster
from .inputs.model import Model
from .inputs.profile import Profile
from .predict import Predictor
from .prediction import distance_text

STAGES_A_WORKER = 4
"""Default maximum of stages of one pipe that a worker holds in a comparison."""

BASELINE = "1f1b"
"""Scheme whose plain form is listed beside the fastest schedules."""

ROUNDING = 1e-9
"""Share by which a limit may be exceeded, because sums of fractions of activations round."""

_MOST_STAGES_A_WORKER = 1_024
"""More stages than any model has layers."""

_MOST_OPS_TOGETHER = 20_000_000
"""Maximum ops of all schedules of a comparison: each takes about 0.7 kB and 16 µs."""

Report = Callable[[int, int, str], None]
"""Called with the number of rows done, their total, and what follows."""


class Omission(NamedTuple):
    """A scheme without a schedule of this size, and why."""

    scheme: str
    reason: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results of a comparison, fastest first.

    Attributes:
        workers: P.
        micro_batches: N.
        costs: costs as they were given.
        costs_of: unit that the costs were given for.
        rows: schedules within the limits, by ``step``.
        too_large: schedules beyond the limits, by their needs.
        left_out: schemes that have no schedule of this size, with the reason.
        profiled: model, cluster and samples of a micro-batch, in words; empty if costs are given.
    """

    workers: int
    micro_batches: int
    costs: Costs
    costs_of: CostsOf
    rows: tuple[Compared, ...]
    too_large: tuple[Compared, ...] = ()
    left_out: tuple[Omission, ...] = ()
    profiled: str = ""

    def __repr__(self) -> str:
        """One line."""
        best = f", best {self.rows[0].name}: {self.rows[0].step:.6g}" if self.rows else ""
        counted = f"{len(self.rows)} of {len(self.rows) + len(self.too_large)} schedules within the limits"
        size = f"{plural(self.workers, 'worker')}, {plural(self.micro_batches, 'micro-batch')}"
        return f"Comparison({size}, {counted}{best})"

    def _repr_html_(self) -> str:
        columns = ("scheme", "step", "bubbles", "activations", "weights", "")
        rows = [
            (
                row.name,
                f"{row.step:.6g}{distance_text(row.step, row.step_range, 1.0)}",
                f"{row.bubble_ratio:.1%}",
                f"{row.activations:.6g}",
                f"{row.weights:.6g}",
                row.remark,
            )
            for row in self.listed
        ]
        return titled(
            f"{plural(self.workers, 'worker')}, {plural(self.micro_batches, 'micro-batch')}",
            table(columns, rows),
        )

    @property
    def best(self) -> tuple[Compared, ...]:
        """The fastest row of each scheme, fastest first."""
        fastest: dict[str, Compared] = {}
        for row in self.rows:
            fastest.setdefault(row.name if row.computed else row.scheme, row)
        return tuple(fastest.values())

    @property
    def baseline(self) -> Compared | None:
        """Plain 1F1B, also beyond the limits; None if it was not compared."""
        name = registry.scheme(BASELINE).title
        return next((row for row in (*self.rows, *self.too_large) if row.name == name), None)

    @property
    def listed(self) -> tuple[Compared, ...]:
        """The fastest row of each scheme within the limits, and plain 1F1B; fastest first."""
        rows, baseline = self.best, self.baseline
        fits = any(row is baseline for row in self.rows)
        if baseline is None or not fits or any(row is baseline for row in rows):
            return rows
        return tuple(sorted((*rows, baseline), key=_speed))


def compare(
    workers: int,
    micro_batches: int,
    costs: Costs | None = None,
    *,
    costs_of: CostsOf | Literal["worker", "model"] = CostsOf.WORKER,
    schemes: Sequence[str] | None = None,
    synchronous: bool = False,
    peak: float | None = None,
    copies: float | None = None,
    memory_bytes: float | None = None,
    stages_a_worker: int = STAGES_A_WORKER,
    model: Model | None = None,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    samples: int = 1,
    seconds: float = 0.0,
    moves: int | None = None,
    report: Report | None = None,
) -> Comparison:
    """Simulate every scheme with every option worth trying, for the same model.

    Args:
        workers: P.
        micro_batches: N, of one mini-batch.
        costs: default: a forward takes 1, a backward 2, and messages nothing.
        costs_of: unit of ``costs``: a ``worker``'s share, 1/P of the model, or the ``model``.
        schemes: only these; None: all.
        synchronous: whether to omit asynchronous schemes, which compute with older weights.
        peak: maximum activations of a worker, in units of a worker's share for one micro-batch.
        copies: maximum copies of a worker's share of the weights, versions included.
        memory_bytes: maximum bytes of a worker, of weights, activations and all else together; needs bytes in
            ``costs``, or a profile, with which a device's memory is the default.
        stages_a_worker: maximum stages of one pipe that a worker holds.
        model: what is trained, in place of ``costs``, together with profile and cluster.
        profile: costs of the model's layers on a device.
        cluster: devices and links.
        samples: B, samples of a micro-batch; used with a profile.
        seconds: approximate total time for computed orders; 0: none are computed. Orders are computed for one
            stage per worker and for two in a V, both with split backwards, within ``peak`` and
            ``memory_bytes``, or without either within the activations of 1F1B: P.
        moves: search budget in moves instead of ``seconds``; the result is then the same on every machine.
        report: called with the progress.

    Raises:
        ConfigError: a scheme is unknown, a number is below 1, costs are given by stage, a limit in bytes
            without bytes, or only a part of model, profile and cluster.

    >>> found = compare(4, 8, schemes=["gpipe", "1f1b", "zb-v"], peak=4)
    >>> [(row.name, row.step, row.activations) for row in found.best]
    [('zb-v', 25.5, 4.0), ('1F1B (dapple), split', 30.0, 4.0)]
    >>> [(row.name, row.step) for row in found.listed][-1]
    ('1F1B (dapple)', 33.0)
    >>> found.too_large[0].scheme, found.too_large[0].activations
    ('gpipe', 8.0)
    """
    costs_of = parse_mode(CostsOf, "costs_of", costs_of)
    _refuse(
        peak,
        copies,
        workers=workers,
        micro_batches=micro_batches,
        stages_a_worker=stages_a_worker,
    )
    inputs = (model, profile, cluster)
    priced = _costs(costs, costs_of, inputs, samples, micro_batches)
    if memory_bytes is not None and priced.costs.memory is None and priced.usable_bytes() is None:
        raise ConfigError("a limit in bytes needs bytes of weights and activations; give these costs too")
    memory_bytes = priced.usable_bytes() if memory_bytes is None else memory_bytes
    known = registry.SCHEMES.values() if schemes is None else [registry.scheme(name) for name in schemes]
    builds = [
        (scheme, options)
        for scheme in dict.fromkeys(known)
        if scheme.synchronous or not synchronous
        for options in _options(scheme, workers, micro_batches, stages_a_worker * workers)
    ]
    _refuse_too_many(builds)
    placements = _placements(workers) if seconds or moves else ()
    report_row = _row_counter(report, len(builds) + len(placements))
    limits = _Limits(peak, copies, memory_bytes)
    search = {"seconds": seconds / max(len(placements), 1), "moves": moves}
    rows: list[Compared] = []
    left_out: dict[str, str] = {}
    for name, outcome in chain(
        _of_schemes(builds, workers, priced, report_row),
        _of_placements(placements, limits, search, priced, report_row),
    ):
        if isinstance(outcome, Compared):
            rows.append(outcome)
        else:
            left_out.setdefault(name, str(outcome))
    for row in rows:
        left_out.pop(row.scheme, None)
    fits = [row for row in rows if limits.fits(row)]
    return Comparison(
        workers,
        micro_batches,
        priced.costs,
        costs_of,
        tuple(sorted(fits, key=_speed)),
        tuple(sorted((row for row in rows if not limits.fits(row)), key=_need)),
        tuple(Omission(*item) for item in left_out.items()),
        priced.about,
    )


def _speed(row: Compared) -> tuple[float, ...]:
    return _rounded(row.step), _rounded(row.activations), _rounded(row.weights)


def _need(row: Compared) -> tuple[float, ...]:
    return _rounded(row.activations), _rounded(row.step)


def _rounded(amount: float) -> float:
    # Equal sums of the same seconds in another order differ in their last digits.
    return float(f"{amount:.9e}")


def _costs(
    costs: Costs | None,
    costs_of: CostsOf,
    inputs: tuple[Model | None, Profile | None, Cluster | None],
    samples: int,
    micro_batches: int,
) -> ComparisonCosts:
    if costs_of is CostsOf.STAGE:
        raise ConfigError("costs_of='stage': stages of different schemes differ in size; use worker or model")
    model, profile, cluster = inputs
    if model is None and profile is None and cluster is None:
        costs = Costs() if costs is None else costs
        of_stages(costs, linear(1), costs_of)  # refuses costs of stages
        return NumericCosts(costs, costs_of, micro_batches)
    if model is None or profile is None or cluster is None:
        raise ConfigError("measured costs need a model, a profile and a cluster; give all three")
    if costs is not None:
        raise ConfigError("the profile has all costs; leave out the others")
    return ProfiledCosts(Predictor(model, profile, cluster), samples, micro_batches)


@dataclass(frozen=True, slots=True)
class _Limits:
    peak: float | None
    copies: float | None
    memory_bytes: float | None

    def fits(self, row: Compared) -> bool:
        amounts = (row.activations, self.peak), (row.weights, self.copies)
        if any(most is not None and amount > most * (1 + ROUNDING) for amount, most in amounts):
            return False
        return self.memory_bytes is None or (row.peak_bytes or 0.0) <= self.memory_bytes * (1 + ROUNDING)

    def room(self, workers: int) -> float | None:
        """Maximum activations of a computed order, in those of a worker's share."""
        return workers if self.peak is None and self.memory_bytes is None else self.peak


_Rows = Iterator[tuple[str, Compared | ConfigError]]
"""Names with the compared schedule, or with the reason why it does not exist."""


def _of_schemes(
    builds: Sequence[tuple[Scheme, dict[str, OptionValue]]],
    workers: int,
    costs: ComparisonCosts,
    report_row: Callable[[str], None],
) -> _Rows:
    for scheme, options in builds:
        report_row(scheme.title)
        try:
            scheme.refuse_too_large(options)
            schedule = scheme.build(**options)
            if schedule.workers == workers:
                yield scheme.name, costs.compare(options, schedule)
        except ConfigError as error:
            yield scheme.name, error


def _of_placements(
    placements: Sequence[Placement],
    limits: _Limits,
    search: dict[str, Any],
    costs: ComparisonCosts,
    report_row: Callable[[str], None],
) -> _Rows:
    for placement in placements:
        report_row("computed orders")
        room = limits.room(placement.workers)
        try:
            _refuse_too_large(placement, costs.micro_batches)
            problem = costs.problem(placement, limits.memory_bytes)
            synthesis = synthesize(
                problem.workload,
                problem.costs,
                peak=None if room is None else room * placement.stages / placement.workers,
                memory_bytes=problem.memory_bytes,
                **search,
            )
            yield COMPUTED, costs.compare_order(problem, synthesis)
        except ConfigError as error:  # not even one micro-batch is within the limits
            yield computed_name(placement), error


def _refuse(peak: float | None, copies: float | None, **counts: int) -> None:
    for name, value in counts.items():
        most = _MOST_STAGES_A_WORKER if name == "stages_a_worker" else MOST_OPS
        if not 1 <= value <= most:
            raise ConfigError(f"{name}={value}: must be 1 or more, and at most {most:,}")
    for name, limit in (("peak", peak), ("copies", copies)):
        if limit is not None and not limit > 0:
            raise ConfigError(f"{name}={limit:g}: must be above 0")


def _refuse_too_many(builds: Sequence[tuple[Scheme, Mapping[str, OptionValue]]]) -> None:
    counts = [scheme.least_ops(options) for scheme, options in builds]
    # A single schedule that is too large is omitted.
    ops = sum(count for count in counts if count <= MOST_OPS)
    if ops > _MOST_OPS_TOGETHER:
        raise ConfigError(
            f"{len(builds):,} schedules of this size have at least {ops:,} ops, and at most "
            f"{_MOST_OPS_TOGETHER:,} are compared; choose smaller numbers, or only some schemes"
        )


def _refuse_too_large(placement: Placement, micro_batches: int) -> None:
    ops = 3 * placement.stages * micro_batches
    if ops > MOST_OPS:
        raise ConfigError(f"{ops:,} ops, and at most {MOST_OPS:,} are ordered")


def _row_counter(report: Report | None, total: int) -> Callable[[str], None]:
    done = count()

    def report_row(what: str) -> None:
        number = next(done)
        if report is not None:
            report(number, total, what)

    return report_row


def _placements(workers: int) -> tuple[Placement, ...]:
    return (linear(workers), wave(workers, 1)) if workers > 1 else ()


def _options(
    scheme: Scheme, workers: int, micro_batches: int, layers: int
) -> Iterator[dict[str, OptionValue]]:
    base: dict[str, OptionValue] = {scheme.depth: workers}
    if not scheme.updates_each_micro_batch:
        base[MICRO_BATCHES.name] = micro_batches
    if not scheme.synchronous:
        base[PERIODS.name] = 2 * workers + 4  # until the steady state is reached
    for more in scheme.planner(workers, micro_batches, layers):
        yield base | dict(more)
        if scheme.option(SPLIT.name) is not None and SPLIT.name not in more:
            yield base | dict(more) | {SPLIT.name: True}
