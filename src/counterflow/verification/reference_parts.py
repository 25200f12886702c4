"""Parts of micro-batches, which a schedule may divide: what one process runs at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.schedule.ir import Schedule


class MicroBatchPart(NamedTuple):
    """Part of a micro-batch that runs at once: its samples ``start`` to ``stop`` of ``samples``."""

    micro_batch: int
    samples: int
    start: int
    stop: int
    inputs: Any
    targets: Any

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def parts_of(schedule: Schedule) -> tuple[int, ...]:
    """The number of parts in which a schedule's backwards run each micro-batch.

    >>> from counterflow.schedule import schemes
    >>> parts_of(schemes.chimera(2, 2, concat="backward-halving"))
    (2, 2)
    """
    parts = [1] * schedule.micro_batches
    if schedule.workload.slices > 1:  # one process runs the whole sequence
        return tuple(parts)
    for op in schedule.ops():
        if not op.kind.is_forward:
            parts[op.micro_batches[0] % schedule.micro_batches] = op.parts
    return tuple(parts)


def run_parts(batches: Sequence[tuple[Any, Any]], counts: Sequence[int]) -> Iterator[MicroBatchPart]:
    """Parts of every micro-batch of all replicas that have samples; the first micro-batches are larger."""
    for replica, (inputs, targets) in enumerate(batches):
        size, more = divmod(samples_in(inputs), len(counts))
        first = 0
        for number, parts in enumerate(counts):
            samples = size + (number < more)
            for part in range(parts):
                start, stop = samples * part // parts, samples * (part + 1) // parts
                if start < stop:
                    rows = slice(first + start, first + stop)
                    data = _cut(inputs, rows), _cut(targets, rows)
                    yield MicroBatchPart(replica * len(counts) + number, samples, start, stop, *data)
            first += samples


def samples_in(inputs: Any) -> int:
    """Number of samples, along the first dimension of the first tensor that has one."""
    return next(len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())


def _cut(tree: Any, rows: slice) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)
