"""Copies of a stage: how they become alike before the first step, and how they are compared after one.

Invariant: what is compared are digests, so that no weights travel but those that have to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from counterflow.errors import ConfigError, WorkerError
from counterflow.schedule.owners import pieces

from ..mesh.dtensors import local
from ..mesh.layout import REPLICA, WORKER, Layout
from ..stages.stage import StageCopy
from ..transport import Group, Transport
from .names import Names, named_parameters, shared_names

_DIGEST_BYTES = 16

Digests = dict[tuple[int, tuple[int, ...]], bytes]
"""Of a stage's tensors that are cut along some dimensions of the mesh, by stage and dimensions."""


def start_alike(
    stages: Mapping[int, StageCopy],
    names: Names,
    holders: Sequence[Sequence[int]],
    layout: Layout,
    transport: Transport,
) -> None:
    """Let every copy of a stage start as its first holder's; all workers call it.

    Args:
        stages: this worker's, before their weights are cut.
        names: of the parameters of all stages; those that several stages share start as the first one's.
        holders: by stage, the workers that hold a copy.
        layout: the places of all ranks.
        transport: how to reach them.

    Raises:
        ConfigError: the copies have other shapes.
    """
    tied = shared_names(names)
    parameters = {stage: named_parameters(copy, names) for stage, copy in stages.items()}
    mine: dict[object, bytes] = {s: _shapes(copy) + digest(tensors_of(copy)) for s, copy in stages.items()}
    for name, its in tied.items():
        held = next((stage for stage in its if stage in stages), None)
        if held is not None:
            mine[name] = digest([parameters[held][name]])
    rows = cast("list[dict[object, bytes]]", transport.gather_objects(mine))

    def send(key: object, first: int, tensors: Sequence[Tensor]) -> None:
        found = {rank: row[key] for rank, row in enumerate(rows) if key in row}
        source = next(rank for rank in found if _is_first(layout, rank, first))
        for rank, other in found.items():
            if isinstance(key, int) and other[:_DIGEST_BYTES] != found[source][:_DIGEST_BYTES]:
                raise ConfigError(
                    f"ranks {source} and {rank} hold stage {key} with weights of other shapes; "
                    "make the same model on every worker"
                )
        if all(other == found[source] for other in found.values()):
            return
        group = transport.group(sorted(found))
        if transport.rank in found:
            send_alike(tensors, source, group, transport)
        transport.gather([])  # a group is not ended while somebody still waits on it
        transport.release([group])

    for name, its in tied.items():
        held = next((stage for stage in its if stage in stages), None)
        send(name, holders[its[0]][0], [] if held is None else [parameters[held][name]])
    for stage, workers in enumerate(holders):
        send(stage, workers[0], tensors_of(stages[stage]) if stage in stages else [])


def _is_first(layout: Layout, rank: int, worker: int) -> bool:
    return layout.place(rank)[WORKER] == worker and layout.is_first(rank, (REPLICA, *layout.further))


def send_alike(tensors: Sequence[Tensor], source: int, group: Group, transport: Transport) -> None:
    """Let tensors become those of one rank of a group, bit for bit; as bytes, in pieces."""
    left = iter(tensors)
    for sizes in pieces([tensor.nbytes for tensor in tensors]):
        piece = [next(left) for _ in sizes]
        if transport.rank == source:
            flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in piece])
        else:
            flat = torch.empty(int(sum(sizes)), dtype=torch.uint8, device=piece[0].device)
        transport.broadcast(flat, source, group)
        if transport.rank != source:
            with torch.no_grad():
                for target, part in zip(piece, flat.split([t.nbytes for t in piece]), strict=True):
                    target.copy_(part.clone().view(target.dtype).view(target.shape))


def compare(rows: Sequence[Digests], layout: Layout, when: str) -> None:
    """Compare the copies of all stages.

    Args:
        rows: by rank.
        layout: the places of the ranks.
        when: for the message.

    Raises:
        WorkerError: two copies differ.
    """
    first: dict[tuple[object, ...], tuple[int, bytes]] = {}
    for rank, row in enumerate(rows):
        for (stage, dims), found in row.items():
            place = layout.place(rank)
            other, known = first.setdefault((stage, dims, *(place[dim] for dim in dims)), (rank, found))
            if known != found:
                raise WorkerError(
                    f"{when} the copies of stage {stage} on ranks {other} and {rank} differ"
                    + (_WHY_APART if layout.grid(rank) != layout.grid(other) else "")
                )


_WHY_APART = (
    ", which hold the same weights of it; let parallelize() say of each layer that sees a part of a sample "
    "how its weights are laid out (SequenceParallel for norms), so that their gradients are summed"
)


def digest(tensors: Sequence[Tensor]) -> bytes:
    """Of what this rank holds of some tensors."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        data = local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(data.numpy().data)
    return found.digest()


def _shapes(copy: StageCopy) -> bytes:
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_of(copy)]
    return hashlib.blake2b(repr(shapes).encode(), digest_size=_DIGEST_BYTES).digest()


def tensors_of(copy: StageCopy, *, buffers: bool = True) -> list[Tensor]:
    """A stage's parameters, and its buffers."""
    found: list[Tensor] = []
    for layer in copy.with_weights:
        found += layer.module.parameters()
        if buffers:
            found += layer.module.buffers()
    return found
