"""Check that what layers add to the loss is a mean over samples, in the first mini-batch of a kind and later.

Layer by layer a stage runs once more on what it ran on, in evaluation mode. A layer that adds to the loss
runs on all samples and on two parts of them: what it adds, and the gradients of its input and weights, are
compared as the losses of micro-batches are (``loss_check.py``). So the check finds a product of means over
the samples, as the balance of a router is.

Between layers nothing says which dimension the samples are in: each one of their number is tried, and one in
which the parts fit is enough. The check cannot decide about a layer that draws random numbers in evaluation
mode, or whose input has no such dimension, or of a stage that is sharded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.common.trees import dimensional
from counterflow.errors import ConfigError

from ..dtensors import is_dtensor
from ..messages.values import Unit, Value
from ..stages.named_layer import NamedLayer, place_of
from ..stages.sample_rows import SampleRows
from ..stages.slice_check import calm
from ..stages.stage_wrappers import Run
from .graded import FITS, UNDECIDED, Comparison, Graded, added, as_leaves, compare, leaves_of, rounding_of
from .loss_check import FirstOfKind, points
from .losses import UnitLoss
from .step_report import Normaliser

if TYPE_CHECKING:
    from ..stages.stage import LocalStage

_LOG = logging.getLogger(__name__)

_LOW = torch.float16, torch.bfloat16
_COARSE = 6e-2
"""Rounding of what layers add that compute in lower precision."""

_TRIES = 8
"""Number of mini-batches that are checked again because one could not be decided."""

_PLAIN = -1
"""In place of a dimension: the first one has the samples, each with as many rows."""

Terms = Mapping[str, Tensor]


class AddedChecks:
    """Checks of what the layers of one pipeline add to the loss."""

    def __init__(self) -> None:
        self._first = FirstOfKind()
        self._warned = False
        self._tries = 0
        """Number of mini-batches that are still checked for what was not decided."""

    def of(self, kind: int, *, evaluates: bool, again: bool = False) -> AddedCheck | None:
        """Return the check of a mini-batch; None: it needs none. Arguments as of ``LossChecks.of``."""
        self._tries -= 1
        first = self._first((kind, evaluates)) or self._tries >= 0
        if not first and not again:
            return None
        return AddedCheck(self._undecided, graph=not evaluates, one=not first)

    def _undecided(self, reason: str) -> None:
        """Warn once that a check could not decide, and check again."""
        if not self._warned:
            self._warned, self._tries = True, _TRIES
            _LOG.warning(
                "it could not be seen whether what layers add to the loss is a mean over samples, as it is "
                "taken to be (%s)",
                reason,
            )


class _Layer(NamedTuple):
    """A layer that adds to the loss.

    Attributes:
        copy: its stage.
        layer: the layer.
        run: what it makes of a value, and what it adds; None: it draws random numbers.
        weights: weights whose gradients are compared.
    """

    copy: LocalStage
    layer: NamedLayer
    run: Callable[[Value], tuple[Value, Terms] | None]
    weights: Sequence[Tensor]


class AddedCheck:
    """Check of one mini-batch on one worker.

    Args:
        undecided: called with the reason if the check cannot decide.
        graph: whether gradients are compared as well.
        one: whether one unit of each stage is enough.
    """

    def __init__(self, undecided: Callable[[str], object], *, graph: bool, one: bool) -> None:
        self._undecided, self._graph, self._one = undecided, graph, one
        self._single: dict[tuple[int, int], Value] = {}
        """The last inputs of one sample, by stage and slice."""
        self._over: set[int] = set()

    def look(self, copy: LocalStage, value: Value, step: int, rows: SampleRows) -> None:
        """Check what a stage adds for a unit.

        Args:
            copy: the stage.
            value: copy of what the stage ran on.
            step: the step's number.
            rows: samples of the unit.

        Raises:
            ConfigError: what a layer adds is no mean over samples, or positions.
        """
        if copy.stage in self._over:
            return
        value, samples = copy.carried(value), rows.stop - rows.start
        values = [value]
        if samples == 1:
            before = self._single.get((copy.stage, rows.slice))
            self._single[copy.stage, rows.slice] = value
            if before is None:
                return
            values = [before, value]
        if self._one:
            self._over.add(copy.stage)
        if copy.module is not None:
            self._over.add(copy.stage)
            self._undecided("the stage is sharded")
            return
        try:
            seen = any(self._walk(copy, values, step, rows, training=mode) for mode in (False, True))
        except ConfigError:
            raise
        except Exception as error:
            self._undecided(f"{type(error).__name__}: {error}")
            return
        if not seen:
            self._undecided("layers add nothing when they run again")

    def _walk(
        self, copy: LocalStage, values: Sequence[Value], step: int, rows: SampleRows, *, training: bool
    ) -> bool:
        """Run a stage layer by layer; gives whether any layer adds anything."""
        seen = False
        with _still(copy, training=training), copy.precision.computing(), torch.no_grad():
            for layer, run, carries in copy.layer_runs():
                weights = [p for p in layer.module.parameters() if p.requires_grad and not is_dtensor(p)]
                its = _Layer(copy, layer, partial(_ran, copy, run, step, rows), weights)
                made = [its.run(value) for value in values]
                there = [each for each in made if each is not None]
                if len(there) < len(values):
                    self._undecided(f"{place_of(layer)} draws random numbers")
                    return True
                if any(terms for _, terms in there):
                    seen = True
                    if training and copy.buffers.norms:
                        self._undecided(f"{place_of(layer)} adds in training mode alone, beside batch norms")
                    else:
                        self._look_at(its, values, rows, carries)
                values = [output for output, _ in there]
        return seen

    def _look_at(
        self, its: _Layer, values: Sequence[Value], rows: SampleRows, carries: Sequence[int]
    ) -> None:
        """Compare what a layer adds of samples; of slices, which are added by their share, of positions."""
        samples = rows.stop - rows.start
        self._refuse(its, self._found(its, values, samples), max(2, samples), "samples")
        if rows.slices > 1 and not carries:
            positions = rows.positions or _second_size(values[0])
            if positions > 1:
                found = self._found(its, values[:1], positions)
                self._refuse(its, found, positions, "positions")

    def _found(self, its: _Layer, values: Sequence[Value], size: int) -> Mapping[str, Comparison]:
        """What comparisons show by name, where parts fit best."""
        best: Mapping[str, Comparison] = {}
        for dim in _dims(values[0], size):
            whole = values[0] if len(values) == 1 else _joined(values, dim, size)
            if whole is None:
                continue
            for point in points(size * len(values)):
                try:
                    found = self._compared(its, whole, dim, size * len(values), point)
                except Exception:  # parts in another dimension may be what the layer takes
                    break
                if all(each.decided for each in found.values()):
                    if all(each == FITS for each in found.values()):
                        return found
                    best = best or found
                    break
        return best

    def _compared(
        self, its: _Layer, whole: Value, dim: int, size: int, point: int
    ) -> Mapping[str, Comparison]:
        """Compare what a layer adds of all samples with what it adds of two parts."""
        with torch.set_grad_enabled(self._graph):
            value = as_leaves(whole, always=True) if self._graph else whole
            leaves = [*leaves_of(value), *its.weights] if self._graph else []
            parts = [(slice(0, size), size), (slice(0, point), point), (slice(point, size), size - point)]
            made = [self._terms(its, _cut(value, dim, cut, size), leaves, by) for cut, by in parts]
        names = {name for each in made for name in each}
        found: dict[str, Comparison] = {}
        for name in names:
            each = [terms[name] for terms in made if name in terms]
            if len(each) < len(made):
                found[name] = UNDECIDED
                continue
            gradients = added([part.gradients for part in each[1:]])
            found[name] = compare(each[0], [part.entry for part in each[1:]], gradients)
        return found

    @staticmethod
    def _terms(its: _Layer, value: Value, leaves: Sequence[Tensor], by: int) -> Mapping[str, Graded]:
        """What a layer adds of some samples, with gradients, each times their number."""
        made = its.run(pytree.tree_map_only(Tensor, torch.clone, value))
        assert made is not None
        found: dict[str, Graded] = {}
        low = _is_low(its, [*(t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)), *its.weights])
        for name, term in made[1].items():
            gradients: Sequence[Tensor | None] = [None] * len(leaves)
            if leaves and term.requires_grad:
                seed = torch.full_like(term, by)
                gradients = torch.autograd.grad(term, leaves, seed, allow_unused=True, retain_graph=True)
            entry = UnitLoss(Unit(0), term.detach(), by, 1.0, Normaliser.SAMPLES, {})
            rounding = [max(_COARSE if low else 0.0, rounding_of(leaf, term)) for leaf in leaves]
            found[name] = Graded(entry, gradients, rounding, _COARSE if low else None)
        return found

    def _refuse(self, its: _Layer, found: Mapping[str, Comparison], size: int, what: str) -> None:
        """Refuse what is no mean.

        Raises:
            ConfigError: a comparison shows so.
        """
        if not found:
            self._undecided(f"of what {place_of(its.layer)} adds no parts could be compared")
        for name, each in sorted(found.items()):
            if each.value is not None:
                whole, parts = each.value
                shown = f"of {size} {what} it is {whole:g}, and those of parts of them make {parts:g}"
            elif each.gradient is not None:
                shown = f"its gradient for {size} {what} is {each.gradient:.1%} off that of parts of them"
            else:
                continue
            raise ConfigError(
                f"{place_of(its.layer)} of stage {its.copy.stage} adds {name!r} to the loss by cf.add_loss, "
                f"which is no mean over {what}: {shown}; so what micro-batches add does not make one "
                "process's. Add a mean of what each sample (or token) makes by itself, as a z-loss or the "
                "balance of each sequence; or insist on the mean of what micro-batches add with "
                "per_micro_batch_loss=True"
            )


def _ran(copy: LocalStage, run: Run, step: int, rows: SampleRows, value: Value) -> tuple[Value, Terms] | None:
    with added_losses() as terms:
        output = copy.streams.unless_drawn(lambda: (run(value, step, rows),))
    return None if output is None else (output[0], terms)


@contextmanager
def _still(copy: LocalStage, *, training: bool) -> Iterator[None]:
    """Context in which modules note nothing; unless ``training`` they are in evaluation mode."""
    with calm(copy, lambda _: training), copy.streams.kept(), copy.buffers.as_then(copy.buffers.now()):
        yield


def _is_low(its: _Layer, tensors: Sequence[Tensor]) -> bool:
    """Whether a layer computes in a lower precision."""
    plain = its.copy.precision.plain and not torch.is_autocast_enabled(its.copy.streams.device.type)
    return not plain or any(tensor.dtype in _LOW for tensor in tensors)


def _second_size(value: Value) -> int:
    """The size of the first tensor's second dimension, where positions are as a rule."""
    first = next(iter(dimensional(value)), None)
    return first.shape[1] if first is not None and first.dim() > 1 else 0


