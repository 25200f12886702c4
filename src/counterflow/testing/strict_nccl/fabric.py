"""What NCCL would do with what the ranks launch: communicators, streams, matching; and who waits for what.

The rules:

* A communicator is made at its first use, and its making holds the host until all members have entered.
* What a rank launches on one stream runs in that order, and not before the events it was told to wait for.
* Messages of two ranks on one communicator match by their order alone. A message ends when both its sides
  run: a send whose receive stands behind something else holds its stream.
* A collective runs when all members run it: the n-th of one rank on a communicator is the n-th of the others.
* Nothing of this waits on a host: only making a communicator, and waiting for a stream, do.

Invariant: all that can happen has happened when a call returns. So where every host waits and none of what
they wait for has happened, nothing ever will: that is reported at once, with the circle, instead of a hang.
No clock is read. It moves no tensors itself (``move`` does) and knows nothing of torch.
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
    """A communicator is used after it was aborted."""


SEND, RECEIVE = "send", "receive"


@dataclass(eq=False, slots=True)
class Part:
    """One operation of one rank on one communicator.

    Attributes:
        kind: ``SEND``, ``RECEIVE`` or a collective's name, which all ranks have to agree on.
        rank: whose it is.
        communicator: its name.
        size: what both sides of a message, or all of a collective, have to agree on.
        peer: of a message, the other rank.
        how: of a collective, what is made of what all give.
        data: for ``move``.
        number: which of its kind it is on the communicator (and with the peer), from 0.
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
        """What its number counts."""
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
    """What is launched at once on a rank's stream: one operation, or a group of them.

    Attributes:
        rank: whose.
        stream: on which it runs.
        parts: the operations; without any it is an event.
        after: what it waits for beside its stream.
        over: whether it has run, or was aborted.
        aborted: whether its communicators were aborted before it had run.
    """

    rank: int
    stream: str
    parts: tuple[Part, ...]
    after: tuple[Launch, ...] = ()
    moved: set[int] = field(default_factory=set)
    started: bool = False
    over: bool = False
    aborted: bool = False

    def __str__(self) -> str:
        return " grouped with ".join(map(str, self.parts)) or f"an event of rank {self.rank}"


@dataclass(slots=True)
class Blocked:
    """A host that waits: until when, why, for which launches and ranks; and how its wait ended."""

    ready: Callable[[], bool]
    why: str
    launches: tuple[Launch, ...] = ()
    ranks: Callable[[], Sequence[int]] = tuple
    woken: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wake(self, error: Exception | None = None) -> None:
        """Let the host go on, with an error or without."""
        self.error = error
        self.woken.set()


_Node = Launch | int
"""What can wait: a launch, or a rank's host."""


