"""Check that a stage's layers compute slices like the whole sequence, in the stage's first micro-batch.

Layer by layer the first two slices run one after the other, and in one piece, with the same weights and
without dropout; outputs and the gradients of inputs are compared. So the check finds a layer that mixes
positions without a ``Carry`` (attention to both sides, a norm over positions), counts positions from the
beginning of the slice, or detaches its carried state.

The check does not find what happens only from the third slice on, nor errors in layers that draw random
numbers in evaluation mode or pass on values without a dimension of positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from ..messages.values import Value
from .features import Run
from .named_layer import NamedLayer, place_of
from .randomness import SampleRows
from .skips import Carried

if TYPE_CHECKING:
    from .stage import StageCopy

_LOG = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Values that are apart by less, relative to the largest, differ by rounding; of other dtypes by 6 %."""

_SLICES = 2
"""Number of slices that are compared with one piece."""


class SliceCheck:
    """Check of one stage's first micro-batch.

    Args:
        runs: layers of the stage, each with its run and the numbers of its carried states.
    """

    def __init__(self, runs: Sequence[tuple[NamedLayer, Run, Sequence[int]]]) -> None:
        self._runs = runs
        self._seen: list[tuple[Value, SampleRows]] = []

    def look(self, copy: StageCopy, value: Value, step: int, rows: SampleRows) -> bool:
        """Note what a slice's forward runs on; gives whether all is seen.

        Args:
            copy: the stage.
            value: what it runs on.
            step: the step's number.
            rows: the slice.

        Raises:
            ConfigError: a layer makes something else of the whole.
        """
        if rows.start == rows.stop or (self._seen and rows.micro_batch != self._seen[0][1].micro_batch):
            return False
        self._seen.append((pytree.tree_map_only(Tensor, _copy, value), rows))
        if len(self._seen) < _SLICES:
            return False
        states = {number for _, _, numbers in self._runs for number in numbers}
        values, its = [_without(value, states) for value, _ in self._seen], [rows for _, rows in self._seen]
        self._seen = []
        with _calm(copy), copy.precision.computing(), torch.enable_grad():
            for layer, run, numbers in self._runs:
                following = self._layer(
                    copy, layer, partial(_drawing_nothing, copy, run, step), values, its, numbers
                )
                if following is None:
                    _LOG.warning(
                        "it could not be seen whether %s, and what comes after it in its stage, makes of "
                        "slices what it makes of the whole sequence, as it is taken to do",
                        place_of(layer),
                    )
                    break
                values = following
        return True

    def _layer(  # noqa: PLR0917
        self,
        copy: StageCopy,
        layer: NamedLayer,
        run: Callable[[Value, SampleRows], Value | None],
        values: Sequence[Value],
        rows: Sequence[SampleRows],
        numbers: Sequence[int],
    ) -> list[Value] | None:
        """Compare a layer's outputs; return the next layer's input, or None if the check cannot decide."""
        leaves = [pytree.tree_map_only(Tensor, _leaf, value) for value in values]
        found: list[Value] = []
        left: dict[int, Any] = {}
        for value, its in zip(leaves, rows, strict=True):
            given = value._replace(skips=value.skips | left) if left else value
            output = run(given, its)
            if output is None:
                return None
            if numbers:
                left = {number: output.skips[number] for number in numbers if number in output.skips}
            found.append(_without(output, set(numbers)))
        whole, ours = _joined(leaves, rows), _joined(found, rows)
        output = None if whole is None else run(whole[0], rows[0]._replace(slice=0, slices=1))
        if whole is None or ours is None or output is None:
            return None
        output = _without(output, set(numbers))
        if not _same(ours[0], output, leaves, plain=copy.precision.plain):
            raise ConfigError(
                f"{place_of(layer)} of stage {copy.stage} makes something else of a whole sequence than of "
                "its slices one after the other; if it looks across the sequence (or counts positions), let "
                "it hold a cf.Carry and take from it what the slices before left, or train without slices"
            )
        return [pytree.tree_map_only(Tensor, Tensor.detach, value) for value in found]


