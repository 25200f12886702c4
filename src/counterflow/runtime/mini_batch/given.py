"""What one worker was given of a mini-batch: as a whole, or as micro-batches that are ready.

What it does not do: ask the other workers what they were given; ``pipeline.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from ..messages.values import Keyworded, content_digest, signature
from .samples import Dims, cut, moved, samples_in, split_points

NOT_GIVEN = -1
"""In place of a number of samples."""


class Agreed(NamedTuple):
    """What all workers know of a mini-batch.

    Attributes:
        samples: of the replica.
        kind: its signature; 0: nobody knows the shapes.
        total: samples of all replicas.
        sizes: samples by micro-batch.
    """

    samples: int = 0
    kind: int = 0
    total: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs and targets as a worker was given them.

    Attributes:
        inputs: the whole in one piece, or one piece a micro-batch; None: they were not given.
        targets: likewise.
        ready: whether there is a piece a micro-batch.
        input_dims: where the samples are.
        target_dims: likewise.
    """

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    ready: bool
    input_dims: Dims
    target_dims: Dims

    @property
    def form(self) -> int:
        """0: nothing was given, 1: a whole, 2: micro-batches."""
        return 0 if self.inputs is None and self.targets is None else 2 if self.ready else 1

    def counts(self) -> tuple[list[int] | None, list[int] | None]:
        """The samples of each piece of inputs and targets.

        Raises:
            ConfigError: they have none, or several numbers; or those of a micro-batch differ.
        """
        inputs = _counted(self.inputs, self.input_dims, "inputs")
        targets = _counted(self.targets, self.target_dims, "targets")
        if self.ready and inputs is not None and targets is not None:
            for number, (one, other) in enumerate(zip(inputs, targets, strict=True)):
                if one != other:
                    raise ConfigError(
                        f"micro-batch {number} has {one} samples in its inputs and {other} in its targets; "
                        "they have the same, in the dimensions that input_dims and target_dims say"
                    )
        return inputs, targets

    def kind(self, *more: object) -> int:
        """The signature of the inputs; 0 if there are none."""
        if self.inputs is None:
            return 0
        first = self.inputs[0]
        names = sorted(first.kwargs) if isinstance(first, Keyworded) else ()
        return signature(self.inputs, *names, *more)

    def targets_where_given(self, sizes: Sequence[int]) -> list[Any] | None:
        """Those of the micro-batches that have samples, on no other device; ``sizes`` as for ``cut``."""
        if self.targets is None:
            return None
        first = next((t for t in pytree.tree_leaves(self.targets) if isinstance(t, torch.Tensor)), None)
        device = torch.device("cpu") if first is None else first.device
        _, found = self.cut(sizes, device, inputs=False, targets=True, copied=False)
        return None if found is None else with_samples(found, sizes)

    def digests(self) -> tuple[float, float]:
        """Of the contents of inputs and targets."""
        return content_digest(self.inputs), content_digest(self.targets)

    def cut(
        self, sizes: Sequence[int], device: torch.device, *, inputs: bool, targets: bool, copied: bool
    ) -> tuple[list[Any] | None, list[Any] | None]:
        """The micro-batches on a device.

        Args:
            sizes: samples by micro-batch.
            device: where.
            inputs: whether those of the inputs are read.
            targets: whether those of the targets are.
            copied: whether they shall be in memory of their own.
        """

        def parts(pieces: Sequence[Any] | None, dims: Dims) -> list[Any]:
            if self.ready and pieces is not None:
                return [moved(piece, device, copied=copied) for piece in pieces]
            whole = None if pieces is None else pieces[0]
            ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
            rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            return [moved(cut(whole, its, dims), device, copied=copied) for its in rows]

        return (
            parts(self.inputs, self.input_dims) if inputs else None,
            parts(self.targets, self.target_dims) if targets else None,
        )


def whole(
    inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None, dims: tuple[Dims, Dims, Dims]
) -> Given:
    """A mini-batch that is to be cut.

    Args:
        inputs: what the first layer takes; None: it is not given.
        targets: likewise of the loss function.
        kwargs: keyword arguments of the first layer.
        dims: where the samples of the three are.
    """
    given = inputs if kwargs is None else Keyworded(inputs, dict(kwargs))
    return Given(
        None if given is None else [given],
        None if targets is None else [targets],
        ready=False,
        input_dims=_input_dims(dims, keyworded=kwargs is not None),
        target_dims=dims[1],
    )


def ready(
    micro_batches: Iterable[Sequence[Any]], count: int, taker: object, dims: tuple[Dims, Dims, Dims]
) -> Given:
    """Micro-batches as the user has them; of an iterator the next ones.

    Args:
        micro_batches: pairs of inputs and targets, or these and keyword arguments of the first layer.
        count: how many it takes.
        taker: what takes them, for messages.
        dims: where the samples of inputs, targets and keyword arguments are.

    Raises:
        ConfigError: there are others than that.
    """
    sized = isinstance(micro_batches, Sequence)
    found = list(micro_batches if sized else islice(micro_batches, count))
    if len(found) != count:
        raise ConfigError(
            f"micro_batches has {len(found)}{'' if sized else ' left'}, and {taker} takes {count}; "
            "give as many"
        )
    widths = {len(each) if isinstance(each, (tuple, list)) else 0 for each in found}
    if len(widths) > 1 or not widths <= {2, 3}:
        raise ConfigError(
            "each of micro_batches is (inputs, targets), or (inputs, targets, kwargs); None where they are "
            "not read"
        )
    keyworded = widths == {3}
    inputs = [Keyworded(each[0], dict(each[2])) if keyworded else each[0] for each in found]
    targets = [each[1] for each in found]
    return Given(
        None if not keyworded and all(each is None for each in inputs) else inputs,
        None if all(each is None for each in targets) else targets,
        ready=True,
        input_dims=_input_dims(dims, keyworded=keyworded),
        target_dims=dims[1],
    )


def with_samples(pieces: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """The pieces of micro-batches that have samples."""
    return [piece for piece, size in zip(pieces, sizes, strict=True) if size]


def even(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Samples by micro-batch of a whole that is cut."""
    points = split_points(samples, micro_batches)
    return tuple(end - start for start, end in pairwise(points))


def _input_dims(dims: tuple[Dims, Dims, Dims], *, keyworded: bool) -> Dims:
    inputs, _, kwargs = dims
    if not keyworded or (isinstance(inputs, int) and inputs == kwargs):
        return inputs
    return Keyworded(inputs, kwargs)


def _counted(pieces: Sequence[Any] | None, dims: Dims, name: str) -> list[int] | None:
    if pieces is None:
        return None
    return [samples_in(piece, dims, name) for piece in pieces]
