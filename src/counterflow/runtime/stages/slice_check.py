"""Check that a stage's layers compute slices like the whole sequence, in the stage's first micro-batch.

Layer by layer all slices run one after the other, and in one piece, with the same weights and without
dropout; outputs and the gradients of inputs are compared. So the check finds a layer that mixes positions
without a ``Carry`` (attention to both sides, a norm over positions), counts positions from the beginning of
the slice, detaches its carried state, or leaves what is enough for the next slice and too little for later
ones. It runs once more for a micro-batch at least twice as long, which a window may be too short for.

The check does not find errors in layers that draw random numbers in evaluation mode or pass on values without
a dimension of positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.common.trees import dimensional, tensors_in
from counterflow.errors import ConfigError

from ..messages.values import Value
from .interface import RunnableStage
from .named_layer import NamedLayer, place_of
from .sample_rows import SampleRows
from .skips import Carried
from .stage_wrappers import Run

_LOG = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Values that are apart by less, relative to the largest, differ by rounding; of other dtypes by 6 %."""

_LEAST = 3
"""Number of slices that are compared where the memory does not suffice for all."""

_GROWTH = 2
"""How many times as long a micro-batch has to be for another check."""

_PERIOD = 65521
"""Number of different weights in the sum of an output; a prime, so that no dimension divides it."""


class _Slices(NamedTuple):
    """Values of the slices of a micro-batch, the slices, and the value of the whole, if that is known."""

    values: Sequence[Value]
    rows: Sequence[SampleRows]
    whole: Value | None


class SliceCheck:
    """Check of one stage's first micro-batch.

    Args:
        runs: layers of the stage, each with its run and the numbers of its carried states.
    """

    def __init__(self, runs: Sequence[tuple[NamedLayer, Run, Sequence[int]]]) -> None:
        self._runs = runs
        self._states = {number for _, _, numbers in runs for number in numbers}
        self._micro_batch: tuple[int, int] | None = None
        """Step and number of the micro-batch whose slices are collected; None: of none."""
        self._slices: list[tuple[Value, SampleRows]] = []
        self._length = 0
        """Length of the longest micro-batch so far, in positions or in elements of each sample."""

    def expects(self, value: Value, step: int, rows: SampleRows) -> bool:
        """Whether a slice belongs to the check.

        Args:
            value: the input of its forward.
            step: the step's number.
            rows: the slice.
        """
        micro_batch = step, rows.micro_batch
        if rows.slice:
            return self._micro_batch == micro_batch
        if rows.start == rows.stop:
            return False
        free = self._micro_batch is None or self._micro_batch[0] != step
        if free and _length(value, rows) >= max(1, _GROWTH * self._length):
            self._micro_batch = micro_batch
        return self._micro_batch == micro_batch

    def add(self, copy: RunnableStage, value: Value, step: int, rows: SampleRows) -> None:
        """Keep the input of a slice's forward; compare layers when all slices are there.

        Args:
            copy: the stage.
            value: the input.
            step: the step's number.
            rows: the slice.

        Raises:
            ConfigError: a layer makes something else of the whole.
        """
        if not rows.slice:
            self._slices = []  # of a step that was ended by an error
        self._slices.append((pytree.tree_map_only(Tensor, _copy, value), rows))
        if rows.slice < rows.slices - 1:
            return
        slices, self._slices, self._micro_batch = self._slices, [], None
        self._length = max(self._length, _length(*slices[0]))
        try:
            self._compare(copy, slices, step)
        except torch.OutOfMemoryError:
            if len(slices) <= _LEAST:
                raise
            _LOG.warning(
                "the memory does not suffice to compare all %d slices of stage %d with the whole sequence; "
                "the first %d are compared", len(slices), copy.stage, _LEAST,
            )  # fmt: skip
            self._compare(copy, slices[:_LEAST], step)

    def _compare(self, copy: RunnableStage, slices: Sequence[tuple[Value, SampleRows]], step: int) -> None:
        values, rows = [_without(value, self._states) for value, _ in slices], [rows for _, rows in slices]
        whole = None
        norms = {id(module) for module, _ in copy.buffers.norms}  # by what they are given, as in training
        with calm(copy, lambda module: id(module) in norms), copy.precision.computing(), torch.enable_grad():
            for layer, run, numbers in self._runs:
                drawn = partial(_unless_drawn, copy, run, step)
                outputs = self._compare_layer(copy, layer, drawn, _Slices(values, rows, whole), numbers)
                if outputs is None:
                    _warn(layer, ", and what comes after it in its stage,")
                    break
                values, whole = outputs

    def _compare_layer(
        self,
        copy: RunnableStage,
        layer: NamedLayer,
        run: Callable[[Value, SampleRows], Value | None],
        inputs: _Slices,
        numbers: Sequence[int],
    ) -> tuple[list[Value], Value] | None:
        """Compare a layer's outputs; return the next layer's inputs, or None if the check cannot decide."""
        rows = inputs.rows
        leaves = [pytree.tree_map_only(Tensor, _leaf, value) for value in inputs.values]
        outputs: list[Value] = []
        states: dict[int, Any] = {}
        for value, its in zip(leaves, rows, strict=True):
            output = run(value._replace(skips=value.skips | states) if states else value, its)
            if output is None:
                return None
            if numbers:
                states = {number: output.skips[number] for number in numbers if number in output.skips}
            outputs.append(_without(output, set(numbers)))
        joined = _joined(_Slices(leaves, rows, inputs.whole))
        output = None if joined is None else run(joined[0], rows[0]._replace(slice=0, slices=1))
        if joined is None or output is None:
            return None
        output = _without(output, set(numbers))
        ours = _joined(_Slices(outputs, rows, output))
        if ours is None:
            return None
        connected = leaves if joined[1] else ()  # else the whole has no graph with the slices' inputs
        if not _same(ours[0], output, connected, plain=copy.precision.plain):
            raise ConfigError(
                f"{place_of(layer)} of stage {copy.stage} makes something else of a whole sequence than of "
                f"its {len(rows)} slices one after the other; if it looks across the sequence (or counts "
                "positions), let it hold a cf.Carry, take from it what the slices before left, and leave "
                "what all later ones need, or train without slices"
            )
        if not (joined[1] and ours[1]):
            _warn(layer, "")
        outputs, output = pytree.tree_map_only(Tensor, Tensor.detach, (outputs, output))
        return outputs, output


