"""Values of parts of sequences: their positions, their join, and its comparison with the value of the whole.

Which dimension has the positions is not said by a layer. It is that of a number of positions, the second one
where several fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.trees import dimensional

from .comparison import distance
from .tolerances import ACTIVATIONS, COARSE

_FEW, _FEW_IN_LOWER = 0.03, 0.1
"""Largest share of tokens at which outputs may differ because of rounding, and in lower precision."""

_PERIOD = 65521
"""Number of different weights in the sum of an output; a prime, so that no dimension divides it."""

Value = Any


class Positions(NamedTuple):
    """Positions of a value.

    Attributes:
        dim: their dimension in its first tensor that has two.
        length: their number.
    """

    dim: int
    length: int


class Joined(NamedTuple):
    """Parts joined to a sequence.

    Attributes:
        value: value of the sequence.
        complete: True if all of its tensors are of the parts.
        joins: True if some tensor has positions.
    """

    value: Value
    complete: bool
    joins: bool


def positions_of(value: Value, samples: int) -> Positions | None:
    """Positions of a value, in its second dimension, or in the first one if the second contains the samples.

    Args:
        value: value of a sequence, or of a part.
        samples: number of samples.

    Returns:
        None: no tensor has two dimensions.

    >>> positions_of(torch.zeros(4, 8, 3), 4), positions_of({"x": torch.zeros(8, 4, 3)}, 4)
    (Positions(dim=1, length=8), Positions(dim=0, length=8))
    """
    shape = next((tensor.shape for tensor in dimensional(value) if tensor.dim() > 1), None)
    if shape is None:
        return None
    dim = 0 if shape[1] == samples != shape[0] else 1
    return Positions(dim, shape[dim])


def join_parts(parts: Sequence[Value], sizes: Sequence[int], sequence: Value | None = None) -> Joined | None:
    """Join the values of parts to that of their sequence.

    A leaf that has no positions and differs between parts, or is no tensor, is that of the sequence, if that
    is known. Otherwise a number that is the length of all parts is not known: it may be that of the sequence.

    Args:
        parts: values of one structure.
        sizes: number of positions of each part.
        sequence: value of the sequence, if known.

    Returns:
        None: structures differ, or a leaf is not known.
    """
    flat = [pytree.tree_flatten(value) for value in parts]
    spec = flat[0][1]
    if any(spec_of_part != spec for _, spec_of_part in flat):
        return None
    sequence_leaves: Sequence[Any] = [None] * spec.num_leaves
    if sequence is not None:
        sequence_leaves, sequence_spec = pytree.tree_flatten(sequence)
        if sequence_spec != spec:
            return None
    leaves, joins, complete = [], False, True
    for of_sequence, *of_parts in zip(sequence_leaves, *(leaves for leaves, _ in flat), strict=True):
        dim = _position_dim(of_parts, sizes)
        if dim is not None:
            joins = True
            leaves.append(torch.cat(of_parts, dim))
        elif sequence is not None and not isinstance(of_parts[0], Tensor):
            leaves.append(of_sequence)  # a number that parts share may be their length
        elif _all_equal(of_parts):
            if type(of_parts[0]) is int and {of_parts[0]} == {*sizes}:
                return None
            leaves.append(of_parts[0])
        elif sequence is not None:
            complete = complete and not isinstance(of_sequence, Tensor)
            leaves.append(of_sequence)
        else:
            return None
    return Joined(pytree.tree_unflatten(leaves, spec), complete, joins)


def with_shared_leaves(parts: Sequence[Value], sizes: Sequence[int]) -> Sequence[Value]:
    """Return parts with one tensor for those that have no positions and are equal in all parts.

    Their join has the same tensor, so that its gradient is the sum of those of all parts, as it is in a step.

    Args:
        parts: values of one structure; others are returned as they are.
        sizes: number of positions of each part.
    """
    flat = [pytree.tree_flatten(value) for value in parts]
    spec = flat[0][1]
    if any(spec_of_part != spec for _, spec_of_part in flat):
        return parts
    leaves = [
        [of_parts[0]] * len(parts)
        if _position_dim(of_parts, sizes) is None and _all_equal(of_parts)
        else of_parts
        for of_parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return [
        pytree.tree_unflatten([of_parts[number] for of_parts in leaves], spec) for number in range(len(parts))
    ]


def are_near(expected: Value, got: Value, inputs: Sequence[Value] = (), *, lower_precision: bool) -> bool:
    """True if outputs are equal up to rounding, and the gradients that they give their inputs.

    Args:
        expected: output of the whole.
        got: joined outputs of the parts.
        inputs: leaves of the graphs of both; empty: gradients are not compared.
        lower_precision: True if layers compute in a lower precision than that of their outputs.
    """

    def near(expected: Tensor, got: Tensor) -> bool:
        return distance(expected, got) <= (COARSE if lower_precision else ACTIVATIONS.of(expected.dtype))

    pairs = list(zip(dimensional(expected), dimensional(got), strict=False))
    if len(pairs) != len(dimensional(expected)) or not all(near(*pair) for pair in pairs):
        return False
    pairs = [pair for pair in pairs if pair[0] is not pair[1]]  # a value without positions is the whole's
    leaves = [leaf for value in inputs for leaf in dimensional(value) if leaf.requires_grad]
    if lower_precision or not leaves or not pairs:
        return True
    gradients = (_gradients(outputs, leaves) for outputs in zip(*pairs, strict=True))
    return all(
        of_whole is of_parts or near(_or_zeros(of_whole, leaf), _or_zeros(of_parts, leaf))
        for of_whole, of_parts, leaf in zip(*gradients, leaves, strict=True)
    )


def are_scattered(expected: Value, got: Value, *, lower_precision: bool) -> bool:
    """True if outputs differ at few tokens alone, and at no position in all samples.

    Rounding that changes a choice among experts does so. What looks across sequences differs at the same
    positions in all samples, those behind a border.

    Args:
        expected: output of the whole.
        got: joined outputs of the parts.
        lower_precision: as of ``are_near``.

    >>> whole = torch.ones(4, 64, 8)
    >>> token, column = whole.clone(), whole.clone()
    >>> token[2, 5], column[:, 5] = 0, 0
    >>> [are_scattered(whole, part, lower_precision=False) for part in (whole, token, column)]
    [False, True, False]
    """
    differs = False
    for tensor, part in zip(dimensional(expected), dimensional(got), strict=False):
        limit = COARSE if lower_precision else ACTIVATIONS.of(tensor.dtype)
        if distance(tensor, part) <= limit:
            continue
        if tensor.dim() < 3 or tensor.shape != part.shape or not tensor.is_floating_point():
            return False
        differences = (tensor - part).detach().abs().flatten(2).amax(-1)
        wrong = ~(differences <= limit * tensor.detach().abs().max())
        columns = [wrong.all(dim).any() for dim in (0, 1) if wrong.shape[dim] > 1]
        few = _FEW_IN_LOWER if limit >= COARSE else _FEW
        if float(wrong.double().mean()) > few or any(map(bool, columns)):
            return False
        differs = True
    return differs


def _position_dim(parts: Sequence[Any], sizes: Sequence[int]) -> int | None:
    if not all(isinstance(part, Tensor) and part.dim() == parts[0].dim() for part in parts):
        return None
    dims = [dim for dim in range(parts[0].dim()) if [part.shape[dim] for part in parts] == [*sizes]]
    return 1 if 1 in dims else next(iter(dims), None)


def _all_equal(of_parts: Sequence[Any]) -> bool:
    return all(_equal(part, of_parts[0]) for part in of_parts[1:])


def _equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    return torch.equal(first, second) if isinstance(first, Tensor) else bool(first == second)


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    if not differentiable:
        return [None] * len(leaves)
    weights = [_weights(tensor) for tensor in differentiable]
    return torch.autograd.grad(differentiable, leaves, weights, allow_unused=True)


def _weights(tensor: Tensor) -> Tensor:
    """Weights of the elements of a tensor, of which neighbours differ."""
    count = tensor.numel()
    period = torch.arange(min(count, _PERIOD), device=tensor.device, dtype=torch.float64).cos()
    return period.to(tensor.dtype).repeat(-(-count // _PERIOD))[:count].view(tensor.shape)
