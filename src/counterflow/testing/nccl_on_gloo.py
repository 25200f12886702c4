"""All that the engine does over NCCL, in processes without GPUs: only the process groups are Gloo's.

For tests of the watch, of failures and of ends: processes, unlike threads, can be killed. A wait holds its
host here, so NCCL's own rules are not checked; ``strict_nccl`` checks them, between threads.
"""

from __future__ import annotations

from counterflow.runtime.transport.nccl import NcclTransport

from . import NCCL_ON_GLOO


class Passed:
    """An event of a device that is never behind its host."""

    def query(self) -> bool:
        """Whether the device has come to the event."""
        return True

    def synchronize(self) -> None:
        """Hold the host until then."""


class NcclOnGlooTransport(NcclTransport):
    """One process's transport: NCCL's, with process groups of Gloo."""

    kind = NCCL_ON_GLOO
    backend = "gloo"

    def record_event(self) -> Passed:
        """See ``OrderedTransport``."""
        return Passed()
