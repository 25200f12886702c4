"""Who writes and who reads which part: the planners of torch.distributed.checkpoint, on our transports.

torch's own ``save`` and ``load`` gather and scatter plans over a process group, which threads have not, and
wait for each other when all is written, however long that takes. Here the plans travel by the pipeline's
transport before anything is written, every worker makes the same whole plan of them, and reading needs
nobody else. torch imports for two seconds what is needed here: not before the first checkpoint.

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
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from counterflow.runtime.transport.base import Transport

from .files import dtype_name
from .index import Chunk, Index, Stored
from .state import dtype_of, file_and_name

Part = dict[str, tuple[Tensor, tuple[int, ...]]]
"""By key: a piece of a tensor, and where it begins in the whole."""


class SavePlan:
    """Who writes what; all workers make it together.

    Args:
        tensors: what this worker holds.
        objects: the keys of what it holds that is no tensor.
        transport: how to reach the others.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], objects: Mapping[str, Any], transport: Transport
    ) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), None, transport.rank == 0)
        rows = transport.gather_objects((planner.create_local_plan(), sorted(objects)))
        found = cast("list[tuple[Any, list[str]]]", rows)
        plans, _ = planner.create_global_plan([plan for plan, _ in found])
        self._planner, self._mine = planner, planner.finish_plan(plans[transport.rank])
        self._plans = plans
        owners: dict[str, int] = {}
        for rank, (_, keys) in enumerate(found):
            for key in keys:
                owners.setdefault(key, rank)
        self.objects = owners
        """Who writes what is no tensor: the first that has it."""

    def part(self) -> Part:
        """What this worker writes: the tensors themselves, or of DTensors what is at hand."""
        found: Part = {}
        for item in self._mine.items:
            tensor = cast("Tensor", self._planner.resolve_data(item)).detach()
            found[item.index.fqn] = tensor, tuple(_data(item).chunk.offsets)
        return found

    def table(self) -> dict[str, Stored]:
        """Where everything will be."""
        stored: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
        for rank, plan in enumerate(self._plans):
            for item in plan.items:
                key, data = item.index.fqn, _data(item)
                dtype = dtype_name(torch.empty(0, dtype=data.properties.dtype), key)
                chunk = Chunk(
                    file=f"{file_and_name(key)[0]}-{rank}.safetensors",
                    offsets=tuple(data.chunk.offsets),
                    sizes=tuple(data.chunk.sizes),
                )
                stored.setdefault(key, (dtype, tuple(data.size), []))[2].append(chunk)
        return {
            key: Stored(dtype=dtype, shape=shape, chunks=tuple(chunks))
            for key, (dtype, shape, chunks) in stored.items()
        }


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # only tensors are planned
    return item.tensor_data


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