def _unless_drawn(copy: RunnableStage, run: Run, step: int, value: Value, rows: SampleRows) -> Value | None:
    """What a layer makes; None if it draws random numbers, so that it would be another the next time."""
    return copy.streams.unless_drawn(lambda: run(value, step, rows))


@contextmanager
def calm(copy: RunnableStage, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Keep in training mode only the modules that ``trains`` names; modes and buffers are restored."""
    modules = [module for layer in copy.layers for module in layer.module.modules()]
    modes = [module.training for module in modules]
    then = copy.buffers.snapshot()
    try:
        for module in modules:
            module.training = module.training and trains(module)
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        if copy.buffers.snapshot() is not then:
            copy.buffers.restore(then)


def _without(value: Value, numbers: set[int]) -> Value:
    if type(value) is not Carried:
        return value
    return Carried(value.value, {n: v for n, v in value.skips.items() if n not in numbers})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _length(value: Value, rows: SampleRows) -> int:
    """Length of a micro-batch in positions or, if these are not known, in elements of its first slice."""
    if rows.whole:
        return rows.whole
    first = next(tensors_in(value.value if type(value) is Carried else value), None)
    return 1 if first is None else first.numel() // rows.samples


def _sizes(slices: _Slices) -> list[int] | None:
    """Number of positions in each slice; None if not known.

    On a worker without the mini-batch they are the sizes of the first tensor in its second dimension or, if
    that contains the samples, in its first one.
    """
    if slices.rows[0].positions:
        return [rows.positions for rows in slices.rows]
    first = [next(iter(dimensional(value)), None) for value in slices.values]
    shapes = [tensor.shape for tensor in first if tensor is not None and tensor.dim() > 1]
    if len(shapes) < len(slices.values):
        return None
    dim = 0 if shapes[0][1] == slices.rows[0].samples != shapes[0][0] else 1
    return [shape[dim] for shape in shapes]


def _joined(slices: _Slices) -> tuple[Any, bool] | None:
    """Slices joined to one, and whether all of it is of them.

    What has no positions and differs between slices is the whole sequence's, if that is known. None: what is
    not, or nothing has positions.
    """
    flat = [pytree.tree_flatten(value) for value in slices.values]
    spec, sizes = flat[0][1], _sizes(slices)
    if sizes is None or any(other != spec for _, other in flat):
        return None
    wholes: Sequence[Any] = [None] * spec.num_leaves
    if slices.whole is not None:
        wholes, whole_spec = pytree.tree_flatten(slices.whole)
        if whole_spec != spec:
            return None
    leaves, joins, complete = [], False, True
    for whole, *parts in zip(wholes, *(leaves for leaves, _ in flat), strict=True):
        dim = _dim_of(parts, sizes)
        if dim is not None:
            joins = True
            leaves.append(torch.cat(parts, dim))
        elif all(_equal(part, parts[0]) for part in parts[1:]):
            leaves.append(parts[0])
        elif slices.whole is not None:
            complete = complete and not isinstance(whole, Tensor)
            leaves.append(whole)
        else:
            return None
    return (pytree.tree_unflatten(leaves, spec), complete) if joins or slices.whole is not None else None


def _dim_of(parts: Sequence[Any], sizes: Sequence[int]) -> int | None:
    """Dimension of the positions in the tensors of slices; None: they have none."""
    if not all(isinstance(part, Tensor) and part.dim() == parts[0].dim() for part in parts):
        return None
    dims = [dim for dim in range(parts[0].dim()) if [part.shape[dim] for part in parts] == sizes]
    return 1 if 1 in dims else next(iter(dims), None)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _same(ours: Any, theirs: Any, leaves: Sequence[Any], *, plain: bool) -> bool:
    """Whether outputs are the same, and the gradients that they give their inputs."""
    pairs = list(zip(dimensional(ours), dimensional(theirs), strict=False))
    if len(pairs) != len(dimensional(theirs)) or not all(
        _near(one, other, plain=plain) for one, other in pairs
    ):
        return False
    wanted = [leaf for value in leaves for leaf in dimensional(value) if leaf.requires_grad]
    if not plain or not wanted or not pairs:
        return True
    of_slices, of_whole = (_gradients(outputs, wanted) for outputs in zip(*pairs, strict=True))
    return all(
        one is other or _near(_there(one, leaf), _there(other, leaf), plain=plain)
        for one, other, leaf in zip(of_slices, of_whole, wanted, strict=True)
    )


def _there(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a sum of the outputs in which each element has another weight."""
    having = [tensor for tensor in outputs if tensor.requires_grad]
    if not having:
        return [None] * len(wanted)
    weights = [_weights(tensor) for tensor in having]
    return torch.autograd.grad(having, wanted, weights, allow_unused=True)


def _weights(tensor: Tensor) -> Tensor:
    """Weights of the elements of a tensor, of which neighbours differ."""
    count = tensor.numel()
    period = torch.arange(min(count, _PERIOD), device=tensor.device, dtype=torch.float64).cos()
    return period.to(tensor.dtype).repeat(-(-count // _PERIOD))[:count].view(tensor.shape)


def _near(one: Tensor, other: Tensor, *, plain: bool) -> bool:
    """Whether tensors are the same but for rounding, where both are finite: the step reports what is not."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if not one.numel():
        return True
    one, other = one.detach(), other.detach()
    rounding = _ROUNDING.get(one.dtype, 6e-2) if plain else 6e-2
    wild = ~(one.isfinite() & other.isfinite())
    apart = (one - other).abs_().masked_fill_(wild, 0.0)
    return bool(apart.max() <= rounding * other.abs().masked_fill_(wild, 0.0).max())


def _warn(layer: NamedLayer, more: str) -> None:
    _LOG.warning(
        "it could not be seen whether %s%s makes of slices what it makes of the whole sequence, as it is "
        "taken to do", place_of(layer), more,
    )  # fmt: skip
