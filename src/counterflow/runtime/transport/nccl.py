"""The transport of GPUs: NCCL's process groups for tensors, Gloo for the control plane.

A host does not see what its device waits for; a watch does, and ends the wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
from torch.distributed import ProcessGroup
from typing_extensions import override

from counterflow.common.tensors.torch_private import abort, flight_record, nccl_options
from counterflow.errors import CounterflowError

from .base import Group, Status, TimedOut, member
from .control import DevicePlane, ProcessControl
from .gpu_environment import before_nccl, launches_hold
from .kinds import NCCL
from .ordered import OrderedTransport
from .progress import Event
from .worker_watch import worker_error

_LOG = logging.getLogger(__name__)

_RECORDED = "2000"
"""Number of operations in NCCL's flight recorder."""

_ABORT_SECONDS = 5.0
"""Maximum time to wait for communicators that are aborted."""


_MESSAGE_CTAS = 4
"""Blocks of threads of a GPU that carry a message. A posted receive holds its blocks until the message comes;
by itself NCCL takes up to 32, a quarter of a large GPU, from the op that runs meanwhile."""


def message_options(timeout: timedelta) -> object:
    """Options of groups for messages; what NCCL's or torch's own variables say is left to these.

    A message is short and an op of another worker waits for it: its stream has priority, so that it need not
    wait for the many blocks of an op's kernels. It has few blocks, in no clusters, which would want theirs at
    once and side by side. Sums have NCCL's own choice: they are long, and nothing else is to be done.
    """
    config = {}
    if not {"NCCL_MIN_CTAS", "NCCL_MAX_CTAS"} & os.environ.keys():
        config["max_ctas"] = _MESSAGE_CTAS
    if "NCCL_CGA_CLUSTER_SIZE" not in os.environ:
        config["cga_cluster_size"] = 0
    high = "TORCH_NCCL_HIGH_PRIORITY" not in os.environ
    return nccl_options(timeout, high_priority=high, config=config)


def _aborted(group: ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # aborted already
        abort(group)


_LONG = timedelta(days=30)
"""Torch's own limit, which begins as an operation is launched: a long step would exceed one that suits hangs.
The watch sees what the device waits for, and how long."""


class NcclTransport(OrderedTransport, DevicePlane):
    """One process's transport over NCCL; all ranks make one at the same time.

    Args:
        device: device of this worker's computation.
        timeout_seconds: maximum time of any wait.
    """

    kind = NCCL
    backend = "nccl"
    control: ProcessControl
    _recorded = False

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        super().__init__(ProcessControl(device, timeout_seconds), device)
        self._data_groups: list[ProcessGroup] = []
        self.control.plane = self
        try:
            self.make_data_plane()
        except BaseException:
            self.control.stop_watch()
            raise

    def make_data_plane(self) -> None:
        """Make the groups that carry tensors of known shapes."""
        before_nccl()
        self.launches_hold = launches_hold()
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its former name
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)
        self.make_groups()

    @override
    def data_group(self, ranks: Sequence[int], name: str, *, messages: bool = False) -> ProcessGroup | None:
        del name
        options = message_options(_LONG) if messages and self.backend == NcclTransport.backend else None
        group = self.control.new_group(ranks, self.backend, _LONG, options)
        if group is not None:
            self._data_groups.append(group)
        return group

    @override
    def release(self, groups: Iterable[Group]) -> None:
        handles = [member(group) for group in groups if group.handle is not None]
        if handles:
            self.progress.synchronize()  # nothing is in flight on them
        for handle in handles:
            self._data_groups.remove(handle)
            self.control.end_group(handle)

    @override
    def device_status(self) -> Status:
        return self.progress.status()

    @override
    def look_at_device(self) -> CounterflowError | None:
        status = self.device_status()
        waits = status is not self.status and status.waiting_for is not None
        if not waits or time.monotonic() - status.since < self.timeout_seconds:
            return None
        peer = status.waiting_for
        late = TimedOut(peer if peer is not None and peer >= 0 else None, self.timeout_seconds)
        self.control.late = late
        return worker_error(f"worker {self.rank}, {status.doing}", late, self)

    @override
    def abort(self) -> None:
        """The host continues with undefined data, and gets the error at the
        next agreement of the workers.
        """
        self.write_flight_record()
        # Each in a thread: even here NCCL may wait for ever, and the aborting thread has more to do.
        threads = [Thread(target=_aborted, args=(group,), daemon=True) for group in self._data_groups]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _ABORT_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def write_flight_record(self) -> None:
        """Write NCCL's flight record, once: operations that were launched, and those that never ran."""
        record, self._recorded = None if self._recorded else flight_record(), True
        if record is not None:
            begin = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
            if begin is None:
                begin = str(self.record_folder / "nccl_trace_rank_")  # as torch names them
            path = Path(f"{begin}{self.rank}")
            with contextlib.suppress(OSError):  # there is already a failure to report
                path.write_bytes(record)
                _LOG.warning("worker %d: what NCCL had launched is in %s; see torchfrtrace", self.rank, path)

    @override
    def close(self) -> None:
        if not (self.control.closed or self.control.failed):
            with contextlib.suppress(RuntimeError):
                self.progress.synchronize()  # nothing is in flight
        super().close()

    @override
    def record_event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # blocking: the host sleeps, it does not spin
        event.record()
        return event
