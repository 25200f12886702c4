"""The state of the whole model, sent tensor by tensor from the workers that hold it to those that ask for it.

Invariant: no worker holds more of other workers' weights than what it asked for and one tensor. All workers
iterate over the stages and their tensors in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from counterflow.common.tensors.dtensors import full_tensor, is_dtensor

from ..transport.base import Transport

Entries = Sequence[tuple[Sequence[Any], Any]]
"""Names (hashable), several where there is one value under several, and the value: a tensor or another."""

_PIECE_BYTES = 2**26

_PLAIN = Tensor, nn.Parameter, nn.Buffer
"""Tensors that are their bytes, a shape and a dtype; those of other classes are sent as objects."""


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stream:
    """Brings parts of the model's state to one rank, or to all.

    Args:
        transport: how to reach the others; all workers make their streams in one order.
        receiver: the rank that wants it; None: all do.
    """

    def __init__(self, transport: Transport, receiver: int | None) -> None:
        self.transport, self.receiver = transport, receiver
        self._seen: set[Any] = set()
        self._tag = transport.reserve_tags(2)
        self.wants = receiver is None or receiver == transport.rank

    def part(self, entries: Entries | None, *, sends: bool) -> Iterator[tuple[Any, Any]]:
        """The state of one part of the model, on the workers that ask for it; all workers iterate over it.

        Args:
            entries: the part, on workers that hold it or pieces of it; None on others.
            sends: whether this worker sends its values. If several workers send, each has whole tensors, and
                tensors sent by an earlier rank are not sent again.
        """
        if self.receiver is not None and not self.wants:
            self.transport.status.now(
                f"sending the state to rank {self.receiver}, which has to take all of it"
            )
        own_entries = None
        if entries is not None and sends:
            own_entries = [(tuple(names), _described(value)) for names, value in entries]
        rows = cast(
            "list[list[tuple[tuple[Any, ...], Any]] | None]", self.transport.gather_objects(own_entries)
        )
        for source, entries_of_rank in enumerate(rows):
            for number, (names, known) in enumerate(entries_of_rank or ()):
                if self._seen.issuperset(names):  # a weight that several layers share
                    continue
                self._seen.update(names)
                tensor = None
                if entries is not None and isinstance(known, _Shape) and source == self._source(rows, sends):
                    tensor = full_tensor(entries[number][1]).detach()
                yield from self._values(names, known, tensor if sends else None, source)

    def _source(self, rows: Sequence[object], sends: bool) -> int:
        """Whose entries this worker's are: its own, or those of the one whom it holds other pieces of."""
        if sends:
            return self.transport.rank
        return next(rank for rank, row in enumerate(rows) if row is not None)

    def _values(
        self, names: Sequence[Any], known: Any, tensor: Tensor | None, source: int
    ) -> Iterator[tuple[Any, Any]]:
        value = self._tensor(known, tensor, source) if isinstance(known, _Shape) else known
        if self.wants:
            value = value if isinstance(known, _Shape) else deepcopy(known)  # threads receive one object
            for name in names:
                yield name, value

    def _tensor(self, known: _Shape, local_tensor: Tensor | None, source: int) -> Tensor | None:
        here = source == self.transport.rank
        if self.receiver is None:
            tensor = (
                _on_host(local_tensor)
                if local_tensor is not None
                else torch.empty(known.shape, dtype=known.dtype)
            )
            for piece in _pieces(tensor):
                self.transport.spread(piece, source)
            return tensor
        if self.wants and here:
            assert local_tensor is not None
            return _on_host(local_tensor)
        if self.wants:
            tensor = torch.empty(known.shape, dtype=known.dtype)
            for piece in _pieces(tensor):
                (got,) = self.transport.receive_described(source, self._tag).wait()
                piece.copy_(got)
                self._answer(source)
            return tensor
        if local_tensor is not None:
            for piece in _pieces(_on_host(local_tensor)):
                sent = self.transport.send_described([piece], self.receiver, self._tag)
                self.transport.receive_described(self.receiver, self._tag + 1).wait()
                sent.wait()
        return None

    def _answer(self, source: int) -> None:
        # The sender waits for it, so that no more than a piece is between the two.
        self.transport.send_described([torch.zeros(1)], source, self._tag + 1).wait()


def _described(value: Any) -> Any:
    if is_dtensor(value) or (type(value) in _PLAIN and value.dim()):
        return _Shape(tuple(value.shape), value.dtype)
    return _on_host(value) if isinstance(value, Tensor) else deepcopy(value)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if not tensor.numel():
        return ()
    return list(tensor.reshape(-1).view(torch.uint8).split(_PIECE_BYTES))
