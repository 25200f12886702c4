"""A pretended device: on a CPU, the compute device is separate from the host.

It imitates the following behaviour of GPUs, which breaks programs that were tested on CPUs alone:

* ``tensor.device`` is ``pretended:RANK``, so the runtime's code for devices runs here; an operator does not
accept tensors of the host and of the device together, except for numbers and indices of the host. * A copy to
the host with ``non_blocking=True`` has no values before its event, stream or device is synchronised. A copy
out of pinned memory reads it when the device reaches the copy. * Reading memory of the device makes the host
wait (``item``, ``tolist``, ``cpu``), or is refused (``numpy``). * Events complete after a random number of
queries; an error of the device is raised by whichever call follows.

A thread computes at once, so the lag affects what the host sees, not when the device computes. It does not
imitate races between two streams of one device, memory that is freed while another stream reads it, or
functions of torch that ask C++ for the device (autocast is that of the CPU: ``devices.autocast_type``).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from counterflow.common.tensors.torch_private import register_device_module, rename_spare_backend

from . import captured_graphs, streams
from .device_memory import place_of
from .streams import Stream

NAME = "pretended"
_MOST_LAG = 3
"""Maximum number of queries before an event completes."""

_naming = threading.Lock()


class Device:
    """One worker's pretended device.

    Args:
        index: number of the device, which is the worker's rank.
        wait: function that blocks the host until launches have run.
        doing: returns what the worker does, for ``fails``.
    """

    def __init__(
        self, index: int, wait: streams.Wait, doing: Callable[[], object] = lambda: "computing"
    ) -> None:
        register()
        drawn = random.Random(index)  # noqa: S311 - a draw, the same in every run
        self.handle = torch.device(NAME, index)
        self.new_stream = partial(Stream, wait, lambda: drawn.randint(0, _MOST_LAG), self.look)
        self.stream = self.new_stream()
        self.doing = doing
        self.fails: Callable[[object], bool] | None = None
        """Whether launches while the worker does this end with an error of the device."""
        self.error: torch.AcceleratorError | None = None

    def __eq__(self, device: object) -> bool:
        """Devices with the same number are equal: tensors of an earlier run are still on the device."""
        return isinstance(device, Device) and device.handle == self.handle

    def __hash__(self) -> int:
        return hash(self.handle)

    def __repr__(self) -> str:
        """The device's name in torch's form."""
        return str(self.handle)

    def look(self) -> None:
        """Raise the device's error if there was one, as any call would."""
        if self.error is not None:
            raise torch.AcceleratorError(*self.error.args)

    def launched(self) -> None:
        """Note that an operator is launched; its error is raised later."""
        self.look()
        if self.fails is not None and self.fails(self.doing()):
            self.error = torch.AcceleratorError(
                f"{self.handle}: an illegal memory access was encountered; errors of kernels might be "
                "reported at some other call, so the stacktrace below might be incorrect"
            )

    def synchronize(self, why: str = "waits for its device") -> None:
        """Block the host until the device has finished."""
        captured_graphs.refuse_in_capture(why)
        (streams.current_stream() or self.stream).synchronize(why)


class _ThreadDevice(threading.local):
    device: Device | None = None


_thread = _ThreadDevice()


def current() -> Device | None:
    """The pretended device on which this thread computes."""
    return _thread.device


@contextmanager
def on(device: Device | None) -> Iterator[None]:
    """Compute on a device; None: on the host alone, as during a copy between the two."""
    before, _thread.device = _thread.device, device
    try:
        yield
    finally:
        _thread.device = before


def refuse_elsewhere(tensor: Tensor) -> None:
    """Refuse a tensor that is not on this thread's device, like a process group of devices.

    Raises:
        RuntimeError: the tensor is on the host, or on another worker's device.
    """
    captured_graphs.refuse_in_capture("a collective")
    device, place = _thread.device, place_of(tensor)
    if device is None or place is None or place == device:
        return
    if isinstance(place, Device):
        raise RuntimeError(f"a tensor of {place} was given to a process group of {device}")
    raise RuntimeError("No backend type associated with device type cpu")  # the message of torch.distributed


def refuse_on_device(tensor: Tensor) -> None:
    """Refuse a tensor that is on a device, like a process group of the host.

    Raises:
        RuntimeError: the tensor is on a device.
    """
    if isinstance(place_of(tensor), Device):
        raise RuntimeError(f"No backend type associated with device type {NAME}")


# -- the module that torch.get_device_module returns


class StrictEvent:
    """Imitates ``torch.cuda.Event``."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        del enable_timing, blocking
        self.recorded: streams.StreamEvent | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event at the end of a stream."""
        self.recorded = (stream or current_stream()).record_event()

    def query(self) -> bool:
        """True if the event has completed."""
        captured_graphs.refuse_in_capture("queries an event")
        return self.recorded is None or self.recorded.query()

    def synchronize(self) -> None:
        """Block the host until the event completes."""
        captured_graphs.refuse_in_capture("synchronizes an event")
        if self.recorded is not None:
            self.recorded.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        if self.recorded is not None:
            (stream or current_stream()).wait_event(self.recorded)

    def elapsed_time(self, end_event: StrictEvent) -> float:
        """Milliseconds until another event."""
        assert self.recorded is not None
        assert end_event.recorded is not None
        return (end_event.recorded.recorded_seconds - self.recorded.recorded_seconds) * 1e3


def _here() -> Device:
    device = _thread.device
    if device is None:
        raise RuntimeError("this thread computes on no pretended device")
    return device


def current_stream(device: object = None) -> Stream:
    """The stream on which this thread computes."""
    del device
    return streams.current_stream() or _here().stream


def new_stream(device: object = None, **_: Any) -> Stream:
    """A new stream of this thread's device."""
    del device
    return _here().new_stream()


def stream(target: Stream) -> AbstractContextManager[None]:
    """Compute on a stream."""
    return streams.on(target)


def synchronize(device: object = None) -> None:
    """Block the host until the device has finished; a thread without a device does not wait.

    torch's profiler calls it on every thread, once the device is registered.
    """
    del device
    if _thread.device is not None:
        _thread.device.synchronize()


class _Module:
    Event = StrictEvent
    CUDAGraph = captured_graphs.CUDAGraph
    graph = captured_graphs.graph
    graph_pool_handle = staticmethod(captured_graphs.graph_pool_handle)

    @staticmethod
    def type_of(tensor: Tensor) -> str:
        """Type of a tensor's device, also within operators; memory of unknown place is on the device."""
        return NAME if isinstance(place_of(tensor), Device | None) else "cpu"

    autocast_type = "cpu"
    Stream = staticmethod(new_stream)
    current_stream = staticmethod(current_stream)
    stream = staticmethod(stream)
    synchronize = staticmethod(synchronize)

    @staticmethod
    def is_available() -> bool:
        """True if this thread has a device."""
        return _thread.device is not None

    @staticmethod
    def is_initialized() -> bool:
        """True if this thread has a device."""
        return _thread.device is not None

    @staticmethod
    def device_count() -> int:
        """Number of devices: a worker sees its own."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Number of the current device."""
        return _here().handle.index

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        """State of the CPU's generator, which makes the draws."""
        del device
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        """Set the state of the CPU's generator."""
        del device
        torch.set_rng_state(state)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Do nothing: the CPU's generator, which is the device's, has been seeded."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """Dtypes in which autocast may compute."""
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Register the pretended device with torch, once per process."""
    with _naming:
        if getattr(torch, NAME, None) is None:
            rename_spare_backend(NAME)
            register_device_module(NAME, _Module)
