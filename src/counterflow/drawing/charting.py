"""From a simulation to a ``Chart``, by a pure function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

from counterflow.schedule import registry
from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement
from counterflow.simulation import Costs, MemoryUse, MessageSpan, Piece, Simulation, Span, SyncSpan
from counterflow.simulation.timed_schedule import TimedSchedule

from .chart import _KINDS, Arrow, Box, BoxKind, BoxLane, Bubble, Chart, Memory, percent
from .palette import HUES
from .time_units import AmountUnit, time_unit


def chart_of(
    simulation: Simulation,
    *,
    memory: bool = False,
    messages: bool = False,
) -> Chart:
    """The chart of a simulated schedule.

    Args:
        simulation: result of ``simulate``.
        messages: whether to add every message between workers.
        memory: whether to add each worker's memory over time: bytes if the costs had byte costs, otherwise
            stashed forwards in (stage × micro-batch) units.

    >>> from counterflow.schedule.schemes import chimera
    >>> from counterflow.simulation import simulate
    >>> chart = chart_of(simulate(chimera(stages=4, micro_batches=4)))
    >>> chart.title
    'chimera  D=4, N=4, direct — makespan 16 F, bubble ratio 25 %, peak 4 activations'
    >>> [lane.name for lane in chart.lanes], len(chart.boxes)
    (['down pipe', 'up pipe'], 32)
    """
    schedule = simulation.schedule
    in_forwards = simulation.costs.in_forwards
    unit, uses = _memory(simulation)
    peak = Memory(unit, uses).peak
    lanes, lane_of = _lanes(schedule)
    boxes = list(_op_boxes(simulation, lane_of))
    boxes += [_sync_box(schedule, span) for span in simulation.syncs]
    return Chart(
        heading=_heading(schedule, simulation.costs),
        summary=_summary(simulation, unit.text(peak), in_forwards),
        workers=schedule.workers,
        makespan=simulation.makespan,
        lanes=lanes,
        boxes=tuple(boxes),
        memory=Memory(unit, uses) if memory else None,
        steady=_steady(simulation),
        messages=tuple(map(_arrow, simulation.messages)) if messages else (),
        bubbles=tuple(Bubble(gap.worker, gap.start, gap.end, gap.cause.value) for gap in simulation.gaps),
        in_forwards=in_forwards,
    )


def order_chart(schedule: Schedule, costs: Costs) -> Chart:
    """The chart of orders that deadlock: each worker's ops in order, not to scale, waiting for nothing.

    Args:
        schedule: any schedule of legal stages and workers, however wrong.
        costs: costs of ops; messages and syncs are omitted.
    """
    ops, spans = costs.of_ops(schedule.stages), []
    for worker, order in enumerate(schedule.orders):
        at = 0.0
        for op in order:
            piece = Piece.of(op, worker, schedule.workload)
            spans.append(Span(worker, op, at, at := at + ops.seconds(piece)))
    lanes, lane_of = _lanes(schedule)
    return Chart(
        heading=_heading(schedule, costs),
        summary="deadlock: not simulated; each worker's ops in order, not to scale",
        workers=schedule.workers,
        makespan=max((span.end for span in spans), default=0.0),
        lanes=lanes,
        boxes=tuple(Box(s.worker, s.start, s.end, *_name(schedule, lane_of, s.op)) for s in spans),
        in_forwards=costs.in_forwards,
        playable=False,
    )


def _arrow(span: MessageSpan) -> Arrow:
    what = f"message from {span.maker} to {span.taker}"
    return Arrow(span.sender, span.receiver, span.start, span.end, what)


def _memory(simulation: Simulation) -> tuple[AmountUnit, tuple[MemoryUse, ...]]:
    if simulation.memory is not None:
        return AmountUnit.BYTES, simulation.memory
    return AmountUnit.ACTIVATIONS, simulation.activations_over_time


_Named = tuple[BoxKind, str, int, int, int, tuple[int, ...], str, str, tuple[int, ...]]
"""The fields of an op's box that no cost changes: those after its times in ``Box``."""

_named_boxes: WeakKeyDictionary[TimedSchedule, list[_Named]] = WeakKeyDictionary()
"""Cache by the simulator's model of a schedule, so names are computed once for all costs."""


def _op_boxes(simulation: Simulation, lane_of: dict[tuple[int, int], int]) -> Iterator[Box]:
    model, schedule = simulation.model, simulation.schedule
    named = _named_boxes.get(model)
    if named is None:
        ops = zip(model.ops, simulation.needs, strict=True)
        named = _named_boxes[model] = [_name(schedule, lane_of, op, needs) for op, needs in ops]
    start, end = simulation.start.tolist(), simulation.end.tolist()
    times = zip(model.worker.tolist(), start, end, named, strict=True)
    return (Box(worker, begins, ends, *name) for worker, begins, ends, name in times)


