"""What one worker was given of a mini-batch: as a whole, or as micro-batches that are ready.

What it does not do: ask the other workers what they were given; ``agreement.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

import torch

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from ..messages.mappings import flat_with_paths, know
from ..messages.values import Keyworded, content_digest, not_dense, number_of, signature
from .entries import Settled
from .samples import Dims, cut, samples_in, split_points
from .told import Form


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs and targets as a worker was given them.

    Attributes:
        inputs: all inputs in one piece, or one piece a micro-batch; None: this worker has none.
        targets: all targets in one piece, or one piece a micro-batch; None: this worker has none.
        ready: whether there is one piece a micro-batch.
        input_dims: dimensions of the samples in the inputs.
        target_dims: dimensions of the samples in the targets.
        sizes: samples by micro-batch, if the user states them.
        halving: the scheme, if it halves micro-batches that are ready.
        settled: lists whose samples are in their tensors, as other mini-batches showed.
    """

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    ready: bool
    input_dims: Dims
    target_dims: Dims
    sizes: Sequence[int] | None = None
    halving: str | None = None
    settled: Settled = field(default_factory=list)

    @property
    def form(self) -> Form:
        """In which form it was given."""
        if self.inputs is None and self.targets is None:
            return Form.NOTHING
        return Form.READY if self.ready else Form.WHOLE

    def counts(self) -> tuple[list[int] | None, list[int] | None]:
        """The samples of each piece of inputs and targets; None where these are not given.

        Raises:
            ConfigError: they have no samples; their numbers differ, also in a micro-batch; or none is known.
        """
        sides = [
            (self.inputs, self.input_dims, "inputs"),
            (self.targets, self.target_dims, "targets"),
        ]
        told = self.sizes
        if told is not None and self.halving is None:
            found = [None if pieces is None else list(told) for pieces, _, _ in sides]
            return found[0], found[1]
        cuts = not self.ready or self.halving is not None
        counted = [
            None
            if pieces is None or dims is None
            else [samples_in(each, dims, name, whole=not cuts, settled=self.settled) for each in pieces]
            for pieces, dims, name in sides
        ]
        for (pieces, dims, name), counts in zip(sides, counted, strict=True):
            if self.halving is not None and pieces is not None and dims is None:
                raise ConfigError(
                    f"{self.halving} halves micro-batches, and {name.removesuffix('s')}_dims=None tells no "
                    f"dimension in which those of the {name} are cut; say one, or take a scheme that halves "
                    "none"
                )
            if told is not None and counts is not None and counts != list(told):
                raise ConfigError(f"samples={list(told)}, and the micro-batches' {name} have {counts}")
        inputs, targets = counted
        if inputs is not None and targets is not None:
            for number, (one, other) in enumerate(zip(inputs, targets, strict=True)):
                if self.ready and one != other:
                    raise ConfigError(
                        f"micro-batch {number} has {one} samples in its inputs and {other} in its targets; "
                        "they have the same, in the dimensions that input_dims and target_dims say, or "
                        "samples= says how many"
                    )
        known = inputs if inputs is not None else targets
        if known is None and (self.inputs is not None or self.targets is not None):
            known = self._untold()
        return (None if self.inputs is None else known), (None if self.targets is None else targets or known)

    def _untold(self) -> list[int]:
        """The samples of what has none in any dimension: of ready micro-batches, one each."""
        if self.ready and self.input_dims is None and self.target_dims is None:
            return [1] * len(self.inputs or self.targets or ())
        if self.ready:
            raise ConfigError(
                "nothing tells how many samples the micro-batches have: of inputs and targets, those are not "
                "given here that have them; give both, or say samples="
            )
        raise ConfigError(
            "nothing tells how many samples the mini-batch has: say with input_dims or target_dims where "
            "they are, and give what has them to every worker; or give micro_batches that are ready"
        )

    def kinds(self, trains: bool, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """The kind of the mini-batch, 0 if this worker has no inputs, and those of ready micro-batches.

        Args:
            trains: whether gradients are computed.
            sizes: samples by micro-batch.
        """
        if self.inputs is None:
            return 0, []
        names = [sorted(each.kwargs) if isinstance(each, Keyworded) else () for each in self.inputs]
        if self.ready:
            parts = zip(self.inputs, names, sizes, strict=True)
            kinds = [signature(each, *its, trains, size) for each, its, size in parts]
            return 1 + number_of(*kinds), kinds
        return signature(self.inputs, *names[0], sum(sizes), trains), []

    def digests(self) -> tuple[float, float]:
        """Digests of the contents of inputs and targets."""
        return content_digest(self.inputs), content_digest(self.targets)

    def cut(self, pieces: Sequence[Any] | None, dims: Dims, sizes: Sequence[int]) -> list[Any]:
        """The micro-batches of ``inputs`` or ``targets``, where they were given.

        Args:
            pieces: the inputs or the targets.
            dims: where their samples are.
            sizes: samples by micro-batch.
        """
        if pieces is None:  # as the targets of a prediction are
            return [None] * len(sizes)
        if self.ready:
            return list(pieces)
        whole = pieces[0]
        rows = (slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))
        return [cut(whole, its, dims) for its in rows]


