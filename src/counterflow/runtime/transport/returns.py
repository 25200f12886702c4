"""Workers that wait for one whose function has returned: it sends nothing more, and they would wait in vain.

Only what starts workers and keeps their processes says that one has returned. Its messages may still be on
their way, so a worker has to wait a while; and where it waits for several, the rest have to wait as well.

Invariant: a worker that somebody who computes may still serve is never said to wait in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_GRACE_SECONDS: Final = 4.0
"""How long a worker is seen to wait before what it waits for is missing, and not late."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A status as its worker posted it.

    Attributes:
        doing: what it does.
        waiting_for: the rank it waits for, -1 for several; None: it computes.
        since: when it began with that, in seconds of the run.
        at: when it was posted, in seconds of the run.
        returned: whether its function has returned.
    """

    doing: str
    waiting_for: int | None
    since: float
    at: float
    returned: bool = False

    def continues(self, earlier: Posted) -> bool:
        """True if the worker is still in the wait that an earlier post reports."""
        same = (self.doing, self.waiting_for) == (earlier.doing, earlier.waiting_for)
        return same and self.waiting_for is not None and abs(self.since - earlier.since) < 0.1


class Returns:
    """Detection of a wait for workers that have returned, by one worker.

    Args:
        rank: this worker.

    >>> returns = Returns(0)
    >>> waiting = Posted("Forward F0.0", 1, since=1.0, at=2.0)
    >>> ended = Posted("its end", None, since=1.0, at=1.0, returned=True)
    >>> returns.awaited({0: waiting, 1: ended})
    >>> returns.awaited({0: Posted("Forward F0.0", 1, since=1.0, at=7.0), 1: ended})
    1
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._first: dict[int, Posted] = {}
        """First post of each worker's present wait."""

    def awaited(self, posted: Mapping[int, Posted]) -> int | None:
        """The rank that has returned and that this worker waits for; None: there is none, or not yet.

        Args:
            posted: the last post of each rank, as far as there is one; this rank's own as it is now.
        """
        for rank, post in posted.items():
            first = self._first.get(rank)
            if first is None or not post.continues(first):
                self._first[rank] = post
        returned = {rank for rank, post in posted.items() if post.returned}
        waiting_for = posted[self._rank].waiting_for
        if waiting_for is None or not returned:
            return None
        waiting = {rank for rank in posted if rank not in returned} if waiting_for < 0 else {self._rank}
        if waiting_for >= 0 and waiting_for not in returned:
            return None
        if any(posted[rank].waiting_for is None for rank in waiting):
            return None
        since = max(self._first[rank].at for rank in waiting)
        if min(posted[rank].at for rank in waiting) - since < _GRACE_SECONDS:
            return None
        return waiting_for if waiting_for >= 0 else min(returned)
