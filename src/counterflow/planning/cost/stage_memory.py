"""Memory of a stage's activations and maximum memory of its ops, from that of each layer.

Invariant: a tensor that two layers save, one as its output and the next as its input, counts once. Layers run
one after another: in a forward saved tensors stay, in a backward they are freed layer by layer, from the last
one. A split backward frees layer by layer what only the input gradient needed, and adds tensors for the
weight gradients. A layer whose weight gradients are pending also holds its input, because its graph does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import OpKind, Saved
from counterflow.simulation.op_costs import StageBytes

from ..inputs.profile import LayerProfile


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage's activations for one micro-batch, and maximum bytes of its ops while they run.

    Attributes:
        inputs: the stage's input, which is all that is saved if the stage is computed again.
        layer_inputs: inputs of all its layers, and tensors that stay although the layers are computed again.
        saved: bytes that a forward saves, including its input if that is saved.
        beyond_input: the same without its input.
        kept: bytes between the halves of a split backward, including the stage's input as far as it was
            saved.
        kept_output: the part of ``saved`` that is the stage's output.
        forward: maximum of a forward, including saved tensors, without its input.
        forward_alone: maximum of a forward that saves nothing, because the stage is computed again later.
        backward: maximum of a backward, in addition to the memory when it began.
        layer_backward: maximum of a backward that computes each layer again.
        input_gradient: maximum of the first half of a split backward.
        weight_gradients: maximum of the other half.
    """

    inputs: float = 0.0
    layer_inputs: float = 0.0
    saved: float = 0.0
    beyond_input: float = 0.0
    kept: float = 0.0
    kept_output: float = 0.0
    forward: float = 0.0
    forward_alone: float = 0.0
    backward: float = 0.0
    layer_backward: float = 0.0
    input_gradient: float = 0.0
    weight_gradients: float = 0.0

    def stash(self, recompute: Recompute) -> float:
        """Bytes saved from a forward to its backward."""
        if recompute is Recompute.NONE:
            return self.saved
        return self.inputs if recompute is Recompute.STAGE else self.layer_inputs

    def space(self, recompute: Recompute) -> dict[OpKind, float]:
        """Bytes of each kind of op while it runs, in addition to the tensors that it saves.

        Those of a backward are in addition to what a recomputation of the complete stage leaves.
        """
        saved = max(self.stash(recompute) - self.inputs, 0.0)  # the input of a forward exists before
        forward = self.forward if recompute is Recompute.NONE else self.forward_alone
        by_layer = recompute is Recompute.LAYER
        recomputed = self.forward - self.beyond_input if recompute is Recompute.STAGE else 0.0
        return {
            OpKind.FORWARD: max(forward - saved, 0.0),
            OpKind.BACKWARD: self.layer_backward if by_layer else self.backward,
            OpKind.INPUT_GRADIENT: self.layer_backward if by_layer else self.input_gradient,
            OpKind.WEIGHT_GRADIENTS: self.weight_gradients,
            OpKind.RECOMPUTATION: max(recomputed, 0.0),
        }


def stage_bytes(
    stages: Sequence[StageMemory], recompute: Recompute, weights: list[float], fixed: list[float]
) -> StageBytes:
    """Bytes by stage for the simulator, after recomputation.

    Args:
        stages: activations of the stages.
        recompute: what a backward computes again.
        weights: bytes of one version of the weights and its casts, by stage.
        fixed: bytes of gradients and optimiser state, by stage.
    """
    spaces = [stage.space(recompute) for stage in stages]
    recomputes = recompute is Recompute.STAGE
    return StageBytes(
        weights=weights,
        fixed=fixed,
        tensors={
            Saved.ACTIVATIONS: [stage.stash(recompute) for stage in stages],
            Saved.RECOMPUTED: [stage.beyond_input if recomputes else 0.0 for stage in stages],
            Saved.WEIGHT_OPERANDS: [stage.kept for stage in stages],
        },
        space={kind: [space[kind] for space in spaces] for kind in OpKind},
    )


def without_peaks(layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float) -> StageMemory:
    """A stage's bytes by a profile without peaks: ops hold nothing in addition except a recomputed layer."""
    saved_bytes = [layer.saved(samples) for layer in layers]
    saved = float(sum(saved_bytes))
    return StageMemory(
        inputs=inputs[0],
        layer_inputs=_layer_inputs(layers, inputs, samples),
        saved=saved,
        beyond_input=max(saved - inputs[0], 0.0),
        kept=float(sum(layer.kept(samples) for layer in layers)),
        layer_backward=float(
            max(max(layer_bytes - size, 0.0) for layer_bytes, size in zip(saved_bytes, inputs, strict=True))
        ),
    )


def _layer_inputs(layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float) -> float:
    return sum(inputs) + sum(layer.peak(layer.kept_anyway_bytes, samples) for layer in layers)


