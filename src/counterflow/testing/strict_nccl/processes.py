"""Ranks that are processes of one machine: one of them has the fabric, the others ask it.

Each rank has one connection to it. What hosts do goes there as they do it; back comes what to read, what to
write, what has run, and when a held host may go on. All that comes is handled by one thread, in its order.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import tempfile
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.runtime.torch_private import default_store, has_backend

from . import streams
from .fabric import RECEIVE, AbortedError, Fabric, Launch, NcclRuleError, Part, Wake
from .group import StrictGroup, carried_out, read, write
from .threads import HostEndpoint, peer_of

NAME = "strict_nccl"
"""Of the backend."""

_KEY = "counterflow/strict_nccl"


class FabricServer:
    """The fabric of processes, in one of them.

    Args:
        ranks: how many there are.
        address: a path at which they come.
        key: which they have to know.
    """

    def __init__(self, ranks: int, address: str, key: bytes) -> None:
        self._fabric = Fabric(ranks, self._move, self._ended)
        self._outgoing: dict[int, SimpleQueue[bytes]] = {}
        self._launches: dict[tuple[int, int], Launch] = {}
        self._ids: dict[Launch, int] = {}
        self._asked: dict[tuple[int, int, int], Any] = {}
        self._listener = Listener(address, "AF_UNIX", authkey=key)
        threading.Thread(target=self._accept, args=(ranks,), daemon=True).start()

    def _accept(self, ranks: int) -> None:
        for _ in range(ranks):
            connection = self._listener.accept()
            rank: int = pickle.loads(connection.recv_bytes())  # noqa: S301 - it knows the key
            outgoing = self._outgoing[rank] = SimpleQueue()
            threading.Thread(target=self._send, args=(connection, outgoing), daemon=True).start()
            threading.Thread(target=self._serve, args=(rank, connection), daemon=True).start()
        self._listener.close()

    def _serve(self, rank: int, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            while True:
                what, *args = pickle.loads(connection.recv_bytes())  # noqa: S301 - it knows the key
                with self._fabric.lock:
                    getattr(self, f"_on_{what}")(rank, *args)

    @staticmethod
    def _send(connection: Connection, outgoing: SimpleQueue[bytes]) -> None:
        """Apart, so that who reads never waits for who is told."""
        with contextlib.suppress(OSError):  # the process has ended
            while True:
                connection.send_bytes(outgoing.get())

    def _tell(self, rank: int, *message: Any) -> None:
        self._outgoing[rank].put(pickle.dumps(message))

    def _waker(self, rank: int) -> Wake:
        return lambda error: self._tell(rank, "woken", error)

    def _on_enter(self, rank: int, communicator: str, members: Sequence[int]) -> None:
        self._fabric.enter(rank, communicator, members, self._waker(rank))

    def _on_launch(
        self, rank: int, number: int, stream: str, parts: Sequence[Part], after: Sequence[int]
    ) -> None:
        launch = Launch(rank, stream, tuple(parts), tuple(self._known(rank, after)))
        self._launches[rank, number], self._ids[launch] = launch, number
        try:
            self._fabric.launch(launch)
        except (AbortedError, NcclRuleError) as error:
            self._tell(rank, "refused", error)

    def _on_wait(self, rank: int, numbers: Sequence[int], why: str) -> None:
        self._fabric.wait(rank, self._known(rank, numbers), why, self._waker(rank))

    def _on_give_up(self, rank: int) -> None:
        self._fabric.give_up(rank)

    def _on_abort(self, rank: int) -> None:
        self._fabric.abort(rank)

    def _on_leave(self, rank: int) -> None:
        self._fabric.leave(rank)

    def _on_gives(self, rank: int, number: int, index: int, found: Tensor | NcclRuleError) -> None:
        take = self._asked.pop((rank, number, index), None)
        if take is not None:  # nothing was aborted meanwhile
            take(found)

    def _known(self, rank: int, numbers: Sequence[int]) -> list[Launch]:
        """Those that have not run."""
        return [launch for n in numbers if (launch := self._launches.get((rank, n))) is not None]

    def _ended(self, launch: Launch) -> None:
        number = self._ids.pop(launch)
        del self._launches[launch.rank, number]
        self._tell(launch.rank, "over", number, launch.aborted)

    def _place(self, part: Part) -> tuple[int, int, int]:
        launch = self._fabric.launch_of(part)
        return part.rank, self._ids[launch], launch.parts.index(part)

    def _move(self, parts: Sequence[Part], over: Any) -> None:
        """See ``Fabric``: ask those that give, and tell those that take."""
        places = {part: self._place(part) for part in parts}
        givers = [part for part in parts if part.kind != RECEIVE]
        given: dict[Part, Tensor] = {}

        def give(part: Part, found: Tensor) -> None:
            rank, number, index = places[part]
            self._tell(rank, "write", number, index, found)

        def take(part: Part, found: Tensor | NcclRuleError) -> None:
            if isinstance(found, NcclRuleError):
                self._fabric.report(str(found))
                return
            given[part] = found
            if len(given) == len(givers):
                carried_out(parts, [given[each] for each in givers], give)
                over()

        for part in givers:
            rank, number, index = places[part]
            self._asked[places[part]] = lambda found, part=part: take(part, found)
            self._tell(rank, "read", number, index)


class ProcessEndpoint(HostEndpoint):
    """See ``Endpoint``: of a process that asks the fabric of another one.

    Args:
        rank: this one's number.
        address: where that is.
        key: which it wants.
    """

    def __init__(self, rank: int, address: str, key: bytes) -> None:
        super().__init__(rank)
        self._lock = threading.RLock()
        self._launches: dict[int, Launch] = {}
        self._numbers: dict[Launch, int] = {}
        self._count = 0
        self._wake: Wake | None = None
        self._wrong: BaseException | None = None
        self._connection = Client(address, "AF_UNIX", authkey=key)
        self._tell(rank)
        threading.Thread(target=self._listen, name="counterflow strict nccl", daemon=True).start()

    def enter(self, communicator: str, members: Sequence[int]) -> None:
        """See ``Endpoint``."""
        self._ask("enter", communicator, tuple(members))

    def wait(self, launches: Sequence[Launch], why: str) -> None:
        """See ``HostEndpoint``."""
        with self._lock:
            numbers = [self._numbers[launch] for launch in launches if not launch.over]
        if numbers:
            self._ask("wait", numbers, why, peer=peer_of(launches))

    def _ask(self, *message: Any, peer: int = -1) -> None:
        def begin(wake: Wake) -> None:
            with self._lock:
                if self._wrong is not None:
                    aborted = isinstance(self._wrong, AbortedError) and message[0] == "wait"
                    wake(None if aborted else self._wrong)
                    return
                self._wake = wake
                self._tell(message)

        self.hold(begin, peer)

    def launch(self, launch: Launch) -> None:
        """See ``Endpoint``."""
        with self._lock:
            if self._wrong is not None:
                raise type(self._wrong)(*self._wrong.args)
            self._count += 1
            self._launches[self._count], self._numbers[launch] = launch, self._count
            bare = [
                Part(part.kind, part.rank, part.communicator, part.size, part.peer, part.how)
                for part in launch.parts
            ]
            after = [self._numbers[one] for one in launch.after if one in self._numbers]
            self._tell(("launch", self._count, launch.stream, bare, after))

    def abort(self) -> None:
        """See ``Endpoint``; here at once, whoever has the fabric."""
        with self._lock:
            self._tell(("abort",))
            self._end(AbortedError(f"NCCL communicator was aborted on rank {self.rank}"))

    def leave(self) -> None:
        """The rank has ended."""
        self._tell(("leave",))

    def give_up(self) -> None:
        """The host waits no more."""
        self._wake = None
        self._tell(("give_up",))

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # who has the fabric is gone: it tells no more, and that is seen
            self._connection.send_bytes(pickle.dumps(message))

    def _end(self, why: BaseException) -> None:
        """Nothing is launched any more, and what was has no end."""
        self._wrong = self._wrong or why
        for launch in self._launches.values():
            launch.over = launch.aborted = True
        self._launches.clear()
        self._numbers.clear()
        self._woken(None)

    def _listen(self) -> None:
        try:
            while True:
                what, *args = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - of this run
                with self._lock:
                    getattr(self, f"_{what}")(*args)
        except (EOFError, OSError):
            with self._lock:
                self._end(AbortedError("the process that has the fabric is gone"))

    def _woken(self, error: BaseException | None) -> None:
        wake, self._wake = self._wake, None
        if isinstance(error, NcclRuleError):
            self._wrong = error
        if wake is not None:
            wake(error)

    def _refused(self, error: BaseException) -> None:
        self._wrong = self._wrong or error

    def _over(self, number: int, aborted: bool) -> None:
        launch = self._launches.pop(number, None)
        if launch is not None:
            del self._numbers[launch]
            launch.aborted = aborted
            launch.over = True

    def _read(self, number: int, index: int) -> None:
        if number in self._launches:
            found: Tensor | NcclRuleError
            try:
                with streams.as_the_network():
                    found = read(self._launches[number].parts[index]).clone()
            except NcclRuleError as error:
                found = error
            self._tell(("gives", number, index, found))

    def _write(self, number: int, index: int, found: Tensor) -> None:
        if number in self._launches:
            with streams.as_the_network():
                write(self._launches[number].parts[index], found)


_endpoints: weakref.WeakKeyDictionary[Any, ProcessEndpoint] = weakref.WeakKeyDictionary()
"""By world."""


def endpoint() -> ProcessEndpoint:
    """The process's end, made at the first call; all ranks of the world make it."""
    world = dist.group.WORLD
    if world not in _endpoints:
        store, rank = default_store(), dist.get_rank()
        if rank == 0:
            address, key = str(Path(tempfile.mkdtemp(prefix="counterflow-")) / "fabric"), secrets.token_hex()
            FabricServer(dist.get_world_size(), address, key.encode())
            store.set(_KEY, f"{key} {address}")
        key, _, address = store.get(_KEY).decode().partition(" ")
        _endpoints[world] = ProcessEndpoint(rank, address, key.encode())
    return _endpoints[world]


def register() -> None:
    """Let torch.distributed make groups with ``backend="strict_nccl"``."""
    if not has_backend(NAME):
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu"])


def _group(options: Any, of_backend: Any) -> StrictGroup:
    """What torch.distributed makes a group of."""
    del of_backend
    ranks = options.global_ranks_in_group or range(options.group_size)
    if not dist.is_initialized():
        raise ConfigError("begin torch.distributed with gloo, and make groups of strict_nccl then")
    return StrictGroup(endpoint(), list(ranks), f"group {options.group_id}")
