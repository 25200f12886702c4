"""What is in flight on a transport, and what is worked out when it has come."""

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
        finish: waits for it, and gives what came; called once, by the first wait that it lets return.
        over: whether a wait would return at once.
    """

    __slots__ = ("_came", "_finish", "_over")

    def __init__(self, finish: Callable[[], T], over: Callable[[], bool] = _never) -> None:
        self._finish: Callable[[], T] | None = finish
        self._over = over

    @override
    def done(self) -> bool:
        return self._over()

    @override
    def wait(self) -> T:
        if self._finish is not None:
            self._came: T = self._finish()
            self._finish, self._over = None, _always  # what they refer to may go
        return self._came

    def then(self, call: Callable[[T], U]) -> Transfer[U]:
        """What ``call`` makes of what comes."""
        return Transfer(lambda: call(self.wait()), self._over)


DONE = Transfer(lambda: None, _always)
"""What was over before it began."""


def both(first: Pending, second: Pending) -> Transfer[None]:
    """A message in two parts."""

    def finish() -> None:
        first.wait()
        second.wait()

    return Transfer(finish, lambda: first.done() and second.done())


def all_over(works: Sequence[Work]) -> Callable[[], bool]:
    """Whether works of torch.distributed are over; Gloo reports a receive only when it is waited for."""
    return lambda: all(work.is_completed() for work in works)


def by_way_of(
    buffers: Sequence[Tensor],
    begin: Callable[[Sequence[Tensor]], Transfer[None]],
    device: torch.device,
    *,
    pinned: bool = False,
) -> Transfer[None]:
    """A receive into buffers that cannot be received into directly.

    Args:
        buffers: of any layout.
        begin: begins to receive into others, which are contiguous.
        device: that of the others.
        pinned: whether their memory is pinned.
    """
    targets = [torch.empty(b.shape, dtype=b.dtype, device=device, pin_memory=pinned) for b in buffers]

    def move(_: None) -> None:
        with torch.no_grad():
            for buffer, arrived in zip(buffers, targets, strict=True):
                buffer.copy_(arrived, non_blocking=True)

    return begin(targets).then(move)


def contiguously(tensor: Tensor, call: Callable[[Tensor], object], *, takes: bool) -> None:
    """Call something with a tensor's contiguous memory; one that ``takes`` has what is there then."""
    plain = tensor.detach()
    whole = plain.contiguous()
    call(whole)
    if takes and whole is not plain:
        plain.copy_(whole)