def whole(
    inputs: Any,
    targets: Any,
    kwargs: Mapping[str, Any] | None,
    dims: tuple[Dims, Dims, Dims],
    settled: Settled,
) -> Given:
    """A mini-batch to be cut.

    Args:
        inputs: inputs of the first layer; None: this worker has none.
        targets: targets of the loss function; None: this worker has none.
        kwargs: keyword arguments of the first layer.
        dims: dimensions of the samples in these three.
        settled: lists whose samples are in their tensors, as other mini-batches showed.

    Raises:
        ConfigError: one of the tensors is sparse or nested.
    """
    given = inputs if kwargs is None else Keyworded(inputs, dict(kwargs))
    _look_into(given, "inputs")
    _look_into(targets, "targets")
    return Given(
        None if given is None else [given],
        None if targets is None else [targets],
        ready=False,
        input_dims=_input_dims(dims, keyworded=kwargs is not None),
        target_dims=dims[1],
        settled=settled,
    )


def ready(
    micro_batches: Iterable[Sequence[Any]],
    sizes: Sequence[int] | None,
    schedule: Schedule,
    dims: tuple[Dims, Dims, Dims],
    *,
    halves: bool,
) -> Given:
    """The user's own micro-batches; of an iterator, the next ones.

    Args:
        micro_batches: pairs of inputs and targets, or these and keyword arguments of the first layer.
        sizes: samples of each, which weight its loss; None: the sizes of the dimensions ``dims``.
        schedule: schedule that runs them.
        dims: dimensions of the samples in inputs, targets and keyword arguments.
        halves: whether the schedule halves each.

    Raises:
        ConfigError: a micro-batch has another form, or one of its tensors is sparse or nested.
    """
    count = schedule.micro_batches
    sized = isinstance(micro_batches, Sequence)
    found = list(micro_batches if sized else islice(micro_batches, count))
    if len(found) != count:
        raise ConfigError(
            f"micro_batches has {len(found)}{'' if sized else ' left'}, and {schedule} takes {count}; "
            "give as many"
        )
    widths = {len(each) if isinstance(each, (tuple, list)) else 0 for each in found}
    if len(widths) > 1 or not widths <= {2, 3}:
        raise ConfigError(
            "each of micro_batches is (inputs, targets), or (inputs, targets, kwargs); None where they are "
            "not read"
        )
    if sizes is not None and (
        len(sizes) != count or not all(isinstance(size, int) and size >= 0 for size in sizes)
    ):
        raise ConfigError(
            f"samples={sizes!r} are to be the numbers of samples of {count} micro-batches, whole numbers "
            "from 0 on"
        )
    keyworded = widths == {3}
    inputs = [Keyworded(each[0], dict(each[2])) if keyworded else each[0] for each in found]
    targets = [each[1] for each in found]
    for number, (one, other) in enumerate(zip(inputs, targets, strict=True)):
        _look_into(one, "inputs", f" of micro-batch {number}")
        _look_into(other, "targets", f" of micro-batch {number}")
    return Given(
        None if not keyworded and all(each is None for each in inputs) else inputs,
        None if all(each is None for each in targets) else targets,
        ready=True,
        input_dims=_input_dims(dims, keyworded=keyworded),
        target_dims=dims[1],
        sizes=sizes,
        halving=schedule.scheme if halves else None,
    )


@lru_cache(maxsize=64)
def even(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Samples by micro-batch of a whole that is cut."""
    points = split_points(samples, micro_batches)
    return tuple(end - start for start, end in pairwise(points))


def _input_dims(dims: tuple[Dims, Dims, Dims], *, keyworded: bool) -> Dims:
    inputs, _, kwargs = dims
    if not keyworded or (isinstance(inputs, int) and inputs == kwargs):
        return inputs
    return Keyworded(inputs, kwargs)


def _look_into(tree: Any, name: str, where: str = "") -> None:
    """Search mappings of all classes, and refuse tensors that stages cannot pass on.

    Raises:
        ConfigError: a tensor is sparse or nested.
    """
    if not isinstance(tree, torch.Tensor):
        know(tree)
    elif tree.layout is torch.strided and not tree.is_nested:
        return
    for path, leaf in flat_with_paths(tree)[0]:
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            raise ConfigError(f"{name}{path}{where} is {not_dense(leaf)}")
