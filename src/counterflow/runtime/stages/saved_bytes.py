"""Bytes that a worker saves for backwards.

A storage that autograd saves counts once however many nodes saved it; weights and buffers of the model do not
count. A storage that a running backward freed counts until the backward ends, as in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.dtensors import parts
from counterflow.common.tensors.graphs import graph_of, pointer, pointers, saved_by
from counterflow.common.trees import tensors_in

from ..messages.values import Value
from .input_guard import InputGuard
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper


class SavedStorage:
    """A storage that autograd saves, with the number of units that save it."""

    __slots__ = ("alive", "pointer", "size", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.pointer = storage.data_ptr()
        self.size = storage.nbytes()
        self.alive = StorageWeakRef(storage)
        self.users = 0


class SavedBytes:
    """Bytes that are saved for backwards.

    The storages of one unit are collected in a list; ``release`` ends their count.

    Args:
        constant: tensors that do not count: parameters and buffers.
        counting: True if bytes are counted from the beginning.
    """

    def __init__(self, constant: Iterable[Tensor], *, counting: bool = True) -> None:
        self._constant = pointers(constant)
        self._excluded: set[int] = set()
        self._storages: dict[int, SavedStorage] = {}
        self.counting = counting
        """True while bytes are counted."""
        self.current = 0
        self.peak = 0

    def exclude_constants(self, tensors: Iterable[Tensor]) -> None:
        """Exclude further constants: new versions of parameters."""
        self._constant |= pointers(tensors)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the mini-batches in flight, which are the user's, in place of those before."""
        self._excluded = pointers(tensors)

    def exclude_also(self, tensors: Iterable[Tensor]) -> None:
        """Exclude further copies of a mini-batch in flight."""
        self._excluded |= pointers(tensors)

    def without_constants(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors, and copies of those that have the memory of a parameter or buffer."""
        constant = self._constant
        for tensor in tensors:
            if type(tensor) is not Tensor or pointer(tensor) in constant:
                break
        else:
            return tensors
        return [
            t.detach().clone().requires_grad_(t.requires_grad) if self._is_constant(t) else t for t in tensors
        ]

    def _is_constant(self, tensor: Tensor) -> bool:
        return any(pointer(part) in self._constant for part in parts(tensor))

    def counter(self, collected: list[SavedStorage]) -> Callable[[Tensor], None] | None:
        """Return a function that counts a saved tensor; None: nothing is counted now."""
        return partial(self.count, collected=collected) if self.counting else None

    def count_graph(self, nodes: Iterable[Node], collected: list[SavedStorage]) -> None:
        """Count the tensors that some nodes save, and collect their storages.

        The graph stays as it is without a count: what hooks pack, a backward would find as another object,
        and a custom function that adds to ``weight.grad`` itself would add to that of nobody.
        """
        for tensor in saved_by(nodes):
            self.count(tensor, collected)

    def count(self, tensor: Tensor, collected: list[SavedStorage]) -> None:
        """Count a tensor that is saved for a backward."""
        for part in parts(tensor):
            self._count(part, collected)

    def _count(self, tensor: Tensor, collected: list[SavedStorage]) -> None:
        at, storage = pointer(tensor), tensor.untyped_storage()
        if not at or at in self._constant or at in self._excluded:
            return
        entry = self._storages.get(at)
        # What a running backward freed still counts; its memory may be another storage's by now.
        if entry is None or entry.alive.expired():
            entry = self._storages[at] = SavedStorage(storage)
            self.current += entry.size
            self.peak = max(self.peak, self.current)
        entry.users += 1
        collected.append(entry)

    def release(self, collected: list[SavedStorage]) -> None:
        """End the count of collected storages."""
        for entry in collected:
            entry.users -= 1
            if not entry.users:
                self.current -= entry.size
                if self._storages.get(entry.pointer) is entry:
                    del self._storages[entry.pointer]
        collected.clear()


def graph_bytes(constant: Iterable[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that the graph of some outputs saves.

    Args:
        constant: tensors that do not count.
        outputs: outputs of the graph.
    """
    count = SavedBytes(constant)
    count.count_graph(graph_of(outputs), [])
    return count.peak


class LayerSavedBytes(StageWrapper):
    """Bytes that each layer of a stage saves beyond its input, in graphs that end at every layer.

    Args:
        constant: tensors that do not count.

    Attributes:
        beyond: bytes by layer, in the order of the runs.
        inputs: bytes of all layers' inputs.
    """

    def __init__(self, constant: Sequence[Tensor]) -> None:
        self._constant = constant
        self.beyond: list[int] = []
        self.inputs = SavedBytes(constant)

    @override
    def wrap_layer(self, _: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        inputs = list(tensors_in(value))
        for tensor in inputs:
            self.inputs.count(tensor, [])
        with added_losses() as added:
            output = run(InputGuard().as_input(value), step, rows)
        outputs = [*tensors_in(output), *added.values()]
        self.beyond.append(graph_bytes([*self._constant, *inputs], outputs))
        return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), output)
