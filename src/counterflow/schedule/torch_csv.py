"""Schedules as torch's CSV: one row per rank, one action per cell (``2F0``: stage 2, forward, micro-batch 0).

``torch.distributed.pipelining`` loads and dumps it, and torchtitan and NeMo AutoModel read it. An empty cell
is idle. Pairs that torch overlaps, ``(0F1;4B0)OVERLAP_F_B``, are read one after the other. Messages and
FSDP's actions between ops are ignored, because every schedule's own are made anew.

torch has no slices of a sequence. A sliced op has its slice in front, ``1/4:2F0``: it is read here, and torch
refuses it. After the action, torch would ignore it and run a whole micro-batch for each slice.

Invariant: a written schedule is read back with the same orders, here and, unless it is sliced, by torch.
Schedules that the format cannot express are refused: each stage must be on one rank, and there must be one
update.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from counterflow.errors import ConfigError

from .ir import Op, Schedule
from .placement import Placement
from .torch_cells import TorchAction, cell_actions
from .workload import Workload, passes_of

SCHEME = "csv"
"""Scheme name of a schedule that was read."""

SUFFIX = ".csv"


def dumps(schedule: Schedule) -> str:
    """The schedule as torch's CSV.

    Raises:
        ConfigError: the format cannot express the schedule.

    >>> from counterflow.schedule.schemes import dapple
    >>> print(dumps(dapple(stages=2, micro_batches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    if (fault := _beyond(schedule)) is not None:
        raise ConfigError(
            f"{schedule} has {fault}, which torch's CSV cannot express: there each stage is on one rank and "
            "an op has one micro-batch; write .json, or choose another scheme"
        )
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for order in schedule.orders:
        rows.writerow(map(_cell, order))
    return text.getvalue()


def _cell(op: Op) -> str:
    return str(TorchAction(op.stage, op.kind.value, op.micro_batches[0], op.part, op.parts))


def _beyond(schedule: Schedule) -> str | None:
    if not schedule.synchronous or schedule.periods > 1:
        return "no flush and several versions of the weights"
    if schedule.pipes > 1:
        return f"{schedule.pipes} pipes with copies of the stages"
    if schedule.workload.skips or schedule.workload.recomputes:
        return "skip connections" if schedule.workload.skips else "recomputations as ops of their own"
    if any(len(op.micro_batches) > 1 for op in schedule.ops()):
        return "micro-batches that run together"
    if any(op.parts != schedule.workload.slices for op in schedule.ops()):
        return "micro-batches that are halved"
    return "slices of different lengths" if len({*schedule.workload.lengths}) > 1 else None


def loads(text: str, name: str) -> Schedule:
    """The schedule in a text of torch's CSV.

    Args:
        text: text that torch or ``dumps`` wrote.
        name: name of the text in errors, for example its file's name.

    Raises:
        ConfigError: a cell is not an action, a stage or a micro-batch is missing, a stage is on several rows,
            or ops have different numbers of slices.
    """
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ConfigError(f"{name}: no CSV: {error}") from None
    return schedule_of((_actions(row, f"{name}: row {rank}") for rank, row in enumerate(rows)), name)


def _actions(row: Sequence[str], place: str) -> Iterator[TorchAction]:
    for column, cell in enumerate(row):
        yield from cell_actions(cell.strip(), f"{place}, cell {column}")


def schedule_of(rows: Iterable[Iterable[TorchAction]], name: str) -> Schedule:
    """The schedule of the ops among each rank's actions.

    Raises:
        ConfigError: a stage or a micro-batch is missing, a stage is on several rows, or ops have different
            numbers of slices.
    """
    orders = tuple(tuple(op for action in row if (op := action.op) is not None) for row in rows)
    where: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for op in order:
            if where.setdefault(op.stage, rank) != rank:
                raise ConfigError(
                    f"{name}: stage {op.stage} is on row {where[op.stage]} and on row {rank}; each stage "
                    "must be on one rank"
                )
    slices = {op.parts for order in orders for op in order}
    if len(slices) > 1:
        raise ConfigError(
            f"{name}: ops of micro-batches in {' and in '.join(map(str, sorted(slices)))} slices; all are "
            "cut alike"
        )
    forwards = {op.micro_batches[0] for order in orders for op in order if op.kind.is_forward}
    _refuse_gaps(where, "stage", name)
    _refuse_gaps(forwards, "micro-batch", name)
    runs = sum(op.kind.is_forward for order in orders for op in order)
    if len(forwards) * max(slices) > runs:
        raise ConfigError(
            f"{name}: {len(forwards)} micro-batches in {max(slices)} slices, but {runs} forwards in total; "
            "each slice needs one on every stage"
        )
    workload = Workload(
        placement=Placement(len(orders), (tuple(where[stage] for stage in range(len(where))),)),
        micro_batches=len(forwards),
        passes=passes_of(op for order in orders for op in order),
        lengths=(1,) * max(slices),
    )
    return Schedule(SCHEME, (), workload, orders)


def _refuse_gaps(numbers: dict[int, int] | set[int], what: str, name: str) -> None:
    if not numbers:
        raise ConfigError(f"{name}: no forward of any {what}; expected one row per rank, with cells like 2F0")
    missing = next((number for number in range(len(numbers)) if number not in numbers), None)
    if missing is not None:
        raise ConfigError(f"{name}: no op of {what} {missing}, but one of {what} {max(numbers)}")
