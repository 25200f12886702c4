"""Copies of a stage: how they become alike before the first step, and how they are compared after one.

Invariant: what is compared are digests, so that no weights travel but those that have to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from counterflow.common.numbering import number_of
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError, WorkerError
from counterflow.schedule.owners import pieces

from ..mesh.parallel_dims import ParallelDims
from ..stages.stage import LocalStage
from ..transport.base import Group, Transport
from .digest import digest
from .names import Names, named_parameters, shared_names

Key = tuple[int | str, tuple[int, ...]]
"""A stage, or a weight that several stages share, and the dimensions of the mesh along which it is cut."""


def broadcast_initial_weights(
    stages: Mapping[int, LocalStage],
    names: Names,
    holders: Sequence[Sequence[int]],
    dims: ParallelDims,
    transport: Transport,
) -> None:
    """Let every copy of a stage start as its first holder's; all workers call it.

    Args:
        stages: this worker's, before their weights are cut; what is on the meta device is read after that.
        names: of the parameters of all stages; those that several stages share start as the first one's.
        holders: by stage, the workers that hold a copy.
        dims: record of the parallel dimensions.
        transport: how to reach them.

    Raises:
        ConfigError: the copies have other shapes.
    """
    tied = shared_names(names)
    parameters = {stage: named_parameters(local_stage, names) for stage, local_stage in stages.items()}
    device = transport.device
    own_digests: dict[object, tuple[int, float]] = {
        s: (_shapes(local_stage), float(digest(_real_tensors(local_stage), device)))
        for s, local_stage in stages.items()
    }
    for name, sharers in tied.items():
        holder = next((stage for stage in sharers if stage in stages), None)
        if holder is not None:
            own_digests[name] = 0, float(digest([parameters[holder][name]], device))
    rows = cast("list[dict[object, tuple[int, float]]]", transport.gather_objects(own_digests))

    def send(key: object, first: int, tensors: Sequence[Tensor]) -> None:
        by_rank = {rank: row[key] for rank, row in enumerate(rows) if key in row}
        source = next(rank for rank in by_rank if dims.sends_state(rank, [first]))
        for rank, entry in by_rank.items():
            if entry[0] != by_rank[source][0]:
                raise ConfigError(
                    f"ranks {source} and {rank} hold stage {key} with weights of other shapes; "
                    "make the same model on every worker"
                )
        if all(entry == by_rank[source] for entry in by_rank.values()):
            return
        group = transport.group(sorted(by_rank))
        if transport.rank in by_rank:
            broadcast_tensors(tensors, source, group, transport)
        transport.gather([])  # a group is not ended while somebody still waits on it
        transport.release([group])

    for name, sharers in tied.items():
        holder = next((stage for stage in sharers if stage in stages), None)
        send(name, holders[sharers[0]][0], [] if holder is None else [parameters[holder][name]])
    for stage, workers in enumerate(holders):
        send(stage, workers[0], _real_tensors(stages[stage]) if stage in stages else [])


def refuse_other_seeds(named: Iterable[tuple[str, Tensor]], transport: Transport) -> None:
    """Refuse models that workers made with other seeds of torch's generator; all workers call it.

    What is made on the meta device, or the same nevertheless, passes: a seed may differ that only later draws
    use.

    Args:
        named: the model's parameters, by name, as the user made them.
        transport: transport between the workers.

    Raises:
        ConfigError: seeds and weights differ.
    """
    seed = torch.initial_seed()
    if len({row[0] for row in transport.gather([number_of(seed)])}) == 1:
        return
    own_digests = {n: float(digest([p], p.device)) for n, p in named if not (p.is_meta or is_dtensor(p))}
    rows = cast("list[tuple[int, dict[str, float]]]", transport.gather_objects((seed, own_digests)))
    first: dict[str, tuple[int, float]] = {}
    for rank, (rank_seed, digests) in enumerate(rows):
        for name, value in digests.items():
            source, known = first.setdefault(name, (rank, value))
            if value != known:
                raise ConfigError(
                    f"ranks {source} and {rank} made {name} with other numbers, and torch's seed is "
                    f"{rows[source][0]} on the one and {rank_seed} on the other; call torch.manual_seed with "
                    "one seed on all workers before the model is made, and with others after that"
                )


def broadcast_tensors(tensors: Sequence[Tensor], source: int, group: Group, transport: Transport) -> None:
    """Let tensors become those of one rank of a group, bit for bit; as bytes, in pieces."""
    remaining = iter(tensors)
    for sizes in pieces([tensor.nbytes for tensor in tensors]):
        piece = [next(remaining) for _ in sizes]
        if transport.rank == source:
            flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in piece])
        else:
            flat = torch.empty(int(sum(sizes)), dtype=torch.uint8, device=piece[0].device)
        transport.broadcast(flat, source, group)
        if transport.rank != source:
            with torch.no_grad():
                for target, part in zip(piece, flat.split([t.nbytes for t in piece]), strict=True):
                    target.copy_(part.clone().view(target.dtype).view(target.shape))


class ReplicaDigests:
    """Comparison of the tensors that this worker and others hold; all workers make it together.

    Invariant: all workers report the same number of digests, so an existing gather carries them.

    Args:
        tensors: returns the held tensors, with or without buffers.
        dims: record of the parallel dimensions.
        transport: transport between them.
    """

    def __init__(
        self,
        tensors: Callable[[bool], Mapping[Key, Sequence[Tensor]]],
        dims: ParallelDims,
        transport: Transport,
    ) -> None:
        self._tensors = tensors
        self._dims = dims
        self._transport = transport
        rows = cast("list[list[Key]]", transport.gather_objects(list(tensors(True))))
        counts = Counter(self._of(rank, key) for rank, row in enumerate(rows) for key in row)
        self._keys = [
            [key for key in row if counts[self._of(rank, key)] > 1] for rank, row in enumerate(rows)
        ]
        """Keys of the tensors that others hold too, by rank."""
        self.columns = max(map(len, self._keys))
        """Number of digests that a worker reports."""

    def _of(self, rank: int, key: Key) -> tuple[object, ...]:
        return (*key, *self._dims.position(rank, key[1]))

    def digests(self, stages: Container[int | str] | None = None, *, buffers: bool = True) -> Tensor:
        """A number for each that others hold too, on the device; zeros for the rest.

        Args:
            stages: those that are wanted, 0 for others; None: all.
            buffers: whether buffers count.
        """
        device, tensors = self._transport.device, self._tensors(buffers)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        digests = [
            digest(tensors.get(key, ()), device) if stages is None or key[0] in stages else zero
            for key in self._keys[self._transport.rank]
        ]
        return (
            torch.stack(digests + [zero] * (self.columns - len(digests)))
            if self.columns
            else zero.view(1)[:0]
        )

    def compare(self, rows: Sequence[Sequence[float]], when: str) -> None:
        """Compare the digests of all ranks.

        Raises:
            WorkerError: two copies differ.
        """
        first: dict[tuple[object, ...], tuple[int, float]] = {}
        for rank, (keys, row) in enumerate(zip(self._keys, rows, strict=True)):
            for key, value in zip(keys, row, strict=False):
                source, known = first.setdefault(self._of(rank, key), (rank, value))
                if known != value:
                    what = key[0] if isinstance(key[0], str) else f"stage {key[0]}"
                    same_weights = self._dims.replica_ranks(rank) != self._dims.replica_ranks(source)
                    raise WorkerError(
                        f"{when} the copies of {what} on ranks {source} and {rank} differ"
                        + (_WHY_APART if same_weights else "")
                    )

    def check(self, when: str) -> None:
        """Compare everything now; all workers call it.

        Raises:
            WorkerError: two copies differ.
        """
        if self.columns:
            self.compare(self._transport.gather(self.digests().tolist()), when)


_WHY_APART = (
    ", which hold the same weights of it; let parallelize() say of each layer that sees a part of a sample "
    "how its weights are laid out (SequenceParallel for norms), so that their gradients are summed"
)


def _shapes(local_stage: LocalStage) -> int:
    return number_of(*((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(local_stage)))


def _real_tensors(local_stage: LocalStage) -> list[Tensor]:
    return [tensor for tensor in tensors_of(local_stage) if not tensor.is_meta]


def tensors_of(local_stage: LocalStage, *, buffers: bool = True) -> list[Tensor]:
    """A stage's parameters, and its buffers."""
    tensors: list[Tensor] = []
    for layer in local_stage.with_weights:
        tensors += layer.module.parameters()
        if buffers:
            tensors += layer.module.buffers()
    return tensors
