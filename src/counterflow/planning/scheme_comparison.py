"""Every scheme with the same workers and the same model: step, bubbles, and each worker's memory.

Invariant: every row computes the same model. Costs are those of a worker's share of the model, or of the
whole model (``simulation/model_share.py``), so a scheme with two stages per worker has stages half as large.
Depth, replicas and micro-batches for a cluster are chosen by ``search``, not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from typing import Any, Literal

from counterflow.common.html import table, titled
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.modes import parse_mode
from counterflow.schedule.placement import Placement, linear, wave
from counterflow.schedule.scheme import DEPTH, MICRO_BATCHES, MOST_OPS, PERIODS, SPLIT, Scheme
from counterflow.schedule.workload import plain
from counterflow.simulation import Costs, Simulation, simulate
from counterflow.simulation.model_share import CostsOf, of_stages
from counterflow.synthesis import Synthesis, synthesize

STAGES_A_WORKER = 4
"""Default maximum of stages of one pipe that a worker holds in a comparison."""

COMPUTED = "computed"
"""Scheme name of a row whose order was computed."""

ROUNDING = 1e-9
"""Share by which a limit may be exceeded, because sums of fractions of activations round."""

_MOST_STAGES_A_WORKER = 1_024
"""More stages than any model has layers."""

_MOST_OPS_TOGETHER = 20_000_000
"""Maximum ops of all schedules of a comparison: each takes about 0.7 kB and 16 µs."""

Report = Callable[[int, int, str], None]
"""Called with the number of rows done, their total, and what follows."""


@dataclass(frozen=True)
class Compared:
    """One schedule of a comparison. Times in the unit of the costs, for ``micro_batches`` micro-batches.

    Attributes:
        simulation: the schedule, simulated with the costs of its stages.
        micro_batches: N of the comparison.
        computed: bound and method of a computed order; None: a scheme's own order.
    """

    simulation: Simulation
    micro_batches: int
    computed: Synthesis | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def name(self) -> str:
        """Name of the row: the scheme with the options that differ from their defaults."""
        if self.computed is not None:
            return _computed_name(self.schedule.placement)
        return _name(self.schedule)

    @property
    def scheme(self) -> str:
        """The scheme; ``computed`` if the order was computed."""
        return COMPUTED if self.computed is not None else self.schedule.scheme

    @property
    def synchronous(self) -> bool:
        """True if every update follows a flush, so the numbers equal those of one process."""
        return self.schedule.synchronous

    @cached_property
    def step(self) -> float:
        """Duration of N micro-batches: the makespan, or their time in the steady state.

        It is infinite if an asynchronous schedule has no steady state.
        """
        if self.synchronous:
            return self.simulation.makespan
        steady = self.simulation.steady_step
        micro_batches = self.schedule.micro_batches
        return math.inf if steady is None else steady * self.micro_batches / micro_batches

    @cached_property
    def bubble_ratio(self) -> float:
        """Idle time over the step, averaged over workers; in the steady state if asynchronous."""
        steady = None if self.synchronous else self.simulation.steady_bubble_ratio
        return self.simulation.bubble_ratio if steady is None else steady

    @property
    def proved(self) -> bool | None:
        """True if no order of these stages and limits is better; None if none was computed."""
        return None if self.computed is None else self.computed.proved

    @property
    def lower_bound(self) -> float | None:
        """Lower bound of all orders of these stages within the limits; None if none was computed."""
        return None if self.computed is None else self.computed.lower_bound

    @property
    def remark(self) -> str:
        """A remark in a few words; usually empty."""
        if not self.synchronous:
            return "asynchronous: older weights"
        if self.computed is None:
            return ""
        if self.computed.proved:
            return "proved best for these stages and limits"
        return f"at most {self.computed.gap:.1%} from the best for these stages and limits"

    @property
    def _share(self) -> float:
        return self.schedule.workers / self.schedule.stages

    @cached_property
    def weights(self) -> float:
        """Maximum weights of a worker, in shares of the model: 1 is 1/P of the model, held once."""
        return max(self.simulation.weight_copies) * self._share

    @cached_property
    def activations(self) -> float:
        """Maximum activations of a worker, in units of a worker's share for one micro-batch."""
        return max(self.simulation.peak_activations) * self._share

    @cached_property
    def peak_bytes(self) -> float | None:
        """Maximum bytes of a worker; None if no bytes were given."""
        peaks = self.simulation.peak_bytes
        return None if peaks is None else max(peaks)


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
    """

    workers: int
    micro_batches: int
    costs: Costs
    costs_of: CostsOf
    rows: tuple[Compared, ...]
    too_large: tuple[Compared, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

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
                f"{row.step:.6g}",
                f"{row.bubble_ratio:.1%}",
                f"{row.activations:.6g}",
                f"{row.weights:.6g}",
                row.remark,
            )
            for row in self.best
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


def compare(
    workers: int,
    micro_batches: int,
    costs: Costs | None = None,
    *,
    costs_of: CostsOf | Literal["worker", "model"] = CostsOf.WORKER,
    schemes: Sequence[str] | None = None,
    peak: float | None = None,
    memory_bytes: float | None = None,
    stages_a_worker: int = STAGES_A_WORKER,
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
        peak: maximum activations of a worker, in units of a worker's share for one micro-batch.
        memory_bytes: maximum bytes of a worker; needs bytes in ``costs``.
        stages_a_worker: maximum stages of one pipe that a worker holds.
        seconds: approximate total time for computed orders; 0: none are computed. Orders are computed for one
            stage per worker and for two in a V, both with split backwards, within ``peak`` and
            ``memory_bytes``, or without either within the activations of 1F1B: P.
        moves: search budget in moves instead of ``seconds``; the result is then the same on every machine.
        report: called with the progress.

    Raises:
        ConfigError: a scheme is unknown, a number is below 1, costs are given by stage, or a limit in bytes
            without bytes.

    >>> found = compare(4, 8, schemes=["gpipe", "1f1b", "zb-v"], peak=4)
    >>> [(row.name, row.step, row.activations) for row in found.best]
    [('zb-v', 25.5, 4.0), ('1F1B (dapple), split', 30.0, 4.0)]
    >>> found.too_large[0].scheme, found.too_large[0].activations
    ('gpipe', 8.0)
    """
    costs = Costs() if costs is None else costs
    costs_of = parse_mode(CostsOf, "costs_of", costs_of)
    _refuse(
        costs_of,
        costs,
        peak,
        memory_bytes,
        workers=workers,
        micro_batches=micro_batches,
        stages_a_worker=stages_a_worker,
    )
    known = registry.SCHEMES.values() if schemes is None else [registry.scheme(name) for name in schemes]
    builds = [
        (scheme, options)
        for scheme in dict.fromkeys(known)
        for options in _options(scheme, workers, micro_batches, stages_a_worker * workers)
    ]
    _refuse_too_many(builds)
    placements = _placements(workers) if seconds or moves else ()
    report_row = _row_counter(report, len(builds) + len(placements))
    model = costs, costs_of, micro_batches
    room = workers if peak is None and memory_bytes is None else peak
    limits = {"memory_bytes": memory_bytes, "seconds": seconds / max(len(placements), 1), "moves": moves}
    rows: list[Compared] = []
    left_out: dict[str, str] = {}
    for name, outcome in chain(
        _of_schemes(builds, workers, model, report_row),
        _of_placements(placements, room, limits, model, report_row),
    ):
        if isinstance(outcome, Compared):
            rows.append(outcome)
        else:
            left_out.setdefault(name, str(outcome))
    for row in rows:
        left_out.pop(row.scheme, None)
    fits = [row for row in rows if _fits(row, peak, memory_bytes)]
    return Comparison(
        workers,
        micro_batches,
        costs,
        costs_of,
        tuple(sorted(fits, key=lambda row: (row.step, row.activations, row.weights))),
        tuple(sorted((row for row in rows if row not in fits), key=lambda row: (row.activations, row.step))),
        tuple(left_out.items()),
    )


