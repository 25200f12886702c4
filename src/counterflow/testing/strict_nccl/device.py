"""A pretended device: on a CPU, the compute device is another place than the host.

What a GPU does and a CPU does not, and what breaks programs that were tested on CPUs alone:

* ``tensor.device`` is ``pretended:RANK``, so what the engine does on a device is what runs here; an operator
  does not take tensors of the host and of the device together, but for numbers and indices of the host.
* A copy to the host with ``non_blocking=True`` has no values before its event, stream or device is
  synchronised. A copy out of pinned memory reads it when the device comes to it.
* Memory of the device is read by a host that waits (``item``, ``tolist``, ``cpu``), or is refused
  (``numpy``).
* Events come a drawn number of looks later; an error of the device comes up in whatever is called next.

A thread computes at once. So the lag is in what the host may see, not in when the device computes. What it
does not do: races between two streams of one device, memory that is freed while another stream reads it, and
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

from counterflow.runtime.torch_private import register_device_module, rename_spare_backend

from . import streams
from .memory import place_of
from .streams import Stream

NAME = "pretended"
_MOST_LAG = 3
"""An event comes after at most so many looks at it."""

_naming = threading.Lock()


class Device:
    """One worker's pretended device.

    Args:
        index: its number: the worker's rank.
        wait: holds the host until something has run.
        doing: tells what the worker does, for ``fails``.
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
        """Whether what is launched while the worker does this ends with an error of the device."""
        self.error: torch.AcceleratorError | None = None

    def __eq__(self, other: object) -> bool:
        """Two of one number are the same: what an earlier run left on it is on it still."""
        return isinstance(other, Device) and other.handle == self.handle

    def __hash__(self) -> int:
        """As it is compared."""
        return hash(self.handle)

    def __repr__(self) -> str:
        """As torch writes its name."""
        return str(self.handle)

    def look(self) -> None:
        """Raise the device's error, if it has had one: whatever is called of it does."""
        if self.error is not None:
            raise torch.AcceleratorError(*self.error.args)

    def launched(self) -> None:
        """An operator is launched; its error comes up later."""
        self.look()
        if self.fails is not None and self.fails(self.doing()):
            self.error = torch.AcceleratorError(
                f"{self.handle}: an illegal memory access was encountered; errors of kernels might be "
                "reported at some other call, so the stacktrace below might be incorrect"
            )

    def synchronize(self, why: str = "waits for its device") -> None:
        """Hold the host until the device has come to its end."""
        (streams.current_stream() or self.stream).synchronize(why)


class _ThreadDevice(threading.local):
    device: Device | None = None


_thread = _ThreadDevice()


def current() -> Device | None:
    """The pretended device on which this thread computes."""
    return _thread.device


@contextmanager
def on(device: Device | None) -> Iterator[None]:
    """Compute on a device; None: on the host alone, as around a copy between the two."""
    before, _thread.device = _thread.device, device
    try:
        yield
    finally:
        _thread.device = before


def refuse_elsewhere(tensor: Tensor) -> None:
    """Refuse a tensor that is not on this thread's device, as a process group of devices does.

    Raises:
        RuntimeError: it is on the host, or on another worker's device.
    """
    device, place = _thread.device, place_of(tensor)
    if device is None or place is None or place == device:
        return
    if isinstance(place, Device):
        raise RuntimeError(f"a tensor of {place} was given to a process group of {device}")
    raise RuntimeError("No backend type associated with device type cpu")  # as torch.distributed says


def refuse_on_device(tensor: Tensor) -> None:
    """Refuse a tensor that is on a device, as a process group of the host does.

    Raises:
        RuntimeError: it is.
    """
    if isinstance(place_of(tensor), Device):
        raise RuntimeError(f"No backend type associated with device type {NAME}")


# -- what torch.get_device_module gives


class TimedEvent:
    """As ``torch.cuda.Event``."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        del enable_timing, blocking
        self.recorded: streams.Event | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Put it at the end of a stream."""
        self.recorded = (stream or current_stream()).record_event()

    def query(self) -> bool:
        """Whether it has come."""
        return self.recorded is None or self.recorded.query()

    def synchronize(self) -> None:
        """Hold the host until it comes."""
        if self.recorded is not None:
            self.recorded.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        if self.recorded is not None:
            (stream or current_stream()).wait_event(self.recorded)

    def elapsed_time(self, end_event: TimedEvent) -> float:
        """Milliseconds until another one."""
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
    """Another stream of this thread's device."""
    del device
    return _here().new_stream()


def stream(one: Stream) -> AbstractContextManager[None]:
    """Compute on a stream."""
    return streams.on(one)


def synchronize(device: object = None) -> None:
    """Hold the host until the device has come to its end; a thread without one has nothing to wait for.

    torch's profiler calls it on every thread, once the device is registered.
    """
    del device
    if _thread.device is not None:
        _thread.device.synchronize()


class _Module:
    """What ``torch.get_device_module("pretended")`` gives."""

    Event = TimedEvent
    autocast_type = "cpu"
    Stream = staticmethod(new_stream)
    current_stream = staticmethod(current_stream)
    stream = staticmethod(stream)
    synchronize = staticmethod(synchronize)

    @staticmethod
    def is_available() -> bool:
        """Whether this thread has one."""
        return _thread.device is not None

    @staticmethod
    def is_initialized() -> bool:
        """As ``is_available``."""
        return _thread.device is not None

    @staticmethod
    def device_count() -> int:
        """A worker sees its own."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Its number."""
        return _here().handle.index

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        """Draws are made by the CPU's generator."""
        del device
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        """As ``get_rng_state``."""
        del device
        torch.set_rng_state(state)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The CPU's generator, which is the device's, has been seeded."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """What autocast may compute in."""
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Give torch the name of the pretended device, once in a process."""
    with _naming:
        if getattr(torch, NAME, None) is None:
            rename_spare_backend(NAME)
            register_device_module(NAME, _Module)