class Fabric:
    """What connects the ranks of one run.

    Args:
        ranks: how many there are.
        move: carries out a message, given its send and its receive, or a collective, given all parts by rank.
    """

    def __init__(self, ranks: int, move: Callable[[Sequence[Part]], None]) -> None:
        self.ranks = ranks
        self.lock = threading.RLock()
        self.broken: NcclRuleError | None = None
        self._move = move
        self._members: dict[str, tuple[int, ...]] = {}
        self._entered: dict[str, set[int]] = defaultdict(set)
        self._streams: dict[tuple[int, str], list[Launch]] = defaultdict(list)
        self._parts: dict[tuple[Any, ...], dict[int, Part]] = defaultdict(dict)
        """By what their numbers count, those that have not run."""
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._of: dict[Part, Launch] = {}
        self._blocked: dict[int, Blocked] = {}
        self._left: set[int] = set()
        self._aborted: set[int] = set()
        self._advancing = False

    # -- what hosts do

    def enter(self, rank: int, communicator: str, members: Sequence[int]) -> Blocked:
        """Make a communicator; the host goes on when all members have entered."""
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
        """Put something on a stream; the host goes on.

        Raises:
            AbortedError: the rank's communicators were aborted.
            NcclRuleError: a rule was broken before, or is by this.
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
        """The host goes on when something has run, or was aborted."""
        waited = tuple(launches)
        blocked = Blocked(lambda: all(one.over for one in waited), why, waited)
        with self.lock:
            self._block(rank, blocked)
        return blocked

    @contextmanager
    def elsewhere(self, rank: int, ready: Callable[[], bool], why: str) -> Iterator[None]:
        """Around a wait of a host for something else, which has come when ``ready`` says so."""
        with self.lock:
            self._block(rank, Blocked(ready, why))
        try:
            yield
        finally:
            self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """A host waits no more."""
        with self.lock:
            self._blocked.pop(rank, None)

    def leave(self, rank: int) -> None:
        """A host has ended."""
        with self.lock:
            self._left.add(rank)
            self._advance()

    def abort(self, rank: int) -> None:
        """Abort all communicators of a rank: what it launched ends, and its host goes on."""
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
        """What was launched and has not run."""
        with self.lock:
            return [str(launch) for stream in self._streams.values() for launch in stream]

    # -- what happens then

    def _block(self, rank: int, blocked: Blocked) -> None:
        if self.broken is not None or blocked.ready():
            blocked.wake(self.broken)
            return
        self._blocked[rank] = blocked
        self._advance()

    def _break(self, text: str) -> None:
        """End all waits with what is wrong; only the first counts."""
        if self.broken is None:
            self.broken = NcclRuleError(text)
            for blocked in list(self._blocked.values()):
                blocked.wake(self.broken)
            self._blocked.clear()

    def _advance(self) -> None:
        """Let all happen that can."""
        if self._advancing:  # called by what happens: the loop below goes on
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
        """Start what may start, and move what has met; whether anything happened."""
        happened = False
        for stream in list(self._streams.values()):
            while stream and stream[0].over:
                stream.pop(0)
                happened = True
            if not stream or not all(one.over for one in stream[0].after):
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

    def _meet(self, part: Part) -> bool:
        """Move what an operation is one side of, if all sides run; whether they do."""
        sides = self._sides(part)
        if any(side is None or not self._of[side].started or self._of[side].over for side in sides.values()):
            return False
        parts = [side for side in sides.values() if side is not None]
        kinds = {"message" if one.kind in (SEND, RECEIVE) else one.kind for one in parts}
        if len(kinds) > 1 or len({one.size for one in parts}) > 1:
            self._break("what meets by its order alone does not fit: " + " meets ".join(map(str, parts)))
            return True
        try:
            self._move(parts)
        except NcclRuleError as error:
            self._break(str(error))
            return True
        for one in parts:
            launch = self._of.pop(one)
            del self._parts[one.key][one.number]
            one.data = None
            launch.moved.add(launch.parts.index(one))
            launch.over = len(launch.moved) == len(launch.parts)
        return True

    def _sides(self, part: Part) -> dict[int, Part | None]:
        """By rank what takes part; None where it is not launched yet. A send comes before its receive."""
        if part.kind in (SEND, RECEIVE):
            other = RECEIVE if part.kind == SEND else SEND
            theirs = self._parts[part.communicator, other, part.peer, part.rank].get(part.number)
            sides = {part.rank: part, part.peer: theirs}
            return sides if part.kind == SEND else dict(reversed(sides.items()))
        members = self._members[part.communicator]
        return {member: self._parts[part.communicator, member].get(part.number) for member in members}

    def _wake(self) -> bool:
        """Let hosts go on whose wait is over."""
        ready = [rank for rank, blocked in self._blocked.items() if blocked.ready()]
        for rank in ready:
            self._blocked.pop(rank).wake()
        return bool(ready)

    # -- who waits for what

    def _look(self) -> None:
        """Report a deadlock, if there is one: every host waits, or has ended, and nothing can happen."""
        if not self._blocked or len(self._blocked.keys() | self._left) < self.ranks:
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
        """What something waits for, in words, and who that is."""
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
        if rank in self._left:
            return f"rank {rank} has ended", None
        blocked = self._blocked.get(rank)
        if blocked is None:
            return f"rank {rank} computes", None
        for launch in blocked.launches:
            if not launch.over:
                return f"rank {rank} {blocked.why}: waits for {launch}", launch
        for other in blocked.ranks():
            return f"rank {rank} {blocked.why}: waits for rank {other} to enter", other
        return f"rank {rank} {blocked.why}", None


def _aborted(rank: int) -> AbortedError:
    return AbortedError(f"NCCL communicator was aborted on rank {rank}")
