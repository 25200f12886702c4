"""Resources of a transport that several pipelines share: tags of messages, groups for collectives.

Invariant: all workers open and close their pipelines' leases in one order, because all make the same calls;
the pipelines that the garbage collector has ended are agreed upon, never assumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from ..transport.base import Group, Transport

Owner = TypeVar("Owner")

_open: weakref.WeakKeyDictionary[Transport, list[Lease[object]]] = weakref.WeakKeyDictionary()


@dataclass(eq=False, slots=True)
class Lease(Generic[Owner]):
    """Resources of one pipeline; make it with ``open_lease``."""

    transport: Transport
    number: int
    owner: weakref.ref[Owner]
    groups: list[Group] = field(default_factory=list)
    ready: bool = False
    """True once its pipeline is complete; one that was refused may stay alive with its error."""
    closed: bool = False

    def other_owners(self) -> Iterator[Owner]:
        """All other pipelines that are complete, alive and not closed."""
        for lease in _open[self.transport]:
            owner = lease.owner()
            if lease is not self and lease.ready and owner is not None:
                yield cast("Owner", owner)

    def close(self) -> None:
        """Release all resources; all workers call it, when nothing is in flight."""
        if not self.closed:
            self.transport.gather([])  # a group is not ended while somebody still waits on it
            self._end()

    def _end(self) -> None:
        self.closed = True
        self.transport.release(self.groups)
        self.groups.clear()
        _open[self.transport].remove(cast("Lease[object]", self))


def open_lease(transport: Transport, owner: Owner) -> Lease[Owner]:
    """Open a pipeline's lease; all workers call it. Ends those of pipelines that are gone on every worker."""
    leases = _open.setdefault(transport, [])
    if leases:
        gone = {lease.number for lease in leases if lease.owner() is None}
        everywhere = set.intersection(*cast("list[set[int]]", transport.gather_objects(gone)))
        for lease in [lease for lease in leases if lease.number in everywhere]:
            lease._end()  # noqa: SLF001 - of this module
    new = Lease(transport, leases[-1].number + 1 if leases else 0, weakref.ref(owner))
    leases.append(cast("Lease[object]", new))
    return new
