"""Ranks that are threads of one process, each with its end of one fabric."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from . import modes
from .fabric import Fabric, Launch, NcclRuleError, Wake
from .group import StrictGroup, move
from .streams import Stream

_T = TypeVar("_T")


class HostEndpoint(ABC):
    """What endpoints have in common: a host that is held until it is woken.

    Args:
        rank: this one's number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stream = Stream(self.wait)

    @abstractmethod
    def wait(self, launches: Sequence[Launch], why: str) -> None:
        """Hold the host until something has run."""

    def held(self, woken: threading.Event, peer: int) -> None:
        """Hold the host, for a rank or (-1) several."""
        del peer
        woken.wait()

    def hold(self, begin: Callable[[Wake], None], peer: int) -> None:
        """Hold the host until what ``begin`` is given was called; raises what that was given."""
        woken = threading.Event()
        why: list[BaseException] = []

        def wake(error: BaseException | None) -> None:
            if error is not None:
                why.append(error)
            woken.set()

        begin(wake)
        if not woken.is_set():
            self.held(woken, peer)
        if why:
            raise type(why[0])(*why[0].args) from why[0]


class ThreadEndpoint(HostEndpoint):
    """See ``Endpoint``.

    Args:
        fabric: what connects the threads.
        rank: this one's number.
    """

    def __init__(self, fabric: Fabric, rank: int) -> None:
        super().__init__(rank)
        self.fabric = fabric

    def enter(self, communicator: str, members: Sequence[int]) -> None:
        """See ``Endpoint``."""
        self.hold(lambda wake: self.fabric.enter(self.rank, communicator, members, wake), -1)

    def launch(self, launch: Launch) -> None:
        """See ``Endpoint``."""
        self.fabric.launch(launch)

    def wait(self, launches: Sequence[Launch], why: str) -> None:
        """Hold the host until something has run."""
        self.hold(lambda wake: self.fabric.wait(self.rank, launches, why, wake), peer_of(launches))

    def abort(self) -> None:
        """See ``Endpoint``."""
        self.fabric.abort(self.rank)

    def group(self, ranks: Sequence[int], name: str) -> StrictGroup:
        """A group of this rank and others."""
        return StrictGroup(self, ranks, name)


def peer_of(launches: Sequence[Launch]) -> int:
    """The rank that all of these wait for; -1 if it is not one."""
    peers = {part.peer for launch in launches if not launch.over for part in launch.parts}
    return peers.pop() if len(peers) == 1 else -1


def thread_fabric(ranks: int) -> Fabric:
    """What connects so many threads."""
    return Fabric(ranks, move)


def run_ranks(function: Callable[[ThreadEndpoint], _T], ranks: int) -> list[_T]:
    """What a function gives on each of so many ranks; the first rank's error, if it raises.

    Raises:
        NcclRuleError: the ranks would hang on GPUs, or left something that never runs.
    """
    fabric = thread_fabric(ranks)
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        endpoint = ThreadEndpoint(fabric, rank)
        try:
            with modes.computing(endpoint.stream):
                results[rank] = function(endpoint)
                endpoint.stream.synchronize("is at its end")
        except BaseException as error:  # told to the caller
            errors[rank] = error
        finally:
            fabric.leave(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    if left := fabric.unfinished():
        raise NcclRuleError("at the end these had not run: " + "; ".join(left))
    return [results[rank] for rank in range(ranks)]