def _dims(value: Value, size: int) -> list[int]:
    """Dimensions that may have the samples."""
    tensors = dimensional(value)
    most = max((tensor.dim() for tensor in tensors), default=0)
    found = [d for d in range(most) if any(t.dim() > d and t.shape[d] == size for t in tensors)]
    return found or ([_PLAIN] if any(t.shape[0] % size == 0 for t in tensors) else [])


def _has(tensor: Tensor, dim: int, size: int) -> bool:
    if dim == _PLAIN:
        return tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % size == 0
    return tensor.dim() > dim and tensor.shape[dim] == size


def _cut(value: Value, dim: int, rows: slice, size: int) -> Value:
    """Some samples of a value."""

    def part(tensor: Tensor) -> Tensor:
        if not _has(tensor, dim, size):
            return tensor
        each = tensor.shape[max(dim, 0)] // size
        return tensor.narrow(max(dim, 0), rows.start * each, (rows.stop - rows.start) * each)

    return pytree.tree_map_only(Tensor, part, value)


def _joined(values: Sequence[Value], dim: int, size: int) -> Value | None:
    """Two values as one; None if they differ in what has no samples."""
    flat, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if specs[0] != specs[1]:
        return None
    found = []
    for one, other in zip(*flat, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor) and _has(one, dim, size):
            if one.shape != other.shape:
                return None
            found.append(torch.cat([one, other], max(dim, 0)))
        elif isinstance(one, Tensor) != isinstance(other, Tensor) or not (
            torch.equal(one, other) if isinstance(one, Tensor) else one == other
        ):
            return None
        else:
            found.append(one)
    return pytree.tree_unflatten(found, specs[0])