def stage_memory(layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float) -> StageMemory:
    """A stage's bytes.

    Args:
        layers: layers of the stage.
        inputs: bytes of each layer's input, for the micro-batch.
        samples: samples of the micro-batch.

    >>> one = LayerProfile((1,), (0,), (0,), (30,), weights_bytes=0, output_bytes=10,
    ...     kept_input_bytes=(10,), forward_peak_bytes=(35,), backward_peak_bytes=(25,))
    >>> found = stage_memory([one, one], [10, 10], 1)  # 20 and its output, 20 and 15 more of the next
    >>> found.saved, found.beyond_input, found.forward, found.backward
    (60.0, 50.0, 65.0, 25.0)
    """
    gone = forward = alone = 0.0  # freed: tensors of layers before this one, in addition to the stage's input
    internal: list[float] = []
    between: list[float] = []
    first_kept = layers[0].kept_input(samples, inputs[0])
    for number, (layer, size) in enumerate(zip(layers, inputs, strict=True)):
        entering = kept_input = 0.0
        if number:
            shared_input = min(
                layers[number - 1].kept_output(samples), size
            )  # counted with the previous layer
            entering = size - shared_input
            kept_input = max(0.0, layer.kept_input(samples, size) - shared_input)
        rise = layer.forward_peak(samples, size)
        forward = max(forward, gone + entering + rise)
        alone = max(alone, entering + rise)
        layer_bytes = max(0.0, layer.saved(samples) - layer.kept_input(samples, size))
        internal.append(layer_bytes)
        between.append(kept_input)
        gone += kept_input + layer_bytes
    return StageMemory(
        inputs=inputs[0],
        layer_inputs=_layer_inputs(layers, inputs, samples),
        saved=float(gone + first_kept),
        beyond_input=float(gone),
        kept=float(first_kept + _weight_operands(layers, inputs, samples)),
        kept_output=float(layers[-1].kept_output(samples)),
        forward=float(forward),
        forward_alone=float(alone),
        backward=_backward(layers, inputs, samples, internal, between),
        layer_backward=_layer_by_layer(layers, inputs, samples),
        input_gradient=_input_gradient(layers, inputs, samples, internal, between),
        weight_gradients=max(layer.peak(layer.weight_gradients_peak_bytes, samples) for layer in layers),
    )


def _backward(
    layers: Sequence[LayerProfile],
    inputs: Sequence[float],
    samples: float,
    internal: Sequence[float],
    between: Sequence[float],
) -> float:
    """Maximum of a backward beyond the memory before it; ``internal`` and ``between`` are by layer."""
    most = freed = 0.0
    for number in reversed(range(len(layers))):
        layer = layers[number]
        gradient = inputs[number + 1] if number + 1 < len(layers) else 0.0  # the gradient of its output
        most = max(most, gradient - freed + layer.peak(layer.backward_peak_bytes, samples))
        freed += internal[number] + between[number] - _cast_gradients(layer)
    return float(most)


def _layer_by_layer(layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float) -> float:
    """Maximum of a backward that computes each layer again from its input, which is freed afterwards.

    The second run of a layer ends with the last saved tensor: its output is not computed again
    (``torch.utils.checkpoint``'s early stop).
    """
    most = freed = 0.0
    for number in reversed(range(len(layers))):
        layer, size = layers[number], inputs[number]
        gradient = (
            inputs[number + 1] if number + 1 < len(layers) else 0.0
        )  # the input of the last one is counted elsewhere
        anyway = layer.peak(layer.kept_anyway_bytes, samples)
        saved = max(0.0, layer.saved(samples) - layer.kept_input(samples, size) - anyway)
        backward = max(0.0, saved - layer.kept_output(samples)) + layer.peak(
            layer.backward_peak_bytes, samples
        )
        forward = layer.forward_peak(samples, size) - anyway if layer.forward_peak_bytes else 0.0
        most = max(most, gradient - freed + max(forward, backward))
        freed += anyway + (size if number else 0.0)  # the stage's own input stays
        freed -= _cast_gradients(layer)
    return float(most)


def _cast_gradients(layer: LayerProfile) -> float:
    """Gradients of cast weights: an earlier micro-batch made the casts, and autograd processes them last."""
    return layer.cast_bytes * layer.trained_bytes / layer.weights_bytes if layer.weights_bytes else 0.0


def _weight_operands(layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float) -> float:
    """Bytes between the halves of a split backward, without the stage's input."""
    total = sum(layer.kept(samples) for layer in layers)
    total += sum(layer.peak(layer.held_input_bytes, samples) for layer in layers[1:])
    return total - _needed_input(layers[0], inputs[0], samples)


def _needed_input(layer: LayerProfile, size: float, samples: float) -> float:
    """Part of a layer's tensors for its weight gradients that is its input."""
    saved = layer.kept(samples) - layer.peak(layer.kept_gradient_bytes, samples)
    graph_input = layer.peak(layer.held_input_bytes, samples)
    return max(0.0, min(saved, layer.kept_input(samples, size), size - graph_input))


def _input_gradient(
    layers: Sequence[LayerProfile],
    inputs: Sequence[float],
    samples: float,
    internal: Sequence[float],
    between: Sequence[float],
) -> float:
    """Maximum of the first half of a split backward."""
    most = growth = stays = 0.0  # stays: the gradient of the output
    for number in reversed(range(len(layers))):
        layer, last = layers[number], number + 1 == len(layers)
        gradient = 0.0 if last else inputs[number + 1]  # the input of the last one is counted elsewhere
        most = max(most, growth + gradient + layer.peak(layer.input_gradient_peak_bytes, samples))
        gradients = layer.peak(layer.kept_gradient_bytes, samples)
        needed = _needed_input(layer, inputs[number], samples)
        operands = max(
            0.0, layer.kept(samples) - gradients - needed
        )  # part of the tensors that the forward saved
        growth -= max(0.0, internal[number] - operands - stays)
        stays = needed + layer.peak(layer.held_input_bytes, samples)
        growth -= max(0.0, between[number] - stays)
        stays = max(0.0, stays - between[number])
        growth += max(0.0, gradients - layer.output_bytes * samples) if last else gradients
    return float(most)