def _name(
    schedule: Schedule, lane_of: dict[tuple[int, int], int], op: Op, needs: tuple[int, ...] = ()
) -> _Named:
    label = ",".join(map(str, op.micro_batches))
    if schedule.workload.slices > 1:
        label += f".{op.part}"
    elif op.parts > 1:
        label += chr(ord("a") + op.part) if op.parts <= 26 else f".{op.part}"
    lane, detail = lane_of[op.pipe, op.stage], _detail(schedule, op)
    return _KINDS[op.kind], label, op.stage, lane, op.pipe, op.micro_batches, detail, str(op), needs


def _detail(schedule: Schedule, op: Op) -> str:
    parts = []
    if op.parts > 1:
        share = "slice" if schedule.workload.slices > 1 else "half" if op.parts == 2 else "part"
        parts.append(f"{share} {op.part + 1} of {op.parts}")
    if not schedule.synchronous:
        parts.append(f"period {schedule.period_of(op)}, weights of version {op.version}")
    return "; ".join(parts)


def _sync_box(schedule: Schedule, span: SyncSpan) -> Box:
    detail = "" if schedule.synchronous else f"period {span.period}"
    return Box(span.worker, span.start, span.end, BoxKind.SYNC, str(span.stage), span.stage, detail=detail)


def _steady(simulation: Simulation) -> tuple[tuple[float, float], ...] | None:
    schedule = simulation.schedule
    if schedule.steady is None:
        return None
    firsts = accumulate((len(order) for order in schedule.orders), initial=0)
    return tuple(
        (float(simulation.start[first + begin]), float(simulation.end[first + stop - 1]))
        for first, (begin, stop) in zip(firsts, schedule.steady, strict=False)
    )


# --- lanes ---------------------------------------------------------------------------------------


def _lanes(schedule: Schedule) -> tuple[tuple[BoxLane, ...], dict[tuple[int, int], int]]:
    placement = schedule.placement
    placed_stages = [(pipe, stage) for pipe in range(placement.pipes) for stage in range(placement.stages)]
    if placement.pipes > 1:
        return _pipe_lanes(placement), {(pipe, stage): pipe for pipe, stage in placed_stages}
    lane_of: dict[tuple[int, int], int] = {}
    seen: dict[int, int] = {}
    for stage, worker in enumerate(placement.pipes_stages[0]):
        lane_of[0, stage] = seen[worker] = seen.get(worker, -1) + 1
    count = max(lane_of.values()) + 1
    known = registry.find(schedule.scheme)
    turns = any(a == b for a, b in pairwise(placement.pipes_stages[0])) and placement.workers > 1
    word = known.chunk if known else "leg" if turns else "chunk"
    names = [f"{word} {i}" for i in range(count)] if count > 1 else [""]
    return tuple(BoxLane(name, i % len(HUES)) for i, name in enumerate(names)), lane_of


def _pipe_lanes(placement: Placement) -> tuple[BoxLane, ...]:
    # Down pipes have cool hues, up pipes warm ones; pipes with no direction take hues in turn.
    words = [_direction(stages) for stages in placement.pipes_stages]
    if not {"down", "up"}.issuperset(words):
        return tuple(BoxLane(f"pipe {i}", i % len(HUES)) for i in range(len(words)))
    lanes = []
    for pipe, word in enumerate(words):
        index = words[:pipe].count(word)
        number = f" {index}" if words.count(word) > 1 else ""
        hue = (2 * index + (word == "up")) % len(HUES)
        lanes.append(BoxLane(f"{word} pipe{number}", hue))
    return tuple(lanes)


def _direction(holders: Sequence[int]) -> str:
    # The few steps of a pipe that wrap around the workers do not count.
    downs = sum(b > a for a, b in pairwise(holders))
    ups = sum(b < a for a, b in pairwise(holders))
    return "down" if downs > ups else "up" if ups > downs else "other"


# --- titles --------------------------------------------------------------------------------------


def _heading(schedule: Schedule, costs: Costs) -> str:
    words = [_option(schedule.scheme, *option) for option in schedule.options]
    if costs.replicas > 1:
        words.append(f"W={costs.replicas}")
    if costs.recompute is not Recompute.NONE:
        words.append(f"recompute {costs.recompute}")
    return f"{registry.title(schedule.scheme)}  {', '.join(filter(None, words))}"


def _option(scheme: str, name: str, value: OptionValue) -> str:
    known = registry.option(scheme, name)
    return known.describe(value) if known else f"{name}={value}"


def _summary(simulation: Simulation, peak: str, in_forwards: bool) -> str:
    unit = time_unit(simulation.makespan, in_forwards=in_forwards)
    bubbles = f"bubble ratio {percent(simulation.bubble_ratio)}"
    if simulation.steady_bubble_ratio is not None:
        bubbles += f" (steady {percent(simulation.steady_bubble_ratio)})"
    steady, makespan = simulation.steady_step, unit.text(simulation.makespan)
    shown = "" if steady is None else unit.text(steady)
    step = f", steady step {shown}" if shown not in ("", makespan) else ""
    return f"makespan {makespan}{step}, {bubbles}, peak {peak}"
