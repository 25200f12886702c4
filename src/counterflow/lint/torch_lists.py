"""torch's schedules with communication as lists of calls: its CSV, or the rows that it prints.

A row is a rank, a cell an action: ``0F1`` (stage 0, forward, micro-batch 1), ``0SEND_F1``, ``1RECV_F1``,
``0UNSHARD``, ``(0F1;1B0)OVERLAP_F_B``. A printed row may stand in brackets behind ``rank 0:`` and have
``...`` for what is left out; then the lists are a part of the run. As in torch's runtime, an op waits for its
receive, a send follows its op, and two stages of one rank exchange no message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from counterflow.errors import ConfigError
from counterflow.schedule.torch_cells import TorchAction, cell_actions

from .calls import CallLists, CallSide, CallStep, CommunicatorScope, Part, Row

FORM = "torch's schedule with communication"

_PREFIX = re.compile(r"\s*(?:rank\s*(\d{1,9})\s*:)?\s*\[?", re.IGNORECASE)
_ELLIPSES = ("...", "…")

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Duration of ops by torch's letter, in the time of a forward."""


@dataclass(frozen=True, slots=True)
class TorchCell:
    """A cell of a row: one action, or several in parentheses, and its place in the file."""

    text: str
    actions: tuple[TorchAction, ...]
    place: str


def read_torch_lists(text: str, name: str, communicators: CommunicatorScope) -> CallLists:
    """The lists in torch's CSV with communication, or in printed rows.

    Args:
        text: the file's text.
        name: its name, for errors.
        communicators: the communicators on which the calls run.

    Raises:
        ConfigError: a cell is no action, a stage is on several ranks, or there is no communication.
    """
    rows, partial = torch_rows(text, name)
    stages: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            for action in cell.actions:
                if stages.setdefault(action.stage, rank) != rank:
                    raise ConfigError(
                        f"{name}: {cell.place}: {action} is of stage {action.stage}, which is on rank "
                        f"{stages[action.stage]}; each stage is on one rank"
                    )
    if not any(a.is_message for row in rows for cell in row for a in cell.actions):
        raise ConfigError(
            f"{name}: no action sends or receives; write the schedule with communication "
            "(_dump_csv(format='compute_comms'), get_schedule_ops(with_comms=True)), or prove the "
            "order of its ops: counterflow check"
        )
    written = (_Steps(row, rank, stages, communicators, name).steps for rank, row in enumerate(rows))
    return CallLists(tuple(map(tuple, written)), FORM, partial=partial)


def torch_rows(text: str, name: str) -> tuple[list[list[TorchCell]], bool]:
    """The cells of each rank, and whether some are left out.

    Raises:
        ConfigError: a cell is no action, or of a slice; the message has its line and column.
    """
    rows: list[list[TorchCell]] = []
    partial = False
    for number, line in enumerate(text.splitlines(), 1):
        prefix = _PREFIX.match(line)
        assert prefix is not None
        body = line[prefix.end() :].rstrip().removesuffix(",").removesuffix("]")
        if not line.strip():
            continue
        if prefix[1] is not None and int(prefix[1]) != len(rows):
            raise ConfigError(
                f"{name}: line {number}, column 1: row {len(rows)} is of rank {prefix[1]}; write all ranks "
                "in order, from 0"
            )
        cells: list[TorchCell] = []
        column = prefix.end() + 1
        for cell in body.split(","):
            word = cell.strip().strip("'\"")
            for dots in _ELLIPSES:
                if word.startswith(dots) or word.endswith(dots):
                    partial, word = True, word.removeprefix(dots).removesuffix(dots).strip()
            place = f"line {number}, column {column + max(0, cell.find(word))}"
            column += len(cell) + 1
            if word and word != "None":
                cells.append(TorchCell(word, cell_actions(word, f"{name}: {place}"), place))
                _refuse_slices(cells[-1], name)
        rows.append(cells)
    if not any(rows):
        raise ConfigError(f"{name}: no action; expected one row per rank, with cells like 0F0 and 0SEND_F0")
    return rows, partial


def _refuse_slices(cell: TorchCell, name: str) -> None:
    for action in cell.actions:
        if action.parts > 1:
            raise ConfigError(
                f"{name}: {cell.place}: {action} is of a slice, and messages of torch's schedules have none; "
                "lint the schedule as a file of this library (.json)"
            )


class _Steps:
    def __init__(
        self,
        row: list[TorchCell],
        rank: int,
        stages: dict[int, int],
        communicators: CommunicatorScope,
        name: str,
    ) -> None:
        self.rank, self.stages, self.communicators, self.name = rank, stages, communicators, name
        self.receives: dict[tuple[int, str, int], int] = {}
        """Number of the step that receives the input of each stage, kind (F, B) and micro-batch."""
        self.makers: dict[tuple[int, str, int], int] = {}
        """Number of the step that makes the output of each stage, kind (F, B) and micro-batch."""
        for number, cell in enumerate(row):
            for action in cell.actions:
                word, _, letter = action.kind.partition("_")
                if word == "RECV":
                    self.receives[action.stage, letter, action.micro_batch] = number
                elif action.kind in SECONDS and action.kind != "W":
                    letter = "F" if action.kind == "F" else "B"
                    self.makers[action.stage, letter, action.micro_batch] = number
        self.steps: Row = tuple(self._step(number, cell) for number, cell in enumerate(row))

    def _step(self, number: int, cell: TorchCell) -> CallStep:
        parts: list[Part] = []
        needs: set[int] = set()
        seconds = 0.0
        for action in cell.actions:
            letter = "B" if action.kind in ("I", "B") else action.kind
            word, _, sent = action.kind.partition("_")
            if word in ("SEND", "RECV"):
                parts.append(self._part(action, cell.place, batched=len(cell.actions) > 1))
                maker = self.makers.get((action.stage, sent, action.micro_batch))
                if word == "SEND" and maker is not None:
                    needs.add(maker)
            elif letter in ("F", "B"):
                before = action.stage + (-1 if letter == "F" else 1)
                local = self.makers.get((before, letter, action.micro_batch))
                receive = self.receives.get((action.stage, letter, action.micro_batch))
                needs |= {needed for needed in (local, receive) if needed not in (None, number)}
            seconds += SECONDS.get(action.kind, 0.0)
        return CallStep(
            number, cell.text, tuple(parts), tuple(sorted(needs)), seconds=seconds, place=cell.place
        )

    def _part(self, action: TorchAction, place: str, *, batched: bool) -> Part:
        word, _, letter = action.kind.partition("_")
        ahead = (letter == "F") == (word == "SEND")
        stage = action.stage + (1 if ahead else -1)
        peer = self.stages.get(stage)
        if peer is None or peer == self.rank:
            fault = "no row has" if peer is None else "is on the same rank, where no message is needed"
            where = f"{fault} stage {stage}" if peer is None else f"stage {stage} {fault}"
            raise ConfigError(f"{self.name}: {place}: {action} is a message to or from a stage, and {where}")
        side = CallSide.SEND if word == "SEND" else CallSide.RECEIVE
        maker = action.stage if word == "SEND" else stage
        sender, receiver = (self.rank, peer) if side is CallSide.SEND else (peer, self.rank)
        kind = CommunicatorScope.GROUP if batched else self.communicators
        communicator = kind.of_message(sender, receiver)
        return Part(side, peer, f"{maker}{letter}{action.micro_batch}", communicator)
