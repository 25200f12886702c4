"""Diagnosis of layers on shares of sequences: whether they compute what they compute of whole sequences.

Each position of the mesh runs the layer on its share, as in a step, and on the whole sequences of all shares,
as one process. So the diagnosis finds a layer that looks across the sequence without ``cf.attend`` (a
convolution, attention, a norm over positions), counts positions from the beginning of its share, or adds a
loss that is no mean over positions, as the balance of each sequence.

Of long shares the beginning of each half is compared, which makes a shorter sequence. The diagnosis does not
compare gradients, nor decide where outputs differ at few tokens alone, as by a choice among experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.contexts import Share, share_sequence
from counterflow.errors import ConfigError

from .comparison import distance
from .sequence_parts import Positions, Value, are_near, are_scattered, positions_of
from .tolerances import COARSE, LOSSES

_LOG = logging.getLogger(__name__)

_LENGTH = 32
"""Largest number of positions of a share that is compared; of shorter shares more is near a border."""

Result = tuple[Value, Mapping[str, Tensor]]
"""Output of a layer, and the losses that it adds, by name."""


class SharedLayer(NamedTuple):
    """A layer that is given shares of sequences.

    Attributes:
        place: the layer in words.
        stage: number of its stage.
        run: result of a share, without effect; None: the layer draws random numbers.
        run_whole: result of whole sequences, without effect; None: the layer draws random numbers.
        lower_precision: True if it computes in a lower precision than that of its weights.
    """

    place: str
    stage: int
    run: Callable[[Value], Result | None]
    run_whole: Callable[[Value], Result | None]
    lower_precision: bool


class Sharing(NamedTuple):
    """Positions that share sequences; all call the same functions in the same order.

    Attributes:
        share: share of this position.
        gather: whole sequences of the tensors of all positions, along a dimension.
        mean: mean over the positions of a tensor without positions.
    """

    share: Share
    gather: Callable[[Tensor, int], Tensor]
    mean: Callable[[Tensor], Tensor]


class _Undecided(Exception):  # noqa: N818 - an outcome, not an error
    pass


def diagnose_shared_layer(layer: SharedLayer, sharing: Sharing, value: Value, samples: int) -> str | None:
    """Compare a layer's result of a share with that of whole sequences; all positions call it.

    Args:
        layer: the layer.
        sharing: positions that share the sequences.
        value: input of the layer on this position's share.
        samples: number of samples.

    Returns:
        Why nothing could be decided, in words; None: the results are equal, or the value has no positions.

    Raises:
        ConfigError: they differ.
    """
    positions = positions_of(value, samples)
    if positions is None or positions.length % 2:
        return None
    length = min(positions.length, _LENGTH)
    part = _shortened(value, positions, length)
    sequence = _gathered(part, positions._replace(length=length), sharing)
    try:
        output, terms = _run(layer.run, part)
        whole_output, whole_terms = _run(layer.run_whole, sequence)
        pairs = [*_pairs(output, whole_output, samples, length, sharing.share)]
    except _Undecided as outcome:
        return str(outcome)
    if not pairs:
        return "it returns no tensor both of a share and of the whole sequence"
    expected, output = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if not are_near(expected, output, lower_precision=layer.lower_precision):
        if are_scattered(expected, output, lower_precision=layer.lower_precision):
            return "it differs at a few tokens, as where rounding changes a choice among experts"
        raise ConfigError(
            f"{layer.place} of stage {layer.stage} computes something else of a share of a sequence than of "
            "the whole sequence, so it looks across the sequence, or counts positions in its share; let its "
            "attention be cf.attend with a cf.Carry and its positions carry.positions(length), or train "
            "without cf.ContextParallel"
        )
    return _refuse_terms(layer, sharing, terms, whole_terms)


def _run(run: Callable[[Value], Result | None], value: Value) -> Result:
    try:
        result = run(value)
    except ConfigError:
        raise
    except Exception as error:  # it may take no other number of positions
        raise _Undecided(str(error)) from error
    if result is None:
        raise _Undecided("it draws random numbers in evaluation mode")
    return result


def _leaves_with_positions(value: Value, positions: Positions, change: Callable[[Tensor], Tensor]) -> Value:
    dim, length = positions

    def changed(leaf: Any) -> Any:
        has_positions = isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == length
        return change(leaf) if has_positions else leaf

    return pytree.tree_map(changed, value)


def _shortened(value: Value, positions: Positions, length: int) -> Value:
    # The beginnings of both halves are a share of shorter sequences.
    if length == positions.length:
        return value
    dim = positions.dim

    def beginnings(leaf: Tensor) -> Tensor:
        halves = leaf.chunk(2, dim)
        return torch.cat([half.narrow(dim, 0, length // 2) for half in halves], dim)

    return _leaves_with_positions(value, positions, beginnings)


def _gathered(value: Value, positions: Positions, sharing: Sharing) -> Value:
    return _leaves_with_positions(value, positions, lambda leaf: sharing.gather(leaf, positions.dim))


def _pairs(
    output: Value, sequence_output: Value, samples: int, length: int, share: Share
) -> Iterator[tuple[Tensor, Tensor]]:
    # A layer may leave what it needs on shares alone, such as the padding of its attention.
    tensors = dict(_tensors_by_path(sequence_output))
    for path, tensor in _tensors_by_path(output):
        if path in tensors:
            yield _share_of(tensors[path], tensor.shape, samples, length, share), tensor


def _tensors_by_path(value: Value) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


def _share_of(tensor: Tensor, shape: Sequence[int], samples: int, length: int, share: Share) -> Tensor:
    # Positions may be flattened with the samples.
    if tensor.shape == torch.Size(shape):
        return tensor
    dims = [dim for dim, (size, part) in enumerate(zip(tensor.shape, shape, strict=False)) if size != part]
    if tensor.dim() != len(shape) or len(dims) != 1:
        raise _Undecided(f"of whole sequences it makes a tensor of shape {list(tensor.shape)}")
    (dim,) = dims
    if shape[dim] == length:
        return share_sequence(tensor, share, dim)
    if shape[dim] == samples * length:
        by_sample = tensor.unflatten(dim, (samples, -1))
        return share_sequence(by_sample, share, dim + 1).flatten(dim, dim + 1)
    raise _Undecided(f"of whole sequences it makes a tensor of shape {list(tensor.shape)}")


def _refuse_terms(
    layer: SharedLayer, sharing: Sharing, terms: Mapping[str, Tensor], whole_terms: Mapping[str, Tensor]
) -> str | None:
    if terms.keys() != whole_terms.keys():
        names = ", ".join(map(repr, sorted(terms.keys() ^ whole_terms.keys())))
        return f"it does not add {names} both for a share and for the whole sequence"
    for name, term in sorted(terms.items()):
        mean = sharing.mean(term.detach().double())
        expected = whole_terms[name].detach().double()
        limit = COARSE if layer.lower_precision else LOSSES.of(term.dtype)
        if distance(expected, mean) > limit:
            raise ConfigError(
                f"{layer.place} of stage {layer.stage} adds {name!r} to the loss by cf.add_loss, which is no "
                f"mean over positions: of a sequence it is {expected:g}, and the mean of its shares is "
                f"{mean:g}; add a mean of what each token makes by itself, or train without "
                "cf.ContextParallel"
            )
    return None
