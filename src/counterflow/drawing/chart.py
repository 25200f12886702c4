"""A chart: a timeline as plain boxes; ``charting.py`` makes it from a simulation.

Invariant: a ``Chart`` contains everything that a drawer needs, and drawers read nothing else, so a measured
timeline is drawn like a predicted one. Charts drawn together share one time axis. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from counterflow.common.number_texts import compact
from counterflow.schedule.ir import OpKind
from counterflow.simulation import Cause, MemoryUse

from .palette import Shade
from .time_units import AmountUnit, TimeUnit, time_unit


class BoxKind(Enum):
    """Meaning of a box."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENTS = "weight gradients"
    SYNC = "sync"
    RECOMPUTATION = "recomputation"

    @property
    def shade(self) -> Shade | None:
        """The shade of its lane's hue; None for a sync, which has no lane."""
        return _SHADES[self]


_SHADES = {
    BoxKind.FORWARD: Shade.LIGHT,
    BoxKind.BACKWARD: Shade.DARK,
    BoxKind.INPUT_GRADIENT: Shade.DARK,
    BoxKind.WEIGHT_GRADIENTS: Shade.MIDDLE,
    BoxKind.SYNC: None,
    BoxKind.RECOMPUTATION: Shade.LIGHT,
}
_KINDS = {kind: BoxKind(kind.word) for kind in OpKind}
LETTERS = {box: op.value for op, box in _KINDS.items()}
"""The letter of each kind of op."""


@dataclass(frozen=True, slots=True)
class BoxLane:
    """Meaning of a box's colour: a pipe, or a chunk of a worker's stages.

    ``name`` is empty if there is only one; ``hue`` is a number in the palette.
    """

    name: str
    hue: int


@dataclass(frozen=True, slots=True)
class Box:
    """An op or a gradient sync, from ``start`` to ``end`` (seconds) on ``worker``.

    ``lane`` and ``pipe`` are None for a sync; ``label`` is short, for inside the box; ``detail`` is an
    addition in words, such as ``"half 1 of 2"``; ``op`` is the op as schedules write it; ``needs`` are the
    numbers of the boxes in the chart whose products it takes.
    """

    worker: int
    start: float
    end: float
    kind: BoxKind
    label: str
    stage: int
    lane: int | None = None
    pipe: int | None = None
    micro_batches: tuple[int, ...] = ()
    detail: str = ""
    op: str = ""
    needs: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """The box in a few words.

        >>> Box(0, 0.0, 1.0, BoxKind.FORWARD, "2,3", 1, micro_batches=(2, 3)).what
        'forward of micro-batches 2, 3'
        """
        if self.kind is BoxKind.SYNC:
            return f"gradient sync of stage {self.stage}"
        many = "es" if len(self.micro_batches) > 1 else ""
        return f"{self.kind.value} of micro-batch{many} {', '.join(map(str, self.micro_batches))}"

    @property
    def placed(self) -> str:
        """The box in a few words, with its stage and worker."""
        return f"{self.what}, stage {self.stage}, worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Bubble:
    """Time in which ``worker`` has no op to run, and why."""

    worker: int
    start: float
    end: float
    cause: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message between two workers, on its link from ``start`` to ``end`` (seconds)."""

    sender: int
    receiver: int
    start: float
    end: float
    what: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Every worker's memory over time, as steps."""

    unit: AmountUnit
    workers: tuple[MemoryUse, ...]

    @property
    def peak(self) -> float:
        """The maximum on any worker."""
        return max(use.peak for use in self.workers)


