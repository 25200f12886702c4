"""Cells of torch's schedules: ``0F1`` (stage 0, forward, micro-batch 1), ``0SEND_F1``, ``1UNSHARD``.

Several actions stand in parentheses: ``(0F1;1B0)OVERLAP_F_B``, ``(0SEND_F1;0RECV_B0)BATCH_P2P``. An op of a
slice has it in front, ``1/4:0F1``, which torch does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from counterflow.errors import ConfigError

from .ir import Op, OpKind

_ACTION = re.compile(
    r"(?:(\d{1,9})/(\d{1,9}):)?(\d{1,9})"
    r"(?:([FBIW]|(?:SEND|RECV)_[FB])(\d{1,9})|(UNSHARD|RESHARD|REDUCE_GRAD))"
)
_GROUP = re.compile(r"\(([^()]*)\)(OVERLAP_F_B|BATCH_P2P)")
_LONGEST = 40
"""Characters of a wrong cell that a message has."""


@dataclass(frozen=True, slots=True)
class TorchAction:
    """An action of a cell.

    Attributes:
        stage: its stage.
        kind: torch's word for it: F, B, I, W, SEND_F, UNSHARD, ...
        micro_batch: its micro-batch; -1: none.
        part: slice of an op.
        parts: number of slices of its micro-batch.
    """

    stage: int
    kind: str
    micro_batch: int
    part: int = 0
    parts: int = 1

    @property
    def op(self) -> Op | None:
        """Op that it runs; None: it runs none."""
        if len(self.kind) > 1:
            return None
        return Op(OpKind(self.kind), self.stage, (self.micro_batch,), part=self.part, parts=self.parts)

    @property
    def is_message(self) -> bool:
        """True if it sends or receives."""
        return self.kind.startswith(("SEND", "RECV"))

    def __str__(self) -> str:
        slice_text = f"{self.part}/{self.parts}:" if self.parts > 1 else ""
        return f"{slice_text}{self.stage}{self.kind}{'' if self.micro_batch < 0 else self.micro_batch}"


def cell_actions(cell: str, place: str) -> tuple[TorchAction, ...]:
    """Actions of a cell, in their order; none in an empty cell.

    Args:
        cell: its text.
        place: its place, for errors.

    Raises:
        ConfigError: a part of the text is no action, or no message in a batch of messages.

    >>> [str(action) for action in cell_actions("(0F1;4B0)OVERLAP_F_B", "row 0")]
    ['0F1', '4B0']
    """
    group = _GROUP.fullmatch(cell)
    texts = group[1].split(";") if group else [cell] if cell else []
    actions = tuple(_action(text.strip(), place) for text in texts)
    for action in actions:
        if group and group[2] == "BATCH_P2P" and not action.is_message:
            raise ConfigError(f"{place}: {action} is no send or receive, and in a BATCH_P2P")
    return actions


def _action(text: str, place: str) -> TorchAction:
    match = _ACTION.fullmatch(text)
    if match is not None:
        part, parts, stage, numbered, number, unnumbered = match.groups()
        kind = numbered or unnumbered
        if parts is None or (len(kind) == 1 and int(part) < int(parts)):
            return TorchAction(int(stage), kind, int(number or -1), int(part or 0), int(parts or 1))
    shown = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    raise ConfigError(
        f"{place}: {shown!r} is not an action; actions look like 2F0 (stage 2, forward, micro-batch 0), 2B0, "
        "2I0, 2W0, 0/4:2F0 (the first of 4 slices), 2SEND_F0, 2RECV_F0, 2SEND_B0, 2RECV_B0, 2UNSHARD, "
        "2RESHARD, 2REDUCE_GRAD, (0F1;4B0)OVERLAP_F_B or (2SEND_F1;2RECV_B0)BATCH_P2P"
    )
