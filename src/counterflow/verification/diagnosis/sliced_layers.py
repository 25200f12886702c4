"""Diagnosis of a stage's layers on slices: whether they compute slices like the whole sequence.

Layer by layer all slices run one after the other, and in one piece, with the same weights and without
dropout; outputs and the gradients of inputs are compared. So the diagnosis finds a layer that mixes positions
without a ``Carry`` (attention to both sides, a norm over positions), counts positions from the beginning of
the slice, detaches its carried state, or leaves what is enough for the next slice and too little for later
ones. It is due in a stage's first micro-batch, and in each that is longer or shorter than all before: a layer
may leave enough for the sequences so far and too little for longer ones, or leave a number of positions that
shorter slices do not have. It is repeated in rarer steps, as the first update changes gates that were zero.

It does not find errors in layers that draw random numbers in evaluation mode or pass on values without a
dimension of positions, nor decide where outputs differ at few tokens alone, as by a choice among experts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.doubling import rechecks
from counterflow.common.tensors.graphs import has_reentrant_checkpoint
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError

from .comparison import compare_with_parts
from .sequence_parts import (
    Joined,
    Value,
    are_near,
    are_scattered,
    join_parts,
    positions_of,
    with_shared_leaves,
)

_LOG = logging.getLogger(__name__)

_LEAST = 3
"""Number of slices that are compared if the memory does not suffice for all."""

States = Mapping[int, Any]
"""Carried states by number."""


class SliceRows(Protocol):
    """Samples and positions of a slice."""

    @property
    def micro_batch(self) -> int:
        """Number of the micro-batch."""

    @property
    def samples(self) -> int:
        """Number of samples of the micro-batch."""

    @property
    def slice(self) -> int:
        """Number of the slice."""

    @property
    def slices(self) -> int:
        """Number of slices of the micro-batch."""

    @property
    def positions(self) -> int:
        """Number of positions of the slice; 0: unknown."""

    @property
    def sequence_length(self) -> int:
        """Number of positions of the sequence; 0: unknown."""

    def uncut(self) -> Self:
        """Return the rows of the sequence of which this is the first slice."""


class SlicedLayer(NamedTuple):
    """A layer of a stage.

    Attributes:
        place: the layer in words.
        run: output and carried states of an input, the states before it, and its rows; None: the layer draws
            random numbers, so it would give another output the next time.
    """

    place: str
    run: Callable[[Value, States, SliceRows], tuple[Value, States] | None]


class SlicedStage(Protocol):
    """A stage, as the diagnosis runs it."""

    @property
    def number(self) -> int:
        """Number of the stage."""

    @property
    def lower_precision(self) -> bool:
        """True if it computes in a lower precision than that of its weights."""

    @property
    def shares_sequences(self) -> bool:
        """True if positions of the mesh share its sequences."""

    def layers(self) -> Iterable[SlicedLayer]:
        """Layers in their order."""

    def undisturbed(self) -> AbstractContextManager[object]:
        """Context of runs in evaluation mode, but for batch norms, after which nothing is changed."""


class _Slices(NamedTuple):
    values: Sequence[Value]
    rows: Sequence[SliceRows]
    sequence: Value | None
    complete: bool = True
    """True if all values of the layer before were compared."""


@dataclass(slots=True)
class _MicroBatch:
    length: int  # in positions, or in elements of each sample
    slices: list[tuple[Value, SliceRows]] = field(default_factory=list)


@dataclass(slots=True)
class _StageState:
    due: dict[tuple[int, int], _MicroBatch] = field(default_factory=dict)  # by step and number
    lengths: tuple[int, ...] = ()  # of the shortest and the longest micro-batch that were compared
    repeated: int = 0  # the last step that repeats the comparison


class SlicedLayerDiagnosis:
    """Diagnosis of the stages on one worker."""

    def __init__(self) -> None:
        self._stages: dict[int, _StageState] = defaultdict(_StageState)
        self._warnings: set[str] = set()

    def expects(self, stage: int, value: Value, step: int, rows: SliceRows) -> bool:
        """Return whether a slice is to be passed to ``add``.

        Args:
            stage: number of the stage.
            value: input of the slice's forward.
            step: number of the step.
            rows: rows of the slice.
        """
        state, micro_batch = self._stages[stage], (step, rows.micro_batch)
        if not rows.slice:
            # What is due of an earlier step was ended by an error.
            state.due = {key: due for key, due in state.due.items() if key[0] == step and key != micro_batch}
            length = _sequence_length(value, rows)
            lengths = *state.lengths, *(due.length for due in state.due.values())
            repeats = rechecks(step) and step > state.repeated
            if length and (repeats or not (lengths and min(lengths) <= length <= max(lengths))):
                state.due[micro_batch] = _MicroBatch(length)
                state.repeated = max(state.repeated, step)
        return micro_batch in state.due

    def add(self, stage: SlicedStage, value: Value, step: int, rows: SliceRows) -> None:
        """Save a slice's input; diagnose the layers at the last slice.

        Args:
            stage: the stage.
            value: input of the stage's layers.
            step: number of the step.
            rows: rows of the slice.

        Raises:
            ConfigError: a layer computes something else of the whole sequence.
        """
        state = self._stages[stage.number]
        due = state.due[step, rows.micro_batch]
        due.slices.append((pytree.tree_map_only(Tensor, _copy, value), rows))
        if rows.slice < rows.slices - 1:
            return
        del state.due[step, rows.micro_batch]
        slices, lengths = due.slices, (*state.lengths, due.length)
        state.lengths = min(lengths), max(lengths)
        try:
            self._diagnose(stage, slices)
        except torch.OutOfMemoryError:
            if len(slices) <= _LEAST or stage.shares_sequences:  # other positions compare all of them
                raise
            _LOG.warning(
                "the memory does not suffice to compare all %d slices of stage %d with the whole sequence; "
                "the first %d are compared", len(slices), stage.number, _LEAST,
            )  # fmt: skip
            self._diagnose(stage, slices[:_LEAST])

    def _diagnose(self, stage: SlicedStage, slices: Sequence[tuple[Value, SliceRows]]) -> None:
        inputs = _Slices([value for value, _ in slices], [rows for _, rows in slices], None)
        with stage.undisturbed(), torch.enable_grad():
            for layer in stage.layers():
                outputs = _LayerComparison(stage, layer, inputs).outputs()
                if outputs is None:
                    self._warn(layer, ", and what comes after it in its stage,")
                    break
                if not outputs.complete:
                    self._warn(layer, "")
                inputs = outputs

    def _warn(self, layer: SlicedLayer, more: str) -> None:
        text = f"could not verify that {layer.place}{more} computes the same from slices"
        if text not in self._warnings:
            self._warnings.add(text)
            _LOG.warning("%s as from the whole sequence (assumed)", text)


class _Undecided(Exception):  # noqa: N818 - an outcome, not an error
    pass


class _LayerComparison:
    def __init__(self, stage: SlicedStage, layer: SlicedLayer, inputs: _Slices) -> None:
        self._stage, self._layer, self._rows = stage, layer, inputs.rows
        leaves = [pytree.tree_map_only(Tensor, _leaf, value) for value in inputs.values]
        sizes = _sizes(inputs)
        self._leaves = leaves if sizes is None else with_shared_leaves(leaves, sizes)
        self._input = _join(_Slices(self._leaves, inputs.rows, inputs.sequence))
        self._states: States = {}

    def outputs(self) -> _Slices | None:
        """Compare the outputs, and return them as the next layer's inputs; None: nothing can be decided.

        Raises:
            ConfigError: they differ.
        """
        parts = [partial(self._run_slice, *item) for item in zip(self._leaves, self._rows, strict=True)]
        try:
            return compare_with_parts(self._run_whole, parts, list, self._compare)
        except _Undecided:
            return None

    def _run_slice(self, value: Value, rows: SliceRows) -> Value:
        output, self._states = self._run(value, self._states, rows)
        return output

    def _run_whole(self) -> Value:
        if self._input is None:
            raise _Undecided
        return self._run(self._input.value, {}, self._rows[0].uncut())[0]

    def _run(self, value: Value, states: States, rows: SliceRows) -> tuple[Value, States]:
        result = self._layer.run(value, states, rows)
        if result is None:
            raise _Undecided
        return result

    def _compare(self, expected: Value, outputs: Sequence[Value]) -> _Slices:
        joined = _join(_Slices(outputs, self._rows, expected))
        if joined is None or self._input is None:
            raise _Undecided
        stage, layer = self._stage, self._layer
        # Otherwise the whole has no graph with the leaves, or none that computes their gradients alone.
        is_connected = self._input.complete and not has_reentrant_checkpoint(
            tensors_in((expected, joined.value))
        )
        connected = self._leaves if is_connected else ()
        lower = stage.lower_precision
        near = are_near(expected, joined.value, connected, lower_precision=lower)
        if not near and not are_scattered(expected, joined.value, lower_precision=lower):
            raise ConfigError(
                f"{layer.place} of stage {stage.number} makes something else of a whole sequence than of "
                f"its {len(self._rows)} slices one after the other; if it looks across the sequence (or "
                "counts positions), let it hold a cf.Carry, take from it what the slices before left, and "
                "leave what all later ones need, or train without slices"
            )
        values, expected = pytree.tree_map_only(Tensor, Tensor.detach, (list(outputs), expected))
        return _Slices(values, self._rows, expected, near and is_connected and joined.complete)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _sequence_length(value: Value, rows: SliceRows) -> int:
    if rows.sequence_length:
        return rows.sequence_length
    first = next(tensors_in(value), None)
    return 1 if first is None else first.numel() // rows.samples


def _join(slices: _Slices) -> Joined | None:
    """Join slices to a sequence; None: not known, or no tensor has positions."""
    sizes = _sizes(slices)
    joined = None if sizes is None else join_parts(slices.values, sizes, slices.sequence)
    return joined if joined is not None and (joined.joins or slices.sequence is not None) else None


def _sizes(slices: _Slices) -> Sequence[int] | None:
    # On a worker without the mini-batch they are those of the values; None: not known.
    sizes = [rows.positions for rows in slices.rows]
    if sizes[0]:
        return sizes
    positions = [positions_of(v, rows.samples) for v, rows in zip(slices.values, slices.rows, strict=True)]
    sizes = [item.length for item in positions if item is not None]
    return sizes if len(sizes) == len(positions) else None
