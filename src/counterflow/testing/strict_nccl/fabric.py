"""NCCL's behaviour for launches of the ranks: communicators, streams, matching, and waits.

The rules:

* A communicator is made at its first use, which blocks the host until all members have entered. * Launches of
a rank on one stream run in that order, and not before the events that they wait for. * Messages of two ranks
on one communicator match by their order alone. A message ends when both its sides run: a send whose receive
is queued behind another launch blocks its stream. * A collective runs when all members run it: the n-th of
one rank on a communicator is the n-th of the others. * None of this blocks a host, except making a
communicator and waiting for a stream.

Invariant: when a call returns, everything that can happen has happened. So if every host waits and none of
these waits is over, none ever will be: this is reported at once, with the circle, instead of a hang. No clock
is read. Tensors are moved by ``move``, and torch is not imported.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class NcclRuleError(RuntimeError):
    """The ranks broke one of NCCL's rules: on GPUs they would hang, or compute with wrong data."""


class AbortedError(RuntimeError):
    """A communicator was used after it was aborted."""


SEND, RECEIVE = "send", "receive"


@dataclass(eq=False, slots=True)
class RankOperation:
    """One operation of one rank on one communicator.

    Attributes:
        kind: ``SEND``, ``RECEIVE`` or a collective's name, which all ranks have to agree on.
        rank: rank of the operation.
        communicator: name of the communicator.
        size: size on which both sides of a message, or all of a collective, have to agree.
        peer: the other rank of a message.
        how: reduction of a collective.
        data: data for ``move``.
        number: its number among operations of its kind on the communicator (and with the peer), from 0.
    """

    kind: str
    rank: int
    communicator: str
    size: str
    peer: int = -1
    how: str = ""
    data: Any = None
    number: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that its number counts."""
        if self.kind in (SEND, RECEIVE):
            return self.communicator, self.kind, self.rank, self.peer
        return self.communicator, self.rank

    def __str__(self) -> str:
        to = {SEND: f" to rank {self.peer}", RECEIVE: f" from rank {self.peer}"}.get(self.kind, "")
        return (
            f"rank {self.rank}'s {self.kind}{to} (number {self.number}, {self.size}) on {self.communicator}"
        )


@dataclass(eq=False, slots=True)
class Launch:
    """A launch on a rank's stream: one operation, or a group of them.

    Attributes:
        rank: rank of the launch.
        stream: stream on which it runs.
        parts: the operations; an event has none.
        after: launches that it waits for in addition to its stream.
        over: whether it has run, or was aborted.
        aborted: whether its communicators were aborted before it had run.
    """

    rank: int
    stream: str
    parts: tuple[RankOperation, ...]
    after: tuple[Launch, ...] = ()
    moved: set[int] = field(default_factory=set)
    started: bool = False
    over: bool = False
    aborted: bool = False

    def __str__(self) -> str:
        return " grouped with ".join(map(str, self.parts)) or f"an event of rank {self.rank}"


@dataclass(slots=True)
class Blocked:
    """A host that waits: the condition, the reason, the launches and ranks; and how its wait ended."""

    ready: Callable[[], bool]
    why: str
    launches: tuple[Launch, ...] = ()
    ranks: Callable[[], Sequence[int]] = tuple
    woken: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wake(self, error: Exception | None = None) -> None:
        """Let the host continue, with an error or without."""
        self.error = error
        self.woken.set()


_Node = Launch | int
"""A waiting node: a launch, or a rank's host."""


