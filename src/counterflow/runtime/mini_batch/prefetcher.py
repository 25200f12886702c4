"""Micro-batches on their way to the device, each when its op is near.

On a device that runs behind its host a micro-batch is copied on a stream of its own, ``AHEAD`` micro-batches
before it is used, and its copy is freed when it was used: a step never has all its inputs in the device's
memory, and copies go beside what is computed. On a CPU nothing is copied.

Invariant: what was given is not read any more when ``wait`` returns, if all has been used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.mappings import PLAIN
from counterflow.common.tensors.devices import holds_host, module_of, used_on
from counterflow.common.trees import tensors_in
from counterflow.schedule.ir import Schedule

from .samples import moved

AHEAD = 2
"""Number of micro-batches that are copied ahead of the one in use."""


class CopyStream:
    """The stream on which a pipeline's micro-batches are copied to its device.

    Args:
        device: where they are used.
        order: the micro-batches in the order in which this worker uses them.
    """

    def __init__(self, device: torch.device, order: Sequence[int]) -> None:
        self.device = device
        self.order = order
        self.module: Any = module_of(device) if holds_host(device) else None
        self.stream: Any = None if self.module is None else self.module.Stream(device=device)


class MicroBatchPrefetcher:
    """The micro-batches of a mini-batch's inputs, or of its targets.

    Args:
        pieces: by micro-batch, what was given.
        copies: where they are copied.
        at_once: whether all are copied at the beginning, into memory of their own: for ops of later steps.
    """

    def __init__(self, pieces: Sequence[Any], copies: CopyStream, *, at_once: bool) -> None:
        self._pieces = pieces
        self._device, self._module, self._stream = copies.device, copies.module, copies.stream
        self._order = copies.order
        self._at_once = at_once
        self._copies: dict[int, tuple[Any, Any]] = {}
        """Copy of each micro-batch, and the event after the copy."""
        self._last: Any = None
        """The event after the last copy."""
        self.on_copy: Callable[[Iterator[Tensor]], None] | None = None
        """Callback for the tensors of each copy."""
        if self._module is not None:  # what was given may be computed on the current stream
            self._stream.wait_stream(self._module.current_stream(self._device))
        if at_once:
            for number in range(len(pieces)):
                self._copy(number)

    def __len__(self) -> int:
        """The number of micro-batches."""
        return len(self._pieces)

    @property
    def pieces(self) -> Sequence[Any]:
        """The micro-batches as they were given, wherever they are."""
        return self._pieces

    def __getitem__(self, number: int) -> Any:
        """A micro-batch on the device; the next ones begin to be copied."""
        if not self._at_once:
            if self._module is None:
                return self._copied(number)
            at = self._order.index(number) if number in self._order else len(self._order)
            for near in (number, *self._order[at + 1 : at + 1 + AHEAD]):
                if near not in self._copies:
                    self._copy(near)
        tree, event = self._copies[number]
        if event is not None:
            stream = self._module.current_stream(self._device)
            stream.wait_event(event)
            for tensor in tensors_in(tree):
                used_on(tensor, stream)
            self._copies[number] = tree, None
        return tree

    def _copied(self, number: int) -> Any:
        return moved(self._pieces[number], self._device, copied=self._at_once)

    def _copy(self, number: int) -> None:
        if self._module is None or _opaque(self._pieces[number]):
            self._copies[number] = self._copied(number), None
            return
        with self._module.stream(self._stream):
            tree = self._copied(number)
            self._last = self._module.Event(blocking=True)  # blocking: the host sleeps, it does not spin
            self._last.record()
        self._copies[number] = tree, self._last
        if self.on_copy is not None:
            self.on_copy(tensors_in(tree))

    def used(self, number: int) -> None:
        """Free a micro-batch's copy: nobody asks for it any more."""
        self._copies.pop(number, None)

    def wait(self) -> None:
        """Hold the host until all copies are made that were begun: what was given may change then."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def tensors(self) -> Iterator[Tensor]:
        """Tensors of the mini-batch, and their copies."""
        yield from tensors_in(self._pieces)
        for tree, _ in self._copies.values():
            yield from tensors_in(tree)


def _opaque(tree: Any) -> bool:
    return any(
        not isinstance(leaf, (Tensor, *PLAIN)) and hasattr(leaf, "to") for leaf in pytree.tree_leaves(tree)
    )


def order_of_use(schedule: Schedule, worker: int) -> list[int]:
    """The micro-batches in the order in which a worker runs them through its first or its last stage."""
    ends = 0, schedule.stages - 1
    ops = (op for op in schedule.orders[worker] if op.stage in ends and op.kind.is_forward)
    return list(dict.fromkeys(number % schedule.micro_batches for op in ops for number in op.micro_batches))
