"""Plans of which worker writes and reads which part: the planners of torch.distributed.checkpoint, on our
transports.

torch's own ``save`` and ``load`` gather and scatter plans over a process group, which threads do not have,
and all ranks wait until everything is written. Here the plans travel by the pipeline's transport before
anything is written, every worker makes the same global plan of them, and reading needs no other worker. The
import takes torch two seconds, so it happens with the first checkpoint.

torch's storage is not used. It writes into the folder that is read, so a crash while a step is saved again
leaves nothing whole. It has no digests, and its metadata is a pickle, or the headers of all files, which
would be used before they are verified.

Invariant: one of the holders writes each tensor, and the work is divided evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from counterflow.runtime.transport.base import Transport

from .files import dtype_name
from .index import Chunk, Index, Stored
from .state_tables import dtype_of, file_of

Pieces = dict[str, tuple[Tensor, tuple[int, ...]]]
"""Pieces of tensors by key, each with the place where it begins in the whole."""


class SavePlan:
    """The plan of a save; all workers make it together.

    Args:
        state: state of this worker: tensors and other objects.
        transport: transport to the other workers.
    """

    def __init__(self, state: Mapping[str, Any], transport: Transport) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(state), None, transport.rank == 0)
        plans = transport.gather_objects(self._planner.create_local_plan())
        self._plans, _ = self._planner.create_global_plan(cast("list[Any]", plans))
        self._items = self._planner.finish_plan(self._plans[transport.rank]).items

    def part(self) -> tuple[Pieces, list[str]]:
        """Parts that this worker writes: pieces of tensors (the local part of DTensors), and keys of other
        objects.
        """
        pieces: Pieces = {}
        for item in self._items:
            if item.tensor_data is not None:
                tensor = cast("Tensor", self._planner.resolve_data(item)).detach()
                pieces[item.index.fqn] = tensor, tuple(item.tensor_data.chunk.offsets)
        return pieces, [item.index.fqn for item in self._items if item.tensor_data is None]

    def tensors(self) -> dict[str, Stored]:
        """Locations of the pieces of all tensors."""
        tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
        for rank, plan in enumerate(self._plans):
            for item in plan.items:
                key, data = item.index.fqn, item.tensor_data
                if data is not None:
                    chunk = Chunk(
                        file=file_of(key, rank, tensor=True),
                        offsets=tuple(data.chunk.offsets),
                        sizes=tuple(data.chunk.sizes),
                    )
                    kind = dtype_name(data.properties.dtype, key), tuple(data.size)
                    tensors.setdefault(key, (*kind, []))[2].append(chunk)
        return {
            key: Stored(dtype=dtype, shape=shape, chunks=tuple(chunks))
            for key, (dtype, shape, chunks) in tensors.items()
        }

    def objects(self) -> dict[str, str]:
        """Files of all objects that are not tensors."""
        items = ((rank, item) for rank, plan in enumerate(self._plans) for item in plan.items)
        objects = ((rank, item.index.fqn) for rank, item in items if item.tensor_data is None)
        return {key: file_of(key, rank, tensor=False) for rank, key in objects}


def fill(
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    index: Index,
    read: Callable[[str, str, tuple[slice, ...]], Tensor],
) -> None:
    """Fill tensors, or the local parts of DTensors, from a checkpoint.

    Args:
        tensors: tensors by key, with the stored shapes and any floating dtype.
        stored: by key, the tensor in the checkpoint.
        index: index of the checkpoint.
        read: function of file, key and slices that returns the values.
    """
    table: dict[str, STORAGE_TYPES] = {}
    for key in tensors:
        entry = index.tensors[stored[key]]
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=dtype_of(entry, key))
        table[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), Metadata(table), is_coordinator=False)
    for item in planner.finish_plan(planner.create_local_plan()).items:
        key = stored[item.storage_index.fqn]
        begin = tuple(item.storage_index.offset or ())
        chunk = next(c for c in index.tensors[key].chunks if c.offsets == begin)
        slices = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(read(chunk.file, key, slices))
        planner.commit_tensor(item, target)
