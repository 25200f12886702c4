"""Tensors between the layers of a stage: which exist already, and which are saved first by which layer.

Invariant: a tensor that layers pass on counts once, with the stage's input if it came with that. Without
``InputTensors`` of a layer its input is one tensor, of which what the layer before saved is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from ..inputs.profile import LayerProfile


class _State(NamedTuple):
    saved: bool = False
    of_stage: bool = False
    passed: bool = False

    @property
    def exists(self) -> bool:
        """True if the tensor is counted before the layer."""
        return self.saved or self.of_stage


_NEW = _State()


class _Row(NamedTuple):
    entering: float = 0.0
    first_saved: float = 0.0
    unsaved: float = 0.0
    passed: float = 0.0
    gradient: float = 0.0
    copied: float = 0.0


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Bytes of the inputs of a stage's layers, each amount by layer; the stage's input counts separately.

    Attributes:
        entering: those that nothing saves and that are not the stage's input.
        first_saved: those that the layer saves and no earlier one.
        unsaved: those with gradients that nothing saves and the layer does not pass on: a graph that begins
            with them holds them.
        passed: those that the layer before has passed on.
        gradients: gradients of all.
        copied: gradients of tensors that the layer alone, as its peaks were measured, copies to pass them on.
        constant: part of the stage's input that needs no gradient.
        through: gradients of tensors that the stage passes on from its input to its output.
        saved_input: part of the stage's input that any of its layers saves.
        saved_output: part of the stage's output that is saved, or is its input.
    """

    entering: tuple[float, ...]
    first_saved: tuple[float, ...]
    unsaved: tuple[float, ...]
    passed: tuple[float, ...]
    gradients: tuple[float, ...]
    copied: tuple[float, ...]
    constant: float
    through: float
    saved_input: float
    saved_output: float

    @classmethod
    def of(cls, layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float) -> Self:
        """The inputs of a stage's layers.

        Args:
            layers: layers of the stage.
            inputs: bytes of each layer's input, for the micro-batch.
            samples: samples of the micro-batch.
        """
        rows: list[_Row] = []
        states: dict[int, _State] | None = None
        saved_input = layers[0].kept_input(samples, inputs[0])
        saved_output = through = 0.0
        for number, (layer, size) in enumerate(zip(layers, inputs, strict=True)):
            tensors, saved_bytes = layer.input_tensors, layer.kept_input(samples, size)
            sizes = () if tensors is None else tuple(share * size for share in tensors.shares)
            gradient, copied = size, 0.0
            if tensors is not None:
                gradient = sum(sizes[i] for i in tensors.gradients)
                copied = sum(sizes[i] for i in {i for i, _ in tensors.passed} & {*tensors.gradients})
            if number == 0:
                states = dict.fromkeys(range(len(sizes)), _State(of_stage=True))
                rows.append(_Row(gradient=gradient, copied=copied))
            elif tensors is None or states is None:
                shared = min(layers[number - 1].kept_output(samples), size)
                unsaved = max(0.0, size - max(saved_bytes, shared))
                first_saved = max(0.0, saved_bytes - shared)
                rows.append(_Row(size - shared, first_saved, unsaved, 0.0, gradient, copied))
                states = {}
            else:
                known = [states.get(i, _NEW) for i in range(len(sizes))]
                saved = [(sizes[i], known[i]) for i in tensors.saved]
                saved_input += sum(part for part, state in saved if state.of_stage and not state.saved)
                repeated = sum(part for part, state in saved if state.exists)
                exists = sum(part for part, state in zip(sizes, known, strict=True) if state.exists)
                passed = sum(part for part, state in zip(sizes, known, strict=True) if state.passed)
                first_saved = max(0.0, saved_bytes - repeated)
                elsewhere = {*tensors.saved, *(source for source, _ in tensors.passed)}
                elsewhere.update(i for i, state in enumerate(known) if state.exists)
                unsaved = sum(sizes[i] for i in {*tensors.gradients} - elsewhere)
                rows.append(_Row(max(0.0, size - exists), first_saved, unsaved, passed, gradient, copied))
            through, saved_output = 0.0, layer.kept_output(samples)
            if tensors is None:
                states = None
                continue
            after = dict.fromkeys(tensors.saved_outputs, _State(saved=True))
            for source, output in tensors.passed:
                before = states.get(source, _NEW)
                state = _State(before.saved or source in tensors.saved, before.of_stage, passed=True)
                after[output] = state
                saved_output += sizes[source] if state.exists else 0.0
                through += sizes[source] if before.of_stage and source in tensors.gradients else 0.0
            states = after
        return cls(
            tuple(row.entering for row in rows),
            tuple(row.first_saved for row in rows),
            tuple(row.unsaved for row in rows),
            tuple(row.passed for row in rows),
            tuple(row.gradient for row in rows),
            tuple(row.copied for row in rows),
            constant=max(0.0, inputs[0] - rows[0].gradient),
            through=through,
            saved_input=saved_input,
            saved_output=saved_output,
        )
