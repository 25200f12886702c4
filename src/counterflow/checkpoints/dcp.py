"""Who writes and who reads which part: the planners of torch.distributed.checkpoint, on our transports.

torch's own ``save`` and ``load`` gather and scatter plans over a process group, which threads have not, and
wait for each other when all is written, however long that takes. Here the plans travel by the pipeline's
transport before anything is written, every worker makes the same whole plan of them, and reading needs
nobody else. torch imports for two seconds what is needed here: not before the first checkpoint.

torch's storage is not used. It writes into the folder that is read, so that a crash while a step is saved
again leaves nothing whole; it knows no digests, and its metadata is a pickle, or the headers of all files,
which would be used before anything says that they are as they were written.

Invariant: of copies one worker writes each tensor, and what they write is shared out evenly.
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
from .state import dtype_of, file_of

Pieces = dict[str, tuple[Tensor, tuple[int, ...]]]
"""By key: a piece of a tensor, and where it begins in the whole."""


class SavePlan:
    """Who writes what; all workers make it together.

    Args:
        state: what this worker holds: tensors, and what is none.
        transport: how to reach the others.
    """

    def __init__(self, state: Mapping[str, Any], transport: Transport) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(state), None, transport.rank == 0)
        found = transport.gather_objects(self._planner.create_local_plan())
        self._plans, _ = self._planner.create_global_plan(cast("list[Any]", found))
        self._mine = self._planner.finish_plan(self._plans[transport.rank]).items

    def part(self) -> tuple[Pieces, list[str]]:
        """What this worker writes: the tensors themselves, or of DTensors what is at hand; and other keys."""
        found: Pieces = {}
        for item in self._mine:
            if item.tensor_data is not None:
                tensor = cast("Tensor", self._planner.resolve_data(item)).detach()
                found[item.index.fqn] = tensor, tuple(item.tensor_data.chunk.offsets)
        return found, [item.index.fqn for item in self._mine if item.tensor_data is None]

    def tensors(self) -> dict[str, Stored]:
        """Where the pieces of all tensors will be."""
        found: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
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
                    found.setdefault(key, (*kind, []))[2].append(chunk)
        return {
            key: Stored(dtype=dtype, shape=shape, chunks=tuple(chunks))
            for key, (dtype, shape, chunks) in found.items()
        }

    def objects(self) -> dict[str, str]:
        """The files in which everything will be that is no tensor."""
        items = ((rank, item) for rank, plan in enumerate(self._plans) for item in plan.items)
        others = ((rank, item.index.fqn) for rank, item in items if item.tensor_data is None)
        return {key: file_of(key, rank, tensor=False) for rank, key in others}


def fill(
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    index: Index,
    read: Callable[[str, str, tuple[slice, ...]], Tensor],
) -> None:
    """Fill tensors, or the parts of DTensors that are at hand, from what is stored.

    Args:
        tensors: by key; of the stored shapes, of any floating dtype.
        stored: by key, that in the checkpoint.
        index: of the checkpoint.
        read: file, key and slices to what is there.
    """
    table: dict[str, STORAGE_TYPES] = {}
    for key in tensors:
        its = index.tensors[stored[key]]
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in its.chunks]
        properties = TensorProperties(dtype=dtype_of(its, key))
        table[key] = TensorStorageMetadata(properties, torch.Size(its.shape), chunks)
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
