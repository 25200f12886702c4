"""Inputs and targets that the user passes to one worker: unsplit, or as ready micro-batches.

It does not compare them with those of other workers; ``agreement.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

import torch

from counterflow.api.contexts import sequences_of
from counterflow.common.mappings import flat_with_paths, register_mapping_classes
from counterflow.common.numbering import number_of
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from ..messages.values import Keyworded, content_digest, not_dense, signature
from .entries import KnownLayouts
from .samples import Dims, cut, samples_in, split_points
from .step_report import BatchForm, CallKind

_MODES = {CallKind.GENERATE, CallKind.GENERATE_WHOLE}
"""Kinds of calls without gradients whose layers do not pass on what they do in others."""


@dataclass(frozen=True, slots=True)
class UserBatch:
    """Inputs and targets of one worker.

    Attributes:
        inputs: all inputs in one piece, or one piece a micro-batch; None: this worker has none.
        targets: all targets in one piece, or one piece a micro-batch; None: this worker has none.
        ready: whether there is one piece a micro-batch.
        input_dims: dimensions of the samples in the inputs.
        target_dims: dimensions of the samples in the targets.
        sizes: samples by micro-batch, if the user states them.
        halving_scheme: the scheme, if it halves micro-batches that are ready.
        known_layouts: lists whose samples are in their tensors, as other mini-batches showed.
    """

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    ready: bool
    input_dims: Dims
    target_dims: Dims
    sizes: Sequence[int] | None = None
    halving_scheme: str | None = None
    known_layouts: KnownLayouts = field(default_factory=list)

    @property
    def form(self) -> BatchForm:
        """Form of the mini-batch."""
        if self.inputs is None and self.targets is None:
            return BatchForm.NOTHING
        return BatchForm.READY if self.ready else BatchForm.UNSPLIT

    def dims_of_inputs(self, inputs: Dims, kwargs: Dims) -> Dims:
        """Dimensions of the inputs as one tree, with keyword arguments if there are any.

        Args:
            inputs: dimensions in the inputs.
            kwargs: dimensions in keyword arguments of the first layer.
        """
        return _input_dims(inputs, kwargs, keyworded=isinstance((self.inputs or [None])[0], Keyworded))

    def refuse_graphs(self) -> None:
        """Refuse tensors that require gradients, which only the workers of their stage would compute.

        Raises:
            ConfigError: an input or a target requires a gradient.
        """
        for name, pieces in (("inputs", self.inputs), ("targets", self.targets)):
            if any(tensor.requires_grad for tensor in tensors_in(pieces)):
                raise ConfigError(
                    f"a tensor of the {name} requires a gradient, and a pipeline computes those of its "
                    "model's parameters alone; detach it, or put the module that computes it into the model"
                )

    def counts(self) -> tuple[list[int] | None, list[int] | None]:
        """The samples of each piece of inputs and targets; None where these are not given.

        Raises:
            ConfigError: they have no samples; their numbers differ, also in a micro-batch; or none is known.
        """
        sides = [
            (self.inputs, self.input_dims, "inputs"),
            (self.targets, self.target_dims, "targets"),
        ]
        sizes = self.sizes
        if sizes is not None and self.halving_scheme is None:
            stated = [None if pieces is None else list(sizes) for pieces, _, _ in sides]
            return stated[0], stated[1]
        cuts = not self.ready or self.halving_scheme is not None
        counted = [
            None
            if pieces is None or dims is None
            else [
                samples_in(piece, dims, name, uncut=not cuts, known_layouts=self.known_layouts)
                for piece in pieces
            ]
            for pieces, dims, name in sides
        ]
        for (pieces, dims, name), counts in zip(sides, counted, strict=True):
            if self.halving_scheme is not None and pieces is not None and dims is None:
                raise ConfigError(
                    f"{self.halving_scheme} halves micro-batches, and {name.removesuffix('s')}_dims=None "
                    f"tells no dimension in which those of the {name} are cut; say one, or take a scheme "
                    "that halves none"
                )
            if sizes is not None and counts is not None and counts != list(sizes):
                raise ConfigError(f"samples={list(sizes)}, and the micro-batches' {name} have {counts}")
        inputs, targets = counted
        if inputs is not None and targets is not None:
            for number, (in_inputs, in_targets) in enumerate(zip(inputs, targets, strict=True)):
                if self.ready and in_inputs != in_targets:
                    raise ConfigError(
                        f"micro-batch {number} has {in_inputs} samples in its inputs and {in_targets} in "
                        "its targets; they have the same, in the dimensions that input_dims and target_dims "
                        "say, or samples= says how many"
                    )
        known = inputs if inputs is not None else targets
        if known is None and (self.inputs is not None or self.targets is not None):
            known = self._default_counts()
        return (None if self.inputs is None else known), (None if self.targets is None else targets or known)

    def _default_counts(self) -> list[int]:
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

    def shape_signatures(self, call: CallKind, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """Signature of the mini-batch, 0 if this worker has no inputs, and signatures of ready micro-batches.

        Args:
            call: kind of the call; layers may pass on more with gradients, and while they generate.
            sizes: samples by micro-batch.
        """
        if self.inputs is None:
            return 0, []
        mode = call if call in _MODES else call.trains
        names = [sorted(piece.kwargs) if isinstance(piece, Keyworded) else () for piece in self.inputs]
        if self.ready:
            parts = zip(self.inputs, names, sizes, strict=True)
            signatures = [signature(piece, *keys, mode, size) for piece, keys, size in parts]
            return 1 + number_of(*signatures), signatures
        return signature(self.inputs, *names[0], sum(sizes), mode), []

    def digests(self) -> tuple[float, float]:
        """Digests of the contents of inputs and targets."""
        return content_digest(self.inputs), content_digest(self.targets)

    def sequence_digests(self) -> tuple[float, float]:
        """Digests of the whole sequences of which inputs and targets are shares; 0: not known."""
        inputs, targets = (
            content_digest([*filter(torch.is_tensor, map(sequences_of, tensors_in(tree)))] or None)
            for tree in (self.inputs, self.targets)
        )
        return inputs, targets

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
        tree = pieces[0]
        rows = (slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))
        return [cut(tree, samples, dims) for samples in rows]


def unsplit(
    inputs: Any,
    targets: Any,
    kwargs: Mapping[str, Any] | None,
    dims: tuple[Dims, Dims, Dims],
    known_layouts: KnownLayouts,
) -> UserBatch:
    """A mini-batch to be cut.

    Args:
        inputs: inputs of the first layer; None: this worker has none.
        targets: targets of the loss function; None: this worker has none.
        kwargs: keyword arguments of the first layer.
        dims: dimensions of the samples in these three.
        known_layouts: lists whose samples are in their tensors, as other mini-batches showed.

    Raises:
        ConfigError: one of the tensors is sparse or nested.
    """
    tree = inputs if kwargs is None else Keyworded(inputs, dict(kwargs))
    _look_into(tree, "inputs")
    _look_into(targets, "targets")
    return UserBatch(
        None if tree is None else [tree],
        None if targets is None else [targets],
        ready=False,
        input_dims=_input_dims(dims[0], dims[2], keyworded=kwargs is not None),
        target_dims=dims[1],
        known_layouts=known_layouts,
    )


def ready(
    micro_batches: Iterable[Sequence[Any]],
    sizes: Sequence[int] | None,
    schedule: Schedule,
    dims: tuple[Dims, Dims, Dims],
    *,
    halves: bool,
) -> UserBatch:
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
    pieces = list(micro_batches if sized else islice(micro_batches, count))
    if len(pieces) != count:
        raise ConfigError(
            f"micro_batches has {len(pieces)}{'' if sized else ' left'}, and {schedule} takes {count}; "
            "give as many"
        )
    widths = {len(piece) if isinstance(piece, (tuple, list)) else 0 for piece in pieces}
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
    inputs = [Keyworded(piece[0], dict(piece[2])) if keyworded else piece[0] for piece in pieces]
    targets = [piece[1] for piece in pieces]
    for number, (its_inputs, its_targets) in enumerate(zip(inputs, targets, strict=True)):
        _look_into(its_inputs, "inputs", f" of micro-batch {number}")
        _look_into(its_targets, "targets", f" of micro-batch {number}")
    return UserBatch(
        None if not keyworded and all(piece is None for piece in inputs) else inputs,
        None if all(piece is None for piece in targets) else targets,
        ready=True,
        input_dims=_input_dims(dims[0], dims[2], keyworded=keyworded),
        target_dims=dims[1],
        sizes=sizes,
        halving_scheme=schedule.scheme if halves else None,
    )


@lru_cache(maxsize=64)
def even(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Samples by micro-batch of a whole that is cut."""
    points = split_points(samples, micro_batches)
    return tuple(end - start for start, end in pairwise(points))


def _input_dims(inputs: Dims, kwargs: Dims, *, keyworded: bool) -> Dims:
    if not keyworded or (isinstance(inputs, int) and inputs == kwargs):
        return inputs
    return Keyworded(inputs, kwargs)


def _look_into(tree: Any, name: str, where: str = "") -> None:
    if not isinstance(tree, torch.Tensor):
        register_mapping_classes(tree)
    elif tree.layout is torch.strided and not tree.is_nested:
        return
    for path, leaf in flat_with_paths(tree)[0]:
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            raise ConfigError(f"{name}{path}{where} is {not_dense(leaf)}")