def _drawing_nothing(copy: StageCopy, run: Run, step: int, value: Value, rows: SampleRows) -> Value | None:
    """What a layer makes; None if it draws random numbers, so that it would be another the next time."""
    return copy.streams.unless_drawn(lambda: run(value, step, rows))


@contextmanager
def _calm(copy: StageCopy) -> Iterator[None]:
    """Without dropout; norms are by what they are given, as in training, and note nothing."""
    modules = [module for layer in copy.layers for module in layer.module.modules()]
    modes = [module.training for module in modules]
    norms = {id(module) for module, _ in copy.buffers.norms}
    then = copy.buffers.now()
    try:
        for module in modules:
            module.training = module.training and id(module) in norms
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        if copy.buffers.now() is not then:
            copy.buffers.restore(then)


def _without(value: Value, numbers: set[int]) -> Value:
    if type(value) is not Carried:
        return value
    return Carried(value.value, {n: v for n, v in value.skips.items() if n not in numbers})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]


def _sizes(values: Sequence[Any], rows: Sequence[SampleRows]) -> list[int] | None:
    """Number of positions in each slice; None if not known.

    On a worker without the mini-batch they are the sizes of the first tensor in its second dimension or, if
    that contains the samples, in its first one.
    """
    if rows[0].positions:
        return [its.positions for its in rows]
    first = [next(iter(_tensors(value)), None) for value in values]
    shapes = [tensor.shape for tensor in first if tensor is not None and tensor.dim() > 1]
    if len(shapes) < len(values):
        return None
    dim = 0 if shapes[0][1] == rows[0].samples != shapes[0][0] else 1
    return [shape[dim] for shape in shapes]


def _joined(values: Sequence[Any], rows: Sequence[SampleRows]) -> tuple[Any] | None:
    """Two slices joined to one, in a tuple; None if the dimension is not known."""
    (leaves, spec), (others, other_spec) = (pytree.tree_flatten(value) for value in values)
    sizes = _sizes(values, rows)
    if spec != other_spec or sizes is None:
        return None
    found = []
    joins = False
    for one, other in zip(leaves, others, strict=True):
        if isinstance(one, Tensor) and one.dim() == other.dim():
            along = [dim for dim in range(one.dim()) if [one.shape[dim], other.shape[dim]] == sizes]
            if along:
                joins = True
                found.append(torch.cat([one, other], 1 if 1 in along else along[0]))
                continue
        if type(one) is not type(other) or not (
            torch.equal(one, other) if isinstance(one, Tensor) else one == other
        ):
            return None
        found.append(one)
    return (pytree.tree_unflatten(found, spec),) if joins else None


def _same(ours: Any, theirs: Any, leaves: Sequence[Any], *, plain: bool) -> bool:
    """Whether outputs are the same, and the gradients that they give their inputs."""
    pairs = list(zip(_tensors(ours), _tensors(theirs), strict=False))
    if len(pairs) != len(_tensors(theirs)) or not all(_near(one, other, plain=plain) for one, other in pairs):
        return False
    wanted = [leaf for value in leaves for leaf in _tensors(value) if leaf.requires_grad]
    if not plain or not wanted:
        return True
    made = [_gradients(outputs, wanted) for outputs in zip(*pairs, strict=True)] if pairs else []
    return (
        all(
            one is other or _near(_there(one, leaf), _there(other, leaf), plain=plain)
            for one, other, leaf in zip(*made, wanted, strict=True)
        )
        if made
        else True
    )


def _there(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a sum of the outputs in which each element has another weight."""
    having = [tensor for tensor in outputs if tensor.requires_grad]
    if not having:
        return [None] * len(wanted)
    weights = [
        torch.arange(t.numel(), device=t.device, dtype=torch.float64).cos().to(t.dtype).view(t.shape)
        for t in having
    ]
    return torch.autograd.grad(having, wanted, weights, allow_unused=True)


def _near(one: Tensor, other: Tensor, *, plain: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not one.numel():
        return True
    rounding = _ROUNDING.get(one.dtype, 6e-2) if plain else 6e-2
    wide, its = one.detach().double(), other.detach().double()
    if not bool(its.isfinite().all()):
        return True  # the step says so
    return bool((wide - its).abs().max() <= rounding * its.abs().max())