@dataclass(frozen=True, slots=True)
class Chart:
    """One timeline. ``makespan`` in seconds; ``steady`` is each worker's (start, end) of its steady part.

    ``in_forwards``: times are in units of a forward instead of seconds. ``playable``: false for orders that
    deadlock, whose ops are drawn one after another. Only the page shows the following: ``slack`` of the first
    boxes, in seconds; ``circle``, pairs of boxes of which the first waits for the second, if workers wait in
    a circle; ``limit``, the maximum of each worker's ``memory``.
    """

    heading: str
    summary: str
    workers: int
    makespan: float
    lanes: tuple[BoxLane, ...]
    boxes: tuple[Box, ...]
    memory: Memory | None = None
    steady: tuple[tuple[float, float], ...] | None = None
    bubbles: tuple[Bubble, ...] = ()
    messages: tuple[Arrow, ...] = ()
    in_forwards: bool = False
    playable: bool = True
    slack: tuple[float, ...] | None = None
    circle: tuple[tuple[int, int], ...] = ()
    limit: tuple[float, ...] | None = None

    @property
    def title(self) -> str:
        """Heading and summary in one line."""
        return f"{self.heading} — {self.summary}" if self.summary else self.heading

    @property
    def split(self) -> str:
        """Bubbles by cause on one line, as shares of all workers' time.

        >>> Chart("", "", 2, 10.0, (), (), bubbles=(Bubble(1, 0.0, 1.0, "warm-up"),)).split
        'bubbles 5 %: warm-up 5 %'
        """
        if not self.playable:
            return ""
        sums = {cause.value: 0.0 for cause in Cause}
        for bubble in self.bubbles:
            sums[bubble.cause] = sums.get(bubble.cause, 0.0) + bubble.end - bubble.start
        total = self.makespan * self.workers
        if not total or not self.bubbles:
            return "no bubbles"
        causes = ", ".join(f"{cause} {percent(time / total)}" for cause, time in sums.items() if time)
        return f"bubbles {percent(sum(sums.values()) / total)}: {causes}"

    def facts(self, box: Box) -> tuple[tuple[str, str], ...]:
        """Facts about a box, by name."""
        lane = "" if box.lane is None else self.lanes[box.lane].name
        unit = shared_unit([self])
        rows = [("op", box.op), ("stage", str(box.stage)), ("worker", str(box.worker))]
        rows += [(lane.rstrip("0123456789 ").rsplit(" ", 1)[-1], lane)]
        rows += [("", part) for part in box.detail.split("; ")]
        rows += [("needs", self.boxes[i].placed) for i in box.needs]
        rows += [("start", unit.text(box.start)), ("end", unit.text(box.end))]
        return tuple((name, text) for name, text in rows if text)

    @property
    def kinds(self) -> tuple[BoxKind, ...]:
        """The kinds of op in the chart; forward and backward if it has none."""
        kinds = tuple(
            kind for kind in BoxKind if kind.shade is not None and any(box.kind is kind for box in self.boxes)
        )
        return kinds or (BoxKind.FORWARD, BoxKind.BACKWARD)

    @property
    def has_syncs(self) -> bool:
        """Check that some box is a gradient sync."""
        return any(box.kind is BoxKind.SYNC for box in self.boxes)

    def rows(self) -> tuple[tuple[Box, ...], ...]:
        """The ops of each worker, by start."""
        return self._by_worker(sync=False)

    def sync_rows(self) -> tuple[tuple[Box, ...], ...]:
        """The gradient syncs of each worker, by start."""
        return self._by_worker(sync=True)

    def _by_worker(self, *, sync: bool) -> tuple[tuple[Box, ...], ...]:
        rows: list[list[Box]] = [[] for _ in range(self.workers)]
        for box in self.boxes:
            if (box.kind is BoxKind.SYNC) is sync:
                rows[box.worker].append(box)
        return tuple(tuple(sorted(row, key=lambda b: (b.start, b.end))) for row in rows)

    def legend(self) -> tuple[tuple[int, str], ...]:
        """Each hue in use and what it stands for; lanes that share a hue are named together.

        >>> lanes = tuple(BoxLane(f"chunk {i}", i % 8) for i in range(9))
        >>> Chart("", "", 1, 1.0, lanes, ()).legend()[:2]
        ((0, 'chunk 0, 8'), (1, 'chunk 1'))
        """
        by_hue: dict[int, list[str]] = {}
        for lane in self.lanes:
            by_hue.setdefault(lane.hue, []).append(lane.name)
        return tuple((hue, _together(names)) for hue, names in sorted(by_hue.items()))


def _together(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    word = names[0].rsplit(" ", 1)[0]
    numbers = [name.rsplit(" ", 1)[1] for name in names]
    if len(numbers) > 3:
        numbers = [*numbers[:2], "…", numbers[-1]]
    return f"{word} {', '.join(numbers)}"


def percent(ratio: float) -> str:
    """A share, for people."""
    return f"{compact(100 * ratio, 3)} %"


def shared_unit(charts: Sequence[Chart]) -> TimeUnit:
    """The unit of the time axis that all ``charts`` share."""
    return time_unit(shared_end(charts), in_forwards=all(chart.in_forwards for chart in charts))


def shared_end(charts: Sequence[Chart]) -> float:
    """The end of the time axis that all ``charts`` share, in seconds."""
    return max((chart.makespan for chart in charts), default=0.0) or 1.0


def marks_input_gradients(charts: Sequence[Chart]) -> bool:
    """Check that backwards and input gradients, which share a shade, both occur, so the latter get a mark."""
    kinds = {kind for chart in charts for kind in chart.kinds}
    return {BoxKind.BACKWARD, BoxKind.INPUT_GRADIENT} <= kinds


def band_of(kind: BoxKind, *, marked: bool) -> Shade | None:
    """The shade of the band by which a kind of box differs from another one of its shade; None: no band.

    Args:
        kind: the kind of box.
        marked: whether input gradients have a band, because backwards occur too.
    """
    if kind is BoxKind.RECOMPUTATION:
        return Shade.DARK
    return Shade.LIGHT if marked and kind is BoxKind.INPUT_GRADIENT else None


def ways(chart: Chart) -> str:
    """Meaning of a lane's shades, in a legend.

    >>> ways(Chart("", "", 1, 1.0, (), ()))
    'forward | backward'
    """
    return " | ".join(kind.value for kind in chart.kinds)


def shared_peak(charts: Sequence[Chart], unit: AmountUnit) -> float:
    """The maximum memory in ``unit`` on any worker of any chart; 1 if there is none."""
    peaks = [chart.memory.peak for chart in charts if chart.memory and chart.memory.unit is unit]
    return max(peaks, default=0.0) or 1.0


def steps_until(use: MemoryUse, end: float) -> Iterator[tuple[float, float, float]]:
    """A worker's memory as (start, end, amount) until ``end``, without steps of no length."""
    for index, (start, amount) in enumerate(zip(use.times, use.amounts, strict=True)):
        stop = use.times[index + 1] if index + 1 < len(use.times) else end
        if stop > start:
            yield start, stop, amount