_CostedModel = tuple[Costs, CostsOf, int]
"""Costs, their unit, and micro-batches."""

_Rows = Iterator[tuple[str, Compared | ConfigError]]
"""Names with the compared schedule, or with the reason why it does not exist."""


def _of_schemes(
    builds: Sequence[tuple[Scheme, dict[str, OptionValue]]],
    workers: int,
    model: _CostedModel,
    report_row: Callable[[str], None],
) -> _Rows:
    costs, costs_of, micro_batches = model
    for scheme, options in builds:
        report_row(scheme.name)
        try:
            scheme.refuse_too_large(options)
            schedule = scheme.build(**options)
        except ConfigError as error:
            yield scheme.name, error
            continue
        if schedule.workers == workers:
            stage_costs = of_stages(costs, schedule.placement, costs_of)
            yield scheme.name, Compared(simulate(schedule, stage_costs), micro_batches)


def _of_placements(
    placements: Sequence[Placement],
    room: float | None,
    limits: dict[str, Any],
    model: _CostedModel,
    report_row: Callable[[str], None],
) -> _Rows:
    costs, costs_of, micro_batches = model
    for placement in placements:
        report_row("computed orders")
        try:
            _refuse_too_large(placement, micro_batches)
            synthesis = synthesize(
                plain(placement, micro_batches, split=True),
                of_stages(costs, placement, costs_of),
                peak=None if room is None else room * placement.stages / placement.workers,
                **limits,
            )
        except ConfigError as error:  # not even one micro-batch is within the limits
            yield _computed_name(placement), error
            continue
        yield COMPUTED, Compared(synthesis.simulation, micro_batches, synthesis)


def _refuse(
    costs_of: CostsOf, costs: Costs, peak: float | None, memory_bytes: float | None, **counts: int
) -> None:
    if costs_of is CostsOf.STAGE:
        raise ConfigError("costs_of='stage': stages of different schemes differ in size; use worker or model")
    for name, value in counts.items():
        most = _MOST_STAGES_A_WORKER if name == "stages_a_worker" else MOST_OPS
        if not 1 <= value <= most:
            raise ConfigError(f"{name}={value}: must be 1 or more, and at most {most:,}")
    if peak is not None and not peak > 0:
        raise ConfigError(f"peak={peak:g}: must be above 0")
    if memory_bytes is not None and costs.memory is None:
        raise ConfigError("a limit in bytes needs bytes of weights and activations; give these costs too")


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


_SIZES = frozenset({*DEPTH, MICRO_BATCHES.name, PERIODS.name})


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


def _name(schedule: Schedule) -> str:
    scheme = registry.scheme(schedule.scheme)
    shown = [
        option.describe(value)
        for name, value in schedule.options
        if name not in _SIZES and (option := scheme.option(name)) is not None and value != option.usual
    ]
    return ", ".join([scheme.title, *filter(None, shown)])


def _computed_name(placement: Placement) -> str:
    turns = placement.stages > placement.workers
    return f"computed, {'two stages per worker in a V' if turns else 'one stage per worker'}"


def _fits(row: Compared, peak: float | None, memory_bytes: float | None) -> bool:
    if peak is not None and row.activations > peak * (1 + ROUNDING):
        return False
    return memory_bytes is None or (row.peak_bytes or 0.0) <= memory_bytes