class Fabric:
    """Connects the ranks of one run.

    Args:
        ranks: number of ranks.
        move: function that carries out a message, given its send and its receive, or a collective, given all
            parts by rank.
    """

    def __init__(self, ranks: int, move: Callable[[Sequence[RankOperation]], None]) -> None:
        self.ranks = ranks
        self.lock = threading.RLock()
        self.broken: NcclRuleError | None = None
        self._move = move
        self._members: dict[str, tuple[int, ...]] = {}
        self._entered: dict[str, set[int]] = defaultdict(set)
        self._streams: dict[tuple[int, str], list[Launch]] = defaultdict(list)
        self._parts: dict[tuple[Any, ...], dict[int, RankOperation]] = defaultdict(dict)
        """Parts that have not run, by key."""
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._of: dict[RankOperation, Launch] = {}
        self._blocked: dict[int, Blocked] = {}
        self._ended: set[int] = set()
        self._aborted: set[int] = set()
        self._advancing = False

    # -- calls of hosts

    def enter(self, rank: int, communicator: str, members: Sequence[int]) -> Blocked:
        """Make a communicator; the host continues when all members have entered."""
        with self.lock:
            self._members[communicator] = tuple(members)
            entered = self._entered[communicator]
            blocked = Blocked(
                lambda: entered.issuperset(members),
                f"makes {communicator}",
                ranks=lambda: [member for member in members if member not in entered],
            )
            if rank in self._aborted:
                blocked.wake(_aborted(rank))
            else:
                entered.add(rank)
                self._block(rank, blocked)
            return blocked

    def launch(self, launch: Launch) -> None:
        """Enqueue a launch on a stream; the host continues.

        Raises:
            AbortedError: the rank's communicators were aborted.
            NcclRuleError: a rule was broken before, or this launch breaks one.
        """
        with self.lock:
            if launch.rank in self._aborted:
                raise _aborted(launch.rank)
            if self.broken is not None:
                raise self.broken
            for part in launch.parts:
                part.number = self._counts[part.key]
                self._counts[part.key] += 1
                self._parts[part.key][part.number] = part
                self._of[part] = launch
            self._streams[launch.rank, launch.stream].append(launch)
            self._advance()

    def wait(self, rank: int, launches: Sequence[Launch], why: str) -> Blocked:
        """Let the host continue when the launches have run, or were aborted."""
        waited = tuple(launches)
        blocked = Blocked(lambda: all(launch.over for launch in waited), why, waited)
        with self.lock:
            self._block(rank, blocked)
        return blocked

    @contextmanager
    def host_wait(self, rank: int, ready: Callable[[], bool], why: str) -> Iterator[None]:
        """Surround a host's wait for another condition, which ``ready`` checks."""
        with self.lock:
            self._block(rank, Blocked(ready, why))
        try:
            yield
        finally:
            self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """End a host's wait."""
        with self.lock:
            self._blocked.pop(rank, None)

    def leave(self, rank: int) -> None:
        """Note that a host has ended."""
        with self.lock:
            self._ended.add(rank)
            self._advance()

    def abort(self, rank: int) -> None:
        """Abort all communicators of a rank: its launches end, and its host continues."""
        with self.lock:
            self._aborted.add(rank)
            for (whose, _), stream in self._streams.items():
                if whose == rank:
                    for launch in stream:
                        if not launch.over:
                            launch.over = launch.aborted = True
                    stream.clear()
            blocked = self._blocked.get(rank)
            if blocked is not None and not blocked.ready():
                del self._blocked[rank]
                blocked.wake(_aborted(rank))
            self._advance()

    def unfinished(self) -> list[str]:
        """Launches that have not run."""
        with self.lock:
            return [str(launch) for stream in self._streams.values() for launch in stream]

    # -- effects

    def _block(self, rank: int, blocked: Blocked) -> None:
        if self.broken is not None or blocked.ready():
            blocked.wake(self.broken)
            return
        self._blocked[rank] = blocked
        self._advance()

    def _break(self, text: str) -> None:
        if self.broken is None:
            self.broken = NcclRuleError(text)
            for blocked in list(self._blocked.values()):
                blocked.wake(self.broken)
            self._blocked.clear()

    def _advance(self) -> None:
        if self._advancing:  # called by an effect: the loop below continues
            return
        self._advancing = True
        try:
            while self.broken is None and (self._run() or self._wake()):
                pass
            if self.broken is None:
                self._look()
        finally:
            self._advancing = False

    def _run(self) -> bool:
        happened = False
        for stream in list(self._streams.values()):
            while stream and stream[0].over:
                stream.pop(0)
                happened = True
            if not stream or not all(launch.over for launch in stream[0].after):
                continue
            head = stream[0]
            if not head.parts:
                head.over = happened = True
                continue
            if not head.started:
                head.started = happened = True
            for index, part in enumerate(head.parts):
                if index not in head.moved and self.broken is None:
                    happened |= self._meet(part)
        return happened

    def _meet(self, part: RankOperation) -> bool:
        sides = self._sides(part)
        if any(side is None or not self._of[side].started or self._of[side].over for side in sides.values()):
            return False
        parts = [side for side in sides.values() if side is not None]
        kinds = {"message" if p.kind in (SEND, RECEIVE) else p.kind for p in parts}
        if len(kinds) > 1 or len({p.size for p in parts}) > 1:
            self._break("what meets by its order alone does not fit: " + " meets ".join(map(str, parts)))
            return True
        try:
            self._move(parts)
        except NcclRuleError as error:
            self._break(str(error))
            return True
        for side in parts:
            launch = self._of.pop(side)
            del self._parts[side.key][side.number]
            side.data = None
            launch.moved.add(launch.parts.index(side))
            launch.over = len(launch.moved) == len(launch.parts)
        return True

    def _sides(self, part: RankOperation) -> dict[int, RankOperation | None]:
        """Parts of an operation by rank; None if not launched yet. A send precedes its receive."""
        if part.kind in (SEND, RECEIVE):
            peer_kind = RECEIVE if part.kind == SEND else SEND
            peer_part = self._parts[part.communicator, peer_kind, part.peer, part.rank].get(part.number)
            sides = {part.rank: part, part.peer: peer_part}
            return sides if part.kind == SEND else dict(reversed(sides.items()))
        members = self._members[part.communicator]
        return {member: self._parts[part.communicator, member].get(part.number) for member in members}

    def _wake(self) -> bool:
        ready = [rank for rank, blocked in self._blocked.items() if blocked.ready()]
        for rank in ready:
            self._blocked.pop(rank).wake()
        return bool(ready)

    # -- waits

    def _look(self) -> None:
        # A deadlock: every host waits, or has ended, and nothing can happen.
        if not self._blocked or len(self._blocked.keys() | self._ended) < self.ranks:
            return
        if all(not blocked.launches and not blocked.ranks() for blocked in self._blocked.values()):
            return  # none of them waits here
        self._break(self._report())

    def _report(self) -> str:
        lines: list[str] = []
        for rank in sorted(self._blocked):
            path: list[_Node] = [rank]
            said: list[str] = []
            while True:
                text, after = self._waits(path[-1])
                said.append(text)
                if after is None or after in path:
                    break
                path.append(after)
            if after is not None:  # a circle
                return "the ranks wait for each other in a circle:\n  " + "\n  ".join(
                    said[path.index(after) :]
                )
            lines += [text for text in said if text not in lines]
        return "the ranks wait for what never comes:\n  " + "\n  ".join(lines)

    def _waits(self, node: _Node) -> tuple[str, _Node | None]:
        if isinstance(node, int):
            return self._host_waits(node)
        stream = self._streams[node.rank, node.stream]
        if node in stream and stream[0] is not node:
            return f"{node} stands behind {stream[0]} in its stream", stream[0]
        for before in node.after:
            if not before.over:
                return f"{node} comes after {before}", before
        for index, part in enumerate(node.parts):
            if index in node.moved:
                continue
            for rank, side in self._sides(part).items():
                if side is None:
                    return f"{part} waits for rank {rank}, which has not launched its side", rank
                if not self._of[side].started:
                    return f"{part} waits for {side}, which does not run yet", self._of[side]
        return f"{node} is moved", None

    def _host_waits(self, rank: int) -> tuple[str, _Node | None]:
        if rank in self._ended:
            return f"rank {rank} has ended", None
        blocked = self._blocked.get(rank)
        if blocked is None:
            return f"rank {rank} computes", None
        for launch in blocked.launches:
            if not launch.over:
                return f"rank {rank} {blocked.why}: waits for {launch}", launch
        for member in blocked.ranks():
            return f"rank {rank} {blocked.why}: waits for rank {member} to enter", member
        return f"rank {rank} {blocked.why}", None


def _aborted(rank: int) -> AbortedError:
    return AbortedError(f"NCCL communicator was aborted on rank {rank}")
