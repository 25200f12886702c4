"""A CPU worker's streams: what is computed waits for what came, though the host does not.

A thread computes at once, so it *is* its stream's device. A wait (``Stream.wait_event``, ``Work.wait``)
returns at once, and is made up for before the next operator that touches memory: until then the host may
launch further work, as with a GPU.

What it does not do: run the host ahead of what it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...torch_private import TorchDispatchMode, schema_of, whole_call, without_modes
from .fabric import Launch

Wait = Callable[[Sequence[Launch], str], None]
"""Holds the host until something has run."""


class Event:
    """A place in a stream: all that it waited for then."""

    def __init__(self, launches: Iterable[Launch], wait: Wait) -> None:
        self._launches = tuple(launches)
        self._wait = wait

    def query(self) -> bool:
        """Whether it has come."""
        return all(launch.over for launch in self._launches)

    def synchronize(self) -> None:
        """Hold the host until it comes."""
        self._wait(self._launches, "synchronizes with an event")


class Stream:
    """What is computed in order; of what it waits for, what has not run yet is ``pending``.

    Args:
        wait: holds the host.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._pending: dict[Launch, None] = {}

    @property
    def pending(self) -> tuple[Launch, ...]:
        """What has to run before anything further does."""
        return tuple(launch for launch in self._pending if not launch.over)

    def wait_for(self, launch: Launch) -> None:
        """Let all that follows wait; the host does not."""
        if not launch.over:
            self._pending[launch] = None

    def record_event(self) -> Event:
        """An event that comes when all before it has run."""
        return Event(self._pending, self._wait)

    def wait_event(self, event: Event) -> None:
        """As ``wait_for``."""
        for launch in event._launches:  # noqa: SLF001 - of this module
            self.wait_for(launch)

    def wait_stream(self, stream: Stream) -> None:
        """As ``wait_for``, for all that another stream waits for."""
        self.wait_event(stream.record_event())

    def synchronize(self, why: str = "synchronizes with its stream") -> None:
        """Hold the host until all has run."""
        if self._pending:
            launches, self._pending = tuple(self._pending), {}
            if not all(launch.over for launch in launches):
                self._wait(launches, why)


class _Thread(threading.local):
    stream: Stream | None = None


_thread = _Thread()


def current_stream() -> Stream | None:
    """The stream on which this thread computes."""
    return _thread.stream


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Compute on a stream: as ``with torch.cuda.stream(stream):``."""
    before, _thread.stream = _thread.stream, stream
    try:
        yield
    finally:
        _thread.stream = before


@contextmanager
def device(stream: Stream) -> Iterator[None]:
    """Around all that a thread does as a worker: it computes when what its stream waits for has run."""
    with on(stream), _Calls(), _Operators():  # type: ignore[no-untyped-call]
        yield


def settle(why: str = "computes") -> None:
    """Hold the host until what the current stream waits for has run."""
    if _thread.stream is not None:
        _thread.stream.synchronize(why)


_AS_IT_IS = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty"),
    *("new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "view_as_real"),
}
"""Operators that touch no memory: on a GPU they launch nothing."""

_launches: dict[Any, bool] = {}
"""By operator, whether it does."""


class _Operators(TorchDispatchMode):
    """Before an operator that touches memory its stream is waited for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a wrapper around every operator, which imports torch.compile."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        stream = _thread.stream
        if stream is not None and stream._pending:  # noqa: SLF001 - of this module
            launches = _launches.get(func)
            if launches is None:
                name = schema_of(func).name.partition("::")[2]
                launches = _launches[func] = name not in _AS_IT_IS
            if launches:
                stream.synchronize(f"computes {func}")
        return func(*args, **(kwargs or {}))


_HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__}


class _Calls(TorchFunctionMode):
    """A host that reads memory without an operator waits too, as a copy from a GPU does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        stream = _thread.stream
        if stream is not None and stream._pending and func in _HOST_READS:  # noqa: SLF001 - of this module
            stream.synchronize(f"reads {getattr(func, '__name__', func)}")
        return func(*args, **whole_call(func, kwargs or {}))


@contextmanager
def as_the_network() -> Iterator[None]:
    """Around what is no worker's: it moves data, whatever thread it is done in."""
    with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
        yield
