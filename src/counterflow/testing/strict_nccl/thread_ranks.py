"""Ranks that are threads of one process, each with its end of one fabric."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from . import operator_modes
from .fabric import Blocked, Fabric, Launch, NcclRuleError
from .group import StrictGroup, move
from .streams import Stream

_T = TypeVar("_T")


class ThreadEndpoint:
    """One rank's end of a fabric.

    Args:
        fabric: fabric that connects the threads.
        rank: number of this rank.
    """

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank
        self.stream = Stream(self.wait)
        """Default stream of the rank's computation."""

    def enter(self, communicator: str, members: Sequence[int]) -> None:
        """Make a communicator; wait until all members have entered."""
        self._hold(self.fabric.enter(self.rank, communicator, members), -1)

    def wait(self, launches: Sequence[Launch], why: str) -> None:
        """Block the host until launches have run."""
        peers = {part.peer for launch in launches if not launch.over for part in launch.parts}
        peer = peers.pop() if len(peers) == 1 else -1
        self._hold(self.fabric.wait(self.rank, launches, why), peer)

    def block_host(self, woken: threading.Event, peer: int) -> None:
        """Block the host, for a rank or, with -1, for several."""
        del peer
        woken.wait()

    def _hold(self, blocked: Blocked, peer: int) -> None:
        if not blocked.woken.is_set():
            self.block_host(blocked.woken, peer)
        if blocked.error is not None:
            raise type(blocked.error)(*blocked.error.args) from blocked.error

    def abort(self) -> None:
        """Abort all communicators of this rank."""
        self.fabric.abort(self.rank)

    def group(self, ranks: Sequence[int], name: str) -> StrictGroup:
        """A group of this rank and others."""
        return StrictGroup(self, ranks, name)


def thread_fabric(ranks: int) -> Fabric:
    """A fabric for this many threads."""
    return Fabric(ranks, move)


def run_ranks(function: Callable[[ThreadEndpoint], _T], ranks: int) -> list[_T]:
    """Results of a function on each of this many ranks; raises the first rank's error.

    Raises:
        NcclRuleError: the ranks would hang on GPUs, or left something that never runs.
    """
    fabric = thread_fabric(ranks)
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        endpoint = ThreadEndpoint(fabric, rank)
        try:
            with operator_modes.computing(endpoint.stream):
                results[rank] = function(endpoint)
                endpoint.stream.synchronize("is at its end")
        except BaseException as error:  # reported to the caller
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
    if unfinished := fabric.unfinished():
        raise NcclRuleError("at the end these had not run: " + "; ".join(unfinished))
    return [results[rank] for rank in range(ranks)]
