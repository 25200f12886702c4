"""Copies of a device's tensors in host memory, made while the device computes.

On a device that runs asynchronously they go into pinned memory on a stream of their own; the thread that
writes them sleeps until they are made. On a CPU they are made at once.

Invariant: copies have the values at the time of ``begin``, even if the tensors change later, provided that
``order`` puts the change behind the copy on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from counterflow.common.tensors.devices import holds_host, module_of, used_on

_SLAB_BYTES = 2**28
"""Size of pieces of pinned memory, a power of two because torch rounds each piece up to one."""

_ALIGNED = 64


class StateHostCopy:
    """A copy that was begun.

    Attributes:
        tensors: by key, tensors in host memory, which are undefined before ``wait``.

    Args:
        tensors: see above.
        device: device of the copied tensors.
        made: the event after the last copy; None: it is complete.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, event: Any) -> None:
        self.tensors = tensors
        self._device, self._event = device, event

    def wait(self) -> None:
        """Let the host sleep until the copy is complete; any thread may call it."""
        if self._event is not None:
            self._event.synchronize()

    def order(self) -> None:
        """Order further work of the device behind the copy; the host does not wait."""
        if self._event is not None:
            module_of(self._device).current_stream(self._device).wait_event(self._event)


class HostCopies:
    """Host memory for copies of a device's tensors, and the stream on which they are made.

    Args:
        device: device of the tensors; tensors on the host are copied too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = module_of(device) if holds_host(device) else None
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)
        self._table: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._targets: dict[str, Tensor] = {}

    def begin(self, tensors: Mapping[str, Tensor], soon: Collection[str] = ()) -> StateHostCopy:
        """Begin to copy tensors after all work that the device was given so far.

        The memory is that of the previous copy if the tensors are alike; that copy must have been read.

        Args:
            tensors: tensors by key, without overlapping memory.
            soon: keys of tensors that may change before ``StateHostCopy.order``: they are copied first, and
                further work of the device waits for them.
        """
        table = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        if table != self._table:
            self.forget()
            self._targets = _targets(tensors, pinned=self._module is not None)
            self._table = table
        if self._module is None:
            self._copy(tensors, tensors)
            return StateHostCopy(self._targets, self._device, None)
        current = self._module.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            first = self._copy(tensors, soon)
            last = self._copy(tensors, [key for key in tensors if key not in soon])
        if soon:
            current.wait_event(first)
        return StateHostCopy(self._targets, self._device, last)

    def forget(self) -> None:
        """Free the memory; the copies must have been read."""
        self._table, self._targets = {}, {}

    def _copy(self, tensors: Mapping[str, Tensor], keys: Collection[str]) -> Any:
        with torch.no_grad():
            for key in keys:
                self._targets[key].copy_(tensors[key], non_blocking=True)
                if self._stream is not None and tensors[key].device.type != "cpu":
                    used_on(tensors[key], self._stream)
        if self._module is None:
            return None
        event = self._module.Event(blocking=True)  # blocking: the host sleeps and does not spin
        event.record()
        return event


def _targets(tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    targets: dict[str, Tensor] = {}
    sizes = {key: -(-tensor.nbytes // _ALIGNED) * _ALIGNED for key, tensor in tensors.items()}
    remaining, begin = sum(sizes.values()), 0
    slab = torch.empty(0, dtype=torch.uint8, device="cpu")
    for key, tensor in tensors.items():
        if begin + sizes[key] > len(slab):
            piece = max(sizes[key], min(_SLAB_BYTES, remaining))
            slab, begin = torch.empty(piece, dtype=torch.uint8, device="cpu", pin_memory=pinned), 0
        bytes_of = slab[begin : begin + tensor.nbytes]
        targets[key] = bytes_of.view(tensor.dtype).view(tensor.shape)
        begin += sizes[key]
        remaining -= sizes[key]
    return targets
