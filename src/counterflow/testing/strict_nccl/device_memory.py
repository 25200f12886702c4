"""Places of memory: on the host, in pinned host memory, or on a pretended device; and copies in flight.

All of it is memory of the CPU. A mark on a tensor's storage says which of the three it stands for, so views
and detached tensors have the same place. Memory without a mark (made by torch's own C++) fits everywhere.

Invariant: nothing here computes for a worker: functions read and mark, outside of all modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from counterflow.common.tensors.torch_private import without_functions, without_modes

HOST, PINNED = "host", "pinned"

_MARK = "counterflow_place"

Place = Any
"""A place: ``HOST``, ``PINNED``, a ``Device``; None if unknown."""


class CopyError(RuntimeError):
    """A copy between the host and a device would have had other values on a GPU."""


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, or of a transform of torch.func
        return None


def place_of(tensor: Tensor) -> Place:
    """Place of a tensor's memory."""
    with without_functions():
        return getattr(_storage(tensor), _MARK, None)


def mark(tensor: Tensor, place: Place, *, overwrite: bool = False) -> None:
    """Mark the place of a tensor's memory; marked memory keeps its mark, unless ``overwrite``."""
    with without_functions():
        storage = _storage(tensor)
        if storage is not None and (overwrite or getattr(storage, _MARK, None) is None):
            setattr(storage, _MARK, place)


def same_memory(tensor: Tensor, candidates: Iterable[Tensor]) -> bool:
    """True if a tensor shares memory with one of several."""
    with without_functions():
        storage = _storage(tensor)
        if storage is None:
            return False
        pointers = {s.data_ptr() for s in map(_storage, candidates) if s is not None}
        return storage.nbytes() > 0 and storage.data_ptr() in pointers


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def spoil(tensor: Tensor) -> None:
    """Fill memory whose content is not there yet with invalid values: NaN in numbers, an impossible index in
    integers.
    """
    with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
        plain = tensor.data
        if plain.is_floating_point() or plain.is_complex():
            plain.fill_(torch.nan)
        elif plain.dtype is torch.bool:
            plain.logical_not_()
        else:
            info = torch.iinfo(plain.dtype)
            plain.fill_(info.min if info.min else info.max)


class Copy:
    """A copy between the host and a device that the host has not waited for."""

    over = False

    def finish(self) -> None:
        """Finish the copy: the device has reached it, and the host has waited."""
        if not self.over:
            self.over = True
            with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
                self.come()

    def come(self) -> None:
        """Make the values visible to the host."""
        raise NotImplementedError

    def order(self) -> None:
        """Order another stream's later work behind the copy."""


class ToHost(Copy):
    """A copy from a device into host memory, whose values are invalid before a wait.

    Args:
        target: the host memory, with the values in it already.
        source: the memory of the device, if another stream than the copying one changes it; otherwise None.
    """

    def __init__(self, target: Tensor, source: Tensor | None = None) -> None:
        with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
            self._target = target.data
            self._values = self._target.clone()
            self._source = None if source is None else (source.data, _bytes(source.data).clone())
        spoil(target)

    def come(self) -> None:
        """Make the values visible.

        Raises:
            CopyError: as in ``order``.
        """
        self.order()
        self._target.copy_(self._values)

    def order(self) -> None:
        """Allow changes of the device's memory from here on.

        Raises:
            CopyError: it has changed before.
        """
        source, self._source = self._source, None
        if source is not None and not _bytes(source[0]).equal(source[1]):
            raise CopyError(
                f"device memory of shape {tuple(source[0].shape)} was changed while another stream copied "
                "it: on a GPU the copy would contain parts of both; let the stream that changes it wait for "
                "the "
                "copy's event first"
            )


class FromHost(Copy):
    """A copy out of pinned host memory, which is read when the device reaches it.

    Args:
        source: the pinned memory.
    """

    def __init__(self, source: Tensor) -> None:
        with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
            self._source = source.data
            self._values = self._source.clone()

    def come(self) -> None:
        """Read the memory on the device.

        Raises:
            CopyError: the host changed the memory meanwhile.
        """
        if not _bytes(self._source).equal(_bytes(self._values)):
            raise CopyError(
                f"pinned memory of shape {tuple(self._source.shape)} was changed before the device had "
                "copied it: on a GPU it would compute with the later content; wait for the copy's event first"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
