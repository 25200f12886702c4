"""Messages and collectives in flight, and computations on their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from .base import Pending

T = TypeVar("T")
U = TypeVar("U")


def _never() -> bool:
    return False


def _always() -> bool:
    return True


class Transfer(Pending, Generic[T]):
    """A message or a collective in flight: ``Pending``, ``Described`` or ``Gathering``.

    Args:
        finish: waits for it and returns its result; called until it returns once.
        is_done: returns True if a wait would return at once.
    """

    __slots__ = ("_finish", "_is_done", "_result")

    def __init__(self, finish: Callable[[], T], is_done: Callable[[], bool] = _never) -> None:
        self._finish: Callable[[], T] | None = finish
        self._is_done = is_done

    @override
    def done(self) -> bool:
        return self._is_done()

    @override
    def wait(self) -> T:
        if self._finish is not None:
            self._result: T = self._finish()
            self._finish, self._is_done = None, _always  # what they refer to may go
        return self._result

    def then(self, call: Callable[[T], U]) -> Transfer[U]:
        """Transfer of the result of ``call`` on this one's result."""
        return Transfer(lambda: call(self.wait()), self._is_done)


DONE = Transfer(lambda: None, _always)
"""A transfer that has nothing to send."""


def both(first: Pending, second: Pending) -> Transfer[None]:
    """Transfer of a message in two parts."""

    def finish() -> None:
        first.wait()
        second.wait()

    return Transfer(finish, lambda: first.done() and second.done())


def all_completed(works: Sequence[Work]) -> Callable[[], bool]:
    """Predicate: all works are completed. Gloo reports that of a receive only when it is waited for."""
    return lambda: all(work.is_completed() for work in works)


def receive_via(
    buffers: Sequence[Tensor],
    begin: Callable[[Sequence[Tensor]], Transfer[None]],
    device: torch.device,
    *,
    pinned: bool = False,
) -> Transfer[None]:
    """Receive into contiguous temporary tensors and copy them into the buffers.

    Args:
        buffers: tensors of any layout.
        begin: begins to receive into the temporary tensors.
        device: device of the temporary tensors.
        pinned: True to pin their memory.
    """
    targets = [torch.empty(b.shape, dtype=b.dtype, device=device, pin_memory=pinned) for b in buffers]

    def move(_: None) -> None:
        with torch.no_grad():
            for buffer, arrived in zip(buffers, targets, strict=True):
                buffer.copy_(arrived, non_blocking=True)

    return begin(targets).then(move)


def call_contiguous(tensor: Tensor, call: Callable[[Tensor], object], *, update: bool) -> None:
    """Call a function with a contiguous view or copy of a tensor; ``update`` copies the result back."""
    plain = tensor.detach()
    dense = plain.contiguous()
    call(dense)
    if update and dense is not plain:
        plain.copy_(dense)
