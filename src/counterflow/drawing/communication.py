"""A communication plan in text and as a picture: receive buffers over a worker's ops, and communicators.

Invariant: the same plan gives the same text and the same file. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterflow.common.plurals import plural
from counterflow.program.actions import Compute, Program, named
from counterflow.program.communication.communication_plan import CommunicationPlan
from counterflow.program.communication.link_rounds import at_once
from counterflow.schedule.ir import Product

from . import palette
from .saving import saved, sized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW, _COLUMN, _GAP, _MARGIN = 0.22, 0.42, 0.5, 1.0  # inches


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    is_gradient: bool
    buffer: int
    start: int
    needed: int
    end: int


def _spans(program: Program, plan: CommunicationPlan, worker: int) -> list[_Span]:
    columns: list[int] = []
    """Number of ops before each action."""
    count = 0
    for action in program.actions[worker]:
        columns.append(count)
        count += isinstance(action, Compute)
    table = plan.buffers[worker]
    return [
        _Span(
            named(life.receive),
            life.receive.output.kind.gives is Product.INPUT_GRADIENT,
            slot,
            *(columns[index] for index in life[1:]),
        )
        for life, slot in zip(table.lifetimes, table.slots, strict=True)
    ]


def _ops(program: Program, worker: int) -> list[str]:
    return [str(action.op) for action in program.actions[worker] if isinstance(action, Compute)]


def plan_lines(program: Program, plan: CommunicationPlan) -> Iterator[str]:
    """The plan as text.

    Args:
        program: one action list per worker.
        plan: its plan.
    """
    yield from _communicator_lines(plan)
    for worker, table in enumerate(plan.buffers):
        yield ""
        if table.peak is None:
            yield f"worker {worker} receives nothing"
            continue
        ahead = sorted({*plan.ahead[worker]})
        posted = plural(ahead[0], "op") if len(ahead) == 1 else f"{ahead[0]} to {plural(ahead[-1], 'op')}"
        yield (
            f"worker {worker}: {plural(len(table.slots), 'message')}, posted {posted} ahead, in "
            f"{plural(table.count, 'buffer')}; all are in use at action {table.peak}"
        )
        spans, ops = _spans(program, plan, worker), _ops(program, worker)
        width = 1 + max(map(len, (*ops, *(span.name for span in spans))))
        yield "op".ljust(10) + "".join(op.ljust(width) for op in ops).rstrip()
        for buffer in range(table.count):
            cells = [" " * width] * len(ops)
            for span in spans:
                if span.buffer == buffer:
                    cells[span.start : span.end + 1] = ["─" * (width - 1) + " "] * (span.end + 1 - span.start)
                    cells[span.start] = span.name.ljust(width)
            yield f"buffer {buffer}".ljust(10) + "".join(cells).rstrip()


def _communicator_lines(plan: CommunicationPlan) -> Iterator[str]:
    communicators = plan.communicators
    count = sum(map(len, communicators.rounds))
    if not count:
        yield "no messages between workers"
        return
    proof, rounds = communicators.proof, len(communicators.rounds)
    reason = "no fewer were found in the time of the search"
    if proof:
        reason = f"{len(proof)} have at most {at_once(proof)} in a round, so there are no fewer"
    elif communicators.proved:
        reason = "a search of all ways shows that there are no fewer"
    yield f"{plural(count, 'communicator')}, made in {plural(rounds, 'round')}: {reason}"
    for number, row in enumerate(communicators.rounds):
        yield f"round {number}".ljust(10) + "  ".join(f"{sender}→{receiver}" for sender, receiver in row)


def draw_plan(program: Program, plan: CommunicationPlan, path: str | Path) -> None:
    """Draw receive buffers over the ops of each worker into a file; an existing one is replaced.

    Args:
        program: one action list per worker.
        plan: its plan.
        path: see ``saved``, also for the errors.
    """
    saved(path, lambda: _figure(program, plan))


def _figure(program: Program, plan: CommunicationPlan) -> Figure:
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - takes a while to import

    workers = range(len(program.actions))
    columns = max(len(_ops(program, worker)) for worker in workers)
    width = _MARGIN + columns * _COLUMN + 0.2
    height = 0.5 + sum(_GAP + (plan.buffers[worker].count + 1) * _ROW for worker in workers)
    figure = sized(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    rounds = len(plan.communicators.rounds)
    title = f"{program.schedule.scheme}: receive buffers (blue outputs, red gradients; pale until needed)"
    axes.text(0.15, 0.2, title, size=8, color=palette.INK, va="center")
    links = f"{plural(sum(map(len, plan.communicators.rounds)), 'communicator')} in {plural(rounds, 'round')}"
    axes.text(0.15, 0.38, links, size=7, color=palette.INK, va="center")
    top = 0.5
    for worker in workers:
        top += _GAP / 2
        axes.text(0.15, top + _ROW / 2, f"worker {worker}", size=7, color=palette.INK, va="center")
        for column, op in enumerate(_ops(program, worker)):
            middle = _MARGIN + (column + 0.5) * _COLUMN
            axes.text(middle, top + _ROW / 2, op, size=5.5, color=palette.INK, ha="center", va="center")
        for buffer in range(plan.buffers[worker].count):
            row = top + (buffer + 1.5) * _ROW
            axes.text(0.15, row, f"buffer {buffer}", size=5.5, color=palette.INK, va="center")
        for span in _spans(program, plan, worker):
            hue = palette.HUES[7 if span.is_gradient else 0]
            corner = _MARGIN + span.start * _COLUMN + 0.02, top + (span.buffer + 1) * _ROW + 0.02
            for end, fill in ((span.end, hue.forward), (span.needed - 1, "#ffffff99")):
                length = (end - span.start + 1) * _COLUMN - 0.04
                if length > 0:
                    axes.add_patch(Rectangle(corner, length, _ROW - 0.04, facecolor=fill, edgecolor="none"))
            axes.text(corner[0] + 0.04, corner[1] + _ROW / 2 - 0.02, span.name, size=5.5, va="center")
        top += _GAP / 2 + (plan.buffers[worker].count + 1) * _ROW
    return figure
