"""Diagnosis of what layers add to the loss: whether each term is a mean over samples.

Layer by layer a stage runs once more on its input, in evaluation mode. A layer that adds to the loss runs on
all samples and on two parts of them: its terms, and the gradients of its input and weights, are compared as
the losses of micro-batches are (``sample_means``). So the diagnosis finds a product of means over the
samples, as the balance of a router is.

Between layers nothing says which dimension the samples are in: each one of their number is tried, and one in
which the parts fit is enough. The diagnosis cannot decide about a layer that draws random numbers in
evaluation mode, or whose input has no such dimension, or of a stage that is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.trees import dimensional
from counterflow.errors import ConfigError

from .comparison import compare_with_parts
from .graded_losses import (
    FITS,
    LOW_PRECISION,
    UNDECIDED,
    Graded,
    Joined,
    LossComparison,
    as_leaves,
    compare_losses,
    gradient_tolerance,
    joined,
    leaves_of,
)
from .sample_means import split_points
from .tolerances import COARSE

_FIRST = -1
"""In place of a dimension: the first one has the samples, each with as many rows."""

Value = Any
Terms = Mapping[str, Tensor]


class AuxLayer(NamedTuple):
    """A layer of a stage.

    Attributes:
        place: the layer in words.
        run: output and terms of an input; None: the layer draws random numbers.
        weights: weights whose gradients are compared.
        carries: whether the layer carries a state from slice to slice.
    """

    place: str
    run: Callable[[Value], tuple[Value, Terms] | None]
    weights: Sequence[Tensor]
    carries: bool


class AuxStage(Protocol):
    """A stage, as the diagnosis runs it."""

    @property
    def number(self) -> int:
        """Number of the stage."""

    @property
    def sharded(self) -> bool:
        """True if its weights are sharded."""

    @property
    def lower_precision(self) -> bool:
        """True if it computes in a lower precision than that of its weights."""

    @property
    def has_batch_norms(self) -> bool:
        """True if it contains batch norms."""

    def layers(self) -> Iterable[AuxLayer]:
        """Layers in their order."""

    def undisturbed(self, *, training: bool) -> AbstractContextManager[object]:
        """Context after which nothing is changed; unless ``training`` modules are in evaluation mode."""


class UnitRows(NamedTuple):
    """Rows of a unit.

    Attributes:
        samples: number of samples.
        slice: number of the slice, 0 if the unit is whole.
        slices: number of slices.
        positions: number of positions of the slice; 0: unknown.
    """

    samples: int
    slice: int
    slices: int
    positions: int


@dataclass(frozen=True, slots=True)
class _Term:
    loss: Tensor
    by: float
    weight: float = 1.0

    def sums_with(self, parts: Sequence[Self]) -> bool:
        del parts
        return True


class AuxMeanDiagnosis:
    """Diagnosis of one mini-batch on one worker.

    Args:
        undecided: called with the reason if nothing can be decided.
        graph: whether gradients are compared as well.
        single: whether one unit of each stage is enough.
    """

    def __init__(self, undecided: Callable[[str], object], *, graph: bool, single: bool) -> None:
        self._undecided, self._graph, self._single = undecided, graph, single
        self._inputs: dict[tuple[int, int], Value] = {}
        """Last inputs of one sample, by stage and slice."""
        self._finished: set[int] = set()

    def run(self, stage: AuxStage, value: Value, rows: UnitRows) -> None:
        """Diagnose the terms of a stage's layers for a unit.

        Args:
            stage: the stage.
            value: copy of the stage's input.
            rows: rows of the unit.

        Raises:
            ConfigError: a term is no mean over samples, or positions.
        """
        if stage.number in self._finished:
            return
        values = [value]
        if rows.samples == 1:
            before = self._inputs.get((stage.number, rows.slice))
            self._inputs[stage.number, rows.slice] = value
            if before is None:
                return
            values = [before, value]
        if self._single:
            self._finished.add(stage.number)
        if stage.sharded:
            self._finished.add(stage.number)
            self._undecided("the stage is sharded")
            return
        try:
            seen = any(self._walk(stage, values, rows, training=mode) for mode in (False, True))
        except ConfigError:
            raise
        except Exception as error:
            self._undecided(f"{type(error).__name__}: {error}")
            return
        if not seen:
            self._undecided("layers add nothing when they run again")

    def _walk(self, stage: AuxStage, values: Sequence[Value], rows: UnitRows, *, training: bool) -> bool:
        seen = False
        with stage.undisturbed(training=training), torch.no_grad():
            for layer in stage.layers():
                results = [result for result in map(layer.run, values) if result is not None]
                if len(results) < len(values):
                    self._undecided(f"{layer.place} draws random numbers")
                    return True
                if any(terms for _, terms in results):
                    seen = True
                    if training and stage.has_batch_norms:
                        self._undecided(f"{layer.place} adds in training mode alone, beside batch norms")
                    else:
                        self._diagnose(stage, layer, values, rows)
                values = [output for output, _ in results]
        return seen

    def _diagnose(self, stage: AuxStage, layer: AuxLayer, values: Sequence[Value], rows: UnitRows) -> None:
        outcomes = self._compare(stage, layer, values, rows.samples)
        self._refuse(stage, layer, outcomes, max(2, rows.samples), "samples")
        if rows.slices > 1 and not layer.carries:  # terms of slices are added by their share of positions
            positions = rows.positions or _second_size(values[0])
            if positions > 1:
                outcomes = self._compare(stage, layer, values[:1], positions)
                self._refuse(stage, layer, outcomes, positions, "positions")

    def _compare(
        self, stage: AuxStage, layer: AuxLayer, values: Sequence[Value], size: int
    ) -> Mapping[str, LossComparison]:
        best: Mapping[str, LossComparison] = {}
        for dim in _dims(values[0], size):
            value = values[0] if len(values) == 1 else _join(values, dim, size)
            if value is None:
                continue
            total = size * len(values)
            for point in split_points(total):
                try:
                    outcomes = self._compare_in(stage, layer, value, dim, (point, total))
                except Exception:  # the layer may accept parts in another dimension
                    break
                if all(outcome.decided for outcome in outcomes.values()):
                    if all(outcome == FITS for outcome in outcomes.values()):
                        return outcomes
                    best = best or outcomes
                    break
        return best

    def _compare_in(
        self, stage: AuxStage, layer: AuxLayer, value: Value, dim: int, ends: tuple[int, int]
    ) -> Mapping[str, LossComparison]:
        point, total = ends
        with torch.set_grad_enabled(self._graph):
            value = as_leaves(value, always=True) if self._graph else value
            leaves = [*leaves_of(value), *layer.weights] if self._graph else []
            run_all, *parts = (
                partial(self._terms, stage, layer, value, dim, rows, total, leaves)
                for rows in (slice(0, total), slice(0, point), slice(point, total))
            )
            return compare_with_parts(run_all, parts, _joined_terms, _compare_terms)

    @staticmethod
    def _terms(  # noqa: PLR0917
        stage: AuxStage,
        layer: AuxLayer,
        value: Value,
        dim: int,
        rows: slice,
        total: int,
        leaves: Sequence[Tensor],
    ) -> Mapping[str, Graded]:
        value = _cut(value, dim, rows, total)
        result = layer.run(pytree.tree_map_only(Tensor, torch.clone, value))
        assert result is not None
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        low = stage.lower_precision or any(t.dtype in LOW_PRECISION for t in (*tensors, *layer.weights))
        by, graded = rows.stop - rows.start, dict[str, Graded]()
        for name, term in result[1].items():
            gradients: Sequence[Tensor | None] = [None] * len(leaves)
            if leaves and term.requires_grad:
                seed = torch.full_like(term, by)
                gradients = torch.autograd.grad(term, leaves, seed, allow_unused=True, retain_graph=True)
            limits = [max(COARSE if low else 0.0, gradient_tolerance(leaf, term)) for leaf in leaves]
            graded[name] = Graded(_Term(term.detach(), by), gradients, limits, COARSE if low else None)
        return graded

    def _refuse(
        self, stage: AuxStage, layer: AuxLayer, outcomes: Mapping[str, LossComparison], size: int, unit: str
    ) -> None:
        if not outcomes:
            self._undecided(f"of what {layer.place} adds no parts could be compared")
        for name, outcome in sorted(outcomes.items()):
            if outcome.value is not None:
                expected, got = outcome.value
                shown = f"of {size} {unit} it is {expected:g}, and those of parts of them make {got:g}"
            elif outcome.gradient is not None:
                shown = f"its gradient for {size} {unit} is {outcome.gradient:.1%} off that of parts of them"
            else:
                continue
            raise ConfigError(
                f"{layer.place} of stage {stage.number} adds {name!r} to the loss by cf.add_loss, "
                f"which is no mean over {unit}: {shown}; so what micro-batches add does not make one "
                "process's. Add a mean of what each sample (or token) makes by itself, as a z-loss or the "
                "balance of each sequence; or insist on the mean of what micro-batches add with "
                "per_micro_batch_loss=True"
            )


def _joined_terms(parts: Sequence[Mapping[str, Graded]]) -> Mapping[str, Joined | None]:
    names = {name for part in parts for name in part}
    return {
        name: joined([part[name] for part in parts]) if all(name in part for part in parts) else None
        for name in names
    }


def _compare_terms(
    totals: Mapping[str, Graded], parts: Mapping[str, Joined | None]
) -> Mapping[str, LossComparison]:
    outcomes = {}
    for name in {*totals, *parts}:
        expected, got = totals.get(name), parts.get(name)
        comparable = expected is not None and got is not None
        outcomes[name] = compare_losses(expected, got) if comparable else UNDECIDED  # type: ignore[arg-type]
    return outcomes


def _second_size(value: Value) -> int:
    # Positions are in the second dimension as a rule.
    first = next(iter(dimensional(value)), None)
    return first.shape[1] if first is not None and first.dim() > 1 else 0


def _dims(value: Value, size: int) -> list[int]:
    tensors = dimensional(value)
    most = max((tensor.dim() for tensor in tensors), default=0)
    dims = [d for d in range(most) if any(t.dim() > d and t.shape[d] == size for t in tensors)]
    return dims or ([_FIRST] if any(t.shape[0] % size == 0 for t in tensors) else [])


def _has(tensor: Tensor, dim: int, size: int) -> bool:
    if dim == _FIRST:
        return tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % size == 0
    return tensor.dim() > dim and tensor.shape[dim] == size


def _cut(value: Value, dim: int, rows: slice, size: int) -> Value:
    def part(tensor: Tensor) -> Tensor:
        if not _has(tensor, dim, size):
            return tensor
        length = tensor.shape[max(dim, 0)] // size
        return tensor.narrow(max(dim, 0), rows.start * length, (rows.stop - rows.start) * length)

    return pytree.tree_map_only(Tensor, part, value)


def _join(values: Sequence[Value], dim: int, size: int) -> Value | None:
    flat, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if specs[0] != specs[1]:
        return None
    leaves = []
    for first, second in zip(*flat, strict=True):
        if isinstance(first, Tensor) and isinstance(second, Tensor) and _has(first, dim, size):
            if first.shape != second.shape:
                return None
            leaves.append(torch.cat([first, second], max(dim, 0)))
        elif isinstance(first, Tensor) != isinstance(second, Tensor) or not (
            torch.equal(first, second) if isinstance(first, Tensor) else first == second
        ):
            return None
        else:
            leaves.append(first)
    return pytree.tree_unflatten(leaves, specs[0])
