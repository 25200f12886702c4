"""Where memory is: on the host, in pinned host memory, or on a pretended device; and copies on their way.

All of it is memory of the CPU. A mark on a tensor's storage says which of the three it stands for, so views
and detached tensors have the same. Memory without a mark (what torch's own C++ makes) fits everywhere.

Invariant: nothing here computes for a worker: it looks and marks, outside of all modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from counterflow.runtime.torch_private import without_functions, without_modes

HOST, PINNED = "host", "pinned"

_MARK = "counterflow_place"

Place = Any
"""``HOST``, ``PINNED``, a ``Device``; None where nothing is known."""


class CopyError(RuntimeError):
    """A copy between the host and a device would have carried other values on a GPU."""


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, or of a transform of torch.func
        return None


def place_of(tensor: Tensor) -> Place:
    """Where a tensor's memory is."""
    with without_functions():
        return getattr(_storage(tensor), _MARK, None)


def mark(tensor: Tensor, place: Place, *, again: bool = False) -> None:
    """Note where a tensor's memory is; memory that has a mark keeps it, unless ``again``."""
    with without_functions():
        storage = _storage(tensor)
        if storage is not None and (again or getattr(storage, _MARK, None) is None):
            setattr(storage, _MARK, place)


def same_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor has the memory of one of the others."""
    with without_functions():
        storage = _storage(tensor)
        if storage is None:
            return False
        pointers = {one.data_ptr() for one in map(_storage, others) if one is not None}
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
    """Fill memory whose content has not come yet: NaN in numbers, what no index or count is in integers."""
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
        """The device has come to it, and the host has waited for that."""
        if not self.over:
            self.over = True
            with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
                self.come()

    def come(self) -> None:
        """What the host finds from here on."""
        raise NotImplementedError

    def order(self) -> None:
        """Another stream waits for it: what that is given later runs after it."""


class ToHost(Copy):
    """A copy from a device into host memory, which has none of the values before it is waited for.

    Args:
        target: the host memory, with the values in it already.
        source: the memory of the device, where the copy is made on another stream than the one that changes
            it; else None.
    """

    def __init__(self, target: Tensor, source: Tensor | None = None) -> None:
        with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
            self._target = target.data
            self._values = self._target.clone()
            self._source = None if source is None else (source.data, _bytes(source.data).clone())
        spoil(target)

    def come(self) -> None:
        """The values are there.

        Raises:
            CopyError: as ``order``.
        """
        self.order()
        self._target.copy_(self._values)

    def order(self) -> None:
        """From here on the memory of the device may change.

        Raises:
            CopyError: it has.
        """
        found, self._source = self._source, None
        if found is not None and not _bytes(found[0]).equal(found[1]):
            raise CopyError(
                f"device memory of shape {tuple(found[0].shape)} was changed while another stream copied "
                "it: on a GPU the copy would have parts of both; let the stream that changes it wait for the "
                "copy's event first"
            )


class FromHost(Copy):
    """A copy out of pinned host memory, which is read when the device comes to it.

    Args:
        source: the pinned memory.
    """

    def __init__(self, source: Tensor) -> None:
        with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
            self._source = source.data
            self._values = self._source.clone()

    def come(self) -> None:
        """The device reads the memory.

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
