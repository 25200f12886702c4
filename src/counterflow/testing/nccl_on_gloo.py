"""The runtime's NCCL path in processes without GPUs: only the process groups are Gloo's.

It is for tests of the watch, of failures and of ends, because processes, unlike threads, can be killed. A
wait blocks the host here, so NCCL's own rules are not checked; ``strict_nccl`` checks them, between threads.
"""

from __future__ import annotations

from counterflow.runtime.transport.spi import NcclTransport

from . import NCCL_ON_GLOO


class Passed:
    """An event of a device that never runs behind its host."""

    def query(self) -> bool:
        """True if the device has reached the event."""
        return True

    def synchronize(self) -> None:
        """Block the host until the event."""


class NcclOnGlooTransport(NcclTransport):
    """One process's transport: NCCL's, with process groups of Gloo."""

    kind = NCCL_ON_GLOO
    backend = "gloo"

    def record_event(self) -> Passed:
        """An event that the device has reached, see ``OrderedTransport``."""
        return Passed()
