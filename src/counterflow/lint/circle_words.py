"""A circle of waiting ranks in words and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .calls import CallLists, CallStep
from .waiting import Happening, Wait, WaitPlay

_VERBS = {
    Happening.SENT: "calls",
    Happening.POSTED: "calls",
    Happening.CALLED: "calls",
    Happening.ENTERED: "calls",
    Happening.BEGUN: "begins",
    Happening.DONE: "completes",
    Happening.COMPUTED: "computes",
}

_MOST = 16
"""Waits of a circle that are shown."""


@dataclass(frozen=True, slots=True)
class WaitShown:
    """A rank that waits.

    Attributes:
        rank: the rank.
        step: the step that waits, as its file has it.
        place: its place in the file.
        awaited_rank: the rank that it waits for.
        awaited: the step that it waits for; empty: its other side does not exist.
        verb: what that step has to do.
        behind: the step in which the awaited rank is stuck, if the awaited step is behind it; else empty.
    """

    rank: int
    step: str
    place: str
    awaited_rank: int
    awaited: str
    verb: str
    behind: str

    def __str__(self) -> str:
        head = f"rank {self.rank}: {self.step} ({self.place})"
        if not self.awaited:
            return f"{head} waits for rank {self.awaited_rank}, which does not call the other side"
        same_rank = self.rank == self.awaited_rank
        whose = "this rank" if same_rank else f"rank {self.awaited_rank}"
        text = f"{head} waits until {whose} {self.verb} {self.awaited}"
        return f"{text}, which is behind {self.behind}" if self.behind else text


def waits_shown(lists: CallLists, play: WaitPlay) -> tuple[WaitShown, ...]:
    """The waits of a play that does not end, in the order of the circle."""
    follower = (*play.waits[1:], play.waits[0] if play.closed else None)
    return tuple(_shown(lists, wait, after) for wait, after in zip(play.waits, follower, strict=True))


def _shown(lists: CallLists, wait: Wait, after: Wait | None) -> WaitShown:
    step = lists.ranks[wait.rank][wait.position]
    awaited: CallStep | None = None
    behind = ""
    if wait.awaited >= 0:
        awaited = lists.ranks[wait.awaited_rank][wait.awaited]
        if after is not None and after.position != wait.awaited:
            behind = lists.ranks[after.rank][after.position].label
    return WaitShown(
        wait.rank,
        step.label,
        step.place,
        wait.awaited_rank,
        "" if awaited is None else awaited.label,
        "" if wait.event is None else _VERBS[wait.event],
        behind,
    )


def circle_lines(waits: Sequence[WaitShown], *, closed: bool) -> list[str]:
    r"""The circle as lines, with an arrow beside them from the last to the first.

    >>> first = WaitShown(0, "0SEND_F1", "line 1", 1, "1RECV_F1", "begins", "1SEND_F0")
    >>> last = WaitShown(1, "1SEND_F0", "line 2", 0, "2RECV_F0", "begins", "0SEND_F1")
    >>> print("\n".join(circle_lines([first, last], closed=True)))
    ╭▶ rank 0: 0SEND_F1 (line 1) waits until rank 1 begins 1RECV_F1, which is behind 1SEND_F0
    ╰─ rank 1: 1SEND_F0 (line 2) waits until rank 0 begins 2RECV_F0, which is behind 0SEND_F1
    """
    lines = [str(wait) for wait in waits]
    if len(lines) > _MOST:
        half = _MOST // 2
        lines = [*lines[:half], f"… {len(lines) - _MOST} more …", *lines[-half:]]
    if not closed:
        return [f"   {line}" for line in lines]
    if len(lines) == 1:
        return [f"╶▶ {lines[0]}"]
    marks = ["╭▶", *("│ " for _ in lines[2:]), "╰─"]
    return [f"{mark} {line}" for mark, line in zip(marks, lines, strict=True)]
