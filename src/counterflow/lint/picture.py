"""Lanes and arrows of a circle of waiting ranks, for the drawing."""

from __future__ import annotations

from pathlib import Path

from counterflow.drawing.wait_circle import WaitArrow, WaitLane, draw_waits

from .calls import CallLists
from .waiting import WaitPlay

_MOST = 7
"""Steps of a rank that are drawn; of more, those in the middle become one box."""


def draw_circle(lists: CallLists, play: WaitPlay, path: Path) -> None:
    """Draw the ranks that wait for each other.

    Args:
        lists: the lists of all ranks.
        play: a play that does not end.
        path: the file, ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ConfigError: the file cannot be written.
    """
    places: dict[int, set[int]] = {}
    stuck: dict[int, set[int]] = {}
    for wait in play.waits:
        places.setdefault(wait.rank, set()).add(wait.position)
        stuck.setdefault(wait.rank, set()).add(wait.position)
        if wait.awaited >= 0:
            places.setdefault(wait.awaited_rank, set()).add(wait.awaited)
    columns: dict[tuple[int, int], tuple[int, int]] = {}
    lanes: list[WaitLane] = []
    for lane, rank in enumerate(sorted(places)):
        shown = _drawn_places(places[rank], len(lists.ranks[rank]))
        labels = ["…" if at < 0 else lists.ranks[rank][at].label for at in shown]
        columns |= {(rank, at): (lane, column) for column, at in enumerate(shown) if at >= 0}
        marked = tuple(column for column, at in enumerate(shown) if at in stuck.get(rank, ()))
        lanes.append(WaitLane(f"rank {rank}", tuple(labels), marked))
    arrows = [
        WaitArrow(columns[wait.rank, wait.position], columns[wait.awaited_rank, wait.awaited])
        for wait in play.waits
        if wait.awaited >= 0
    ]
    title = f"{play.rule.value}: red steps wait for those at the end of their arrows"
    draw_waits(lanes, arrows, path, title=title)


def _drawn_places(places: set[int], count: int) -> list[int]:
    shown: list[int] = []
    wanted = sorted(places)
    for before, at in zip([None, *wanted], wanted, strict=False):
        if before is None:
            shown += [-1] if at > 1 else list(range(at))
        elif at - before <= _MOST // 2:
            shown += range(before + 1, at)
        else:
            shown.append(-1)
        shown.append(at)
    if wanted[-1] < count - 1:
        shown.append(-1)
    return shown
