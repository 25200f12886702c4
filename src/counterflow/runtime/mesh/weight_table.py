"""Table of weights: holders of each, ranks over which gradients are summed, ranks that count the norm.

It is read of the record that sums, norms, digests, states and checkpoints read (``parallel_dims.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .parallel_dims import Content, ParallelDims, WeightDims
from .rank_mesh import REPLICA, WORKER

_MOST_GROUPS = 2
"""Number of groups of ranks that the text lists."""

_MOST_NUMBERS = 8
"""Number of ranks or stages that the text lists if they are not in a row."""


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Weights that are divided and summed alike.

    Attributes:
        stages: stages that hold them; several share tied ones.
        names: first names in the model.
        ranks: ranks that hold a part.
        contents: by dimension of the mesh, content at its positions; replicas and workers among them.
        summed_by_engine: groups of ranks whose gradients Counterflow sums, each in one all-reduce.
        summed_by_fsdp: names of the dimensions over which ``fully_shard`` sums.
        counted_by: ranks whose part counts in the global gradient norm; each distinct part once.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    contents: Mapping[str, str]
    summed_by_engine: tuple[tuple[int, ...], ...]
    summed_by_fsdp: tuple[str, ...]
    counted_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Weights of a pipeline by stage, and how each is divided, summed and counted.

    Attributes:
        dims: names and sizes of the mesh's dimensions.
        rows: groups of weights, by stage.
    """

    dims: Mapping[str, int]
    rows: tuple[WeightRow, ...]

    def __str__(self) -> str:
        """Text of the table, a paragraph for each group of weights."""
        mesh = " x ".join(f"{name} {size}" for name, size in self.dims.items())
        return "\n".join([f"mesh: {mesh}", *map(_text, self._joined())])

    def _joined(self) -> Iterable[WeightRow]:
        """Rows in which weights of several stages that are divided and summed alike are together."""
        joined: dict[tuple[Any, ...], WeightRow] = {}
        for row in self.rows:
            key = row.ranks, *row.contents.items(), row.summed_by_engine, row.summed_by_fsdp, row.counted_by
            known = joined.get(key)
            stages, names = ((), ()) if known is None else (known.stages, known.names)
            more = tuple(stage for stage in row.stages if stage not in stages)
            joined[key] = replace(row, stages=(*stages, *more), names=(*names, *row.names))
        return joined.values()


def weight_table(
    dims: ParallelDims,
    dim_names: Sequence[str],
    names: Sequence[Sequence[tuple[str, str]]],
    holders: Sequence[Sequence[int]],
) -> WeightTable:
    """Table of the weights of all stages.

    Args:
        dims: record of the parallel dimensions.
        dim_names: names of the mesh's dimensions after (replica, worker).
        names: by stage, (name in the stage, first name in the model) of each weight.
        holders: by stage, the workers that hold it.
    """
    labels = ("replica", "worker", *dim_names)
    stages: dict[str, list[int]] = {}
    for stage, pairs in enumerate(names):
        for _, first in pairs:
            stages_of_name = stages.setdefault(first, [])
            if stage not in stages_of_name:
                stages_of_name.append(stage)
    groups: dict[tuple[tuple[int, ...], WeightDims], list[str]] = {}
    for first, stages_of_name in stages.items():
        weight = dims.weight(first)
        key = tuple(stages_of_name), WeightDims(weight.shards, weight.experts, weight.reduced)
        groups.setdefault(key, []).append(first)
    rows = (
        _row(dims, labels, numbers, weight, group, holders)
        for (numbers, weight), group in sorted(groups.items(), key=lambda item: item[0][0])
    )
    return WeightTable(dict(zip(labels, dims.mesh.shape, strict=True)), tuple(rows))


def _row(  # noqa: PLR0917
    dims: ParallelDims,
    labels: Sequence[str],
    stages: tuple[int, ...],
    weight: WeightDims,
    names: Sequence[str],
    holders: Sequence[Sequence[int]],
) -> WeightRow:
    workers = sorted({worker for stage in stages for worker in holders[stage]})
    ranks = tuple(rank for rank in dims.mesh.ranks if dims.mesh.coordinates(rank)[WORKER] in workers)
    return WeightRow(
        stages=stages,
        names=tuple(names),
        ranks=tuple(sorted(ranks)),
        contents={
            labels[dim]: weight.content(dim).value
            for dim in (REPLICA, *dims.further)
            if dims.mesh.shape[dim] > 1
        },
        summed_by_engine=tuple(group for group in dims.sum_groups(workers, weight) if len(group) > 1),
        summed_by_fsdp=tuple(labels[dim] for dim in sorted(weight.reduced)),
        counted_by=tuple(sorted(rank for rank in ranks if dims.counts_in_norm(rank, workers, weight))),
    )


def _text(row: WeightRow) -> str:
    plural = "s" if len(row.stages) > 1 else ""
    first = ", ".join(row.names[:2]) + (f" and {len(row.names) - 2} more" if len(row.names) > 2 else "")
    divided = [
        f"{'other experts' if content == Content.EXPERT.value else 'shards'} along {name}"
        for name, content in row.contents.items()
        if content != Content.REPLICATED.value
    ]
    sums = [f"summed by fully_shard over {', '.join(row.summed_by_fsdp)}"] if row.summed_by_fsdp else []
    if row.summed_by_engine:
        first_groups = " and over ".join(map(_ranks, row.summed_by_engine[:_MOST_GROUPS]))
        rest = len(row.summed_by_engine) - _MOST_GROUPS
        sums.append(f"summed over {first_groups}" + (f", and in {rest} more groups" if rest > 0 else ""))
    return (
        f"stage{plural} {_numbers(row.stages)}: {first}\n"
        f"  on {_ranks(row.ranks)}: {' and '.join(divided) or 'the same on all'}\n"
        f"  gradients: {' and '.join(sums) or 'complete on each rank, summed over none'}\n"
        f"  norm: counts the part of {_ranks(row.counted_by)}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in short.

    >>> _ranks([0, 1, 2, 3]), _ranks([0, 2]), _ranks([5])
    ('ranks 0 to 3', 'ranks 0, 2', 'rank 5')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_numbers(ranks)}"


def _numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers in short.

    >>> _numbers([0, 1, 2, 3]), _numbers([0, 2]), _numbers([*range(0, 40, 2)])
    ('0 to 3', '0, 2', '0, 2, 4, … 38 (20)')
    """
    if len(numbers) > 2 and list(numbers) == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]} to {numbers[-1]}"
    if len(numbers) > _MOST_NUMBERS:
        return f"{', '.join(map(str, numbers[:3]))}, … {numbers[-1]} ({len(numbers)})"
    return ", ".join(map(str, numbers))
