"""The strict transport between processes: all that the engine does over NCCL, on the strict groups."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from counterflow.runtime.transport.nccl import NcclTransport
from counterflow.runtime.transport.progress import Event

from .. import STRICT_PROCESSES
from . import streams
from .modes import computing
from .processes import NAME, endpoint, register


class StrictProcessTransport(NcclTransport):
    """One process's transport over the strict groups."""

    kind = STRICT_PROCESSES
    backend = NAME

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        register()
        self._running = ExitStack()
        super().__init__(device, timeout_seconds)
        self._running.enter_context(computing(endpoint().stream))

    def record_event(self) -> Event:
        """See ``OrderedTransport``."""
        return (streams.current_stream() or endpoint().stream).record_event()

    def close(self) -> None:
        """See ``Transport.close``."""
        if not self.closed:
            self._running.close()
        super().close()
