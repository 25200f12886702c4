"""Memory of a stage's activations and maximum memory of its ops, from that of each layer.

Invariant: a tensor that two layers save, one as its output and the next as its input, counts once. Layers run
one after another: in a forward saved tensors stay, in a backward they are freed layer by layer, from the last
one. A split backward goes piece by piece (``common.graph_pieces``): after each it frees what only the input
gradient needed; layer by layer it adds tensors for the weight gradients. The first layer of a piece whose
weight gradients are pending also holds its input, because its graph does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from counterflow.common.graph_pieces import piece_starts
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import OpKind, Saved

from ..inputs.profile import LayerProfile
from .stage_inputs import StageInputs

Bytes = tuple[dict[Saved, float], dict[OpKind, float]]
"""Bytes of one micro-batch that a stage saves, and further bytes of its ops while they run."""


def stage_bytes(
    layers: Sequence[LayerProfile],
    inputs: Sequence[float],
    samples: float,
    recompute: Recompute = Recompute.NONE,
    skipped: float = 0.0,
) -> Bytes:
    """A stage's bytes after recomputation.

    Args:
        layers: layers of the stage.
        inputs: bytes of each layer's input, for the micro-batch.
        samples: samples of the micro-batch.
        recompute: what a backward computes again.
        skipped: bytes of skip connections that enter with the stage's input.

    >>> one = LayerProfile((1,), (0,), (0,), (30,), weights_bytes=0, output_bytes=10,
    ...     kept_input_bytes=(10,), forward_peak_bytes=(35,), backward_peak_bytes=(25,))
    >>> tensors, space = stage_bytes([one, one], [10, 10], 1)  # 20 and its output, 20 and 15 more of the next
    >>> tensors[Saved.ACTIVATIONS], space[OpKind.FORWARD], space[OpKind.BACKWARD]
    (60.0, 15.0, 25.0)
    """
    tensors_between = StageInputs.of(layers, inputs, samples)
    between, saved_input = tensors_between.first_saved, tensors_between.saved_input
    beyond_input = forward = alone = 0.0  # of layers before this one, in addition to the stage's input
    internal: list[float] = []
    rows = zip(layers, inputs, tensors_between.entering, between, strict=True)
    for layer, size, entering, first_saved in rows:
        rise = layer.forward_peak(samples, size)
        forward = max(forward, beyond_input + entering + rise)
        alone = max(alone, entering + rise)
        layer_bytes = max(0.0, layer.saved(samples) - layer.kept_input(samples, size))
        internal.append(layer_bytes)
        beyond_input += first_saved + layer_bytes
    stash, most, restored = beyond_input + saved_input, forward, 0.0
    if recompute.recomputes:  # a forward saves nothing of its layers
        stash, most = _stash(layers, inputs, samples, recompute, skipped), alone
        if recompute is Recompute.LAYER:
            stash -= sum(tensors_between.passed)
    if recompute is Recompute.STAGE:
        restored = beyond_input
    tensors = {
        Saved.ACTIVATIONS: stash,
        Saved.RECOMPUTED: restored,
        Saved.WEIGHT_OPERANDS: saved_input + _weight_operands(layers, inputs, samples, tensors_between),
    }
    stays = max(stash - inputs[0] - skipped, 0.0)  # the input of a forward exists before
    if recompute is Recompute.LAYER:
        backward = _layer_by_layer(layers, inputs, samples, tensors_between)
        input_gradient = _split_layer_by_layer(layers, inputs, samples, tensors_between)
    else:
        backward = _backward(layers, samples, internal, tensors_between)
        input_gradient = _input_gradient(layers, inputs, samples, internal, tensors_between)
    space = {
        OpKind.FORWARD: max(most - stays, 0.0),
        OpKind.BACKWARD: backward,
        OpKind.INPUT_GRADIENT: input_gradient,
        OpKind.WEIGHT_GRADIENTS: max(
            layer.peak(layer.weight_gradients_peak_bytes, samples) for layer in layers
        ),
    }
    if recompute is Recompute.STAGE:
        space[OpKind.RECOMPUTATION] = max(forward - beyond_input, 0.0)
    return tensors, space


def stage_bytes_without_peaks(
    layers: Sequence[LayerProfile],
    inputs: Sequence[float],
    samples: float,
    recompute: Recompute = Recompute.NONE,
    skipped: float = 0.0,
) -> Bytes:
    """``stage_bytes`` by a profile without peaks: ops hold nothing in addition except a recomputed layer."""
    saved_bytes = [layer.saved(samples) for layer in layers]
    stash = saved = sum(saved_bytes)
    if recompute.recomputes:
        stash = _stash(layers, inputs, samples, recompute, skipped)
    tensors = {
        Saved.ACTIVATIONS: stash,
        Saved.RECOMPUTED: max(saved - inputs[0], 0.0) if recompute is Recompute.STAGE else 0.0,
        Saved.WEIGHT_OPERANDS: sum(layer.kept(samples) for layer in layers),
    }
    if recompute is not Recompute.LAYER:
        return tensors, {}
    rows = zip(saved_bytes, inputs, strict=True)
    largest = max(max(layer_bytes - size, 0.0) for layer_bytes, size in rows)
    return tensors, {kind: largest for kind in OpKind if kind.again and kind.makes}


def _stash(
    layers: Sequence[LayerProfile],
    inputs: Sequence[float],
    samples: float,
    recompute: Recompute,
    skipped: float,
) -> float:
    if recompute is Recompute.STAGE:
        return inputs[0] + skipped
    anyway = sum(layer.peak(layer.kept_anyway_bytes, samples) for layer in layers)
    return sum(inputs) + anyway + skipped


def _backward(
    layers: Sequence[LayerProfile], samples: float, internal: Sequence[float], tensors: StageInputs
) -> float:
    """Maximum of a backward beyond the memory before it; ``internal`` is by layer."""
    most = freed = 0.0
    between = tensors.first_saved
    for number in reversed(range(len(layers))):
        layer, gradient = layers[number], _output_gradient(tensors, number)
        most = max(most, gradient - freed + layer.peak(layer.backward_peak_bytes, samples))
        freed += internal[number] + between[number] - _cast_gradients(layer)
    return float(most)


def _output_gradient(tensors: StageInputs, number: int) -> float:
    """Bytes of the gradient of a layer's output, without what the layer's peak has of it.

    The output of the last layer is counted elsewhere. What the stage passes on is copied when its backward
    begins.
    """
    last = number + 1 == len(tensors.gradients)
    return (tensors.through if last else tensors.gradients[number + 1]) - tensors.copied[number]


def _layer_by_layer(
    layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float, tensors: StageInputs
) -> float:
    """Maximum of a backward that computes each layer again from its input, which is freed afterwards.

    The second run of a layer ends with the last saved tensor: its output is not computed again
    (``torch.utils.checkpoint``'s early stop).
    """
    most = freed = 0.0
    for number in reversed(range(len(layers))):
        layer, size = layers[number], inputs[number]
        gradient = _output_gradient(tensors, number)
        anyway = layer.peak(layer.kept_anyway_bytes, samples)
        saved = max(0.0, layer.saved(samples) - layer.kept_input(samples, size) - anyway)
        backward = max(0.0, saved - layer.kept_output(samples)) + layer.peak(
            layer.backward_peak_bytes, samples
        )
        forward = layer.forward_peak(samples, size) - anyway if layer.forward_peak_bytes else 0.0
        most = max(most, gradient - freed + max(forward, backward))
        freed += anyway + (size - tensors.passed[number] if number else 0.0)  # the stage's own input stays
        freed -= _cast_gradients(layer)
    return float(most)


def _split_layer_by_layer(
    layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float, tensors: StageInputs
) -> float:
    # Replays hold the inputs of their layers until the last layer's gradients are made.
    most = growth = 0.0
    for piece in reversed(_pieces(layers, tensors)):
        freed = 0.0
        for number in reversed(piece):
            layer, size, last = layers[number], inputs[number], number + 1 == len(layers)
            gradient = 0.0 if last else tensors.gradients[number + 1]
            anyway = layer.peak(layer.kept_anyway_bytes, samples)
            saved = max(0.0, layer.saved(samples) - layer.kept_input(samples, size) - anyway)
            backward = saved + layer.peak(layer.input_gradient_peak_bytes, samples)
            forward = layer.forward_peak(samples, size) - anyway if layer.forward_peak_bytes else 0.0
            most = max(most, growth + gradient + max(forward, backward))
            gradients = layer.peak(layer.kept_gradient_bytes, samples)
            operands = layer.kept(samples) - gradients - _needed_input(layer, size, samples)
            growth += max(0.0, operands) + gradients
            growth -= layer.kept_output_gradient(samples) if last else 0.0
            freed += anyway
        growth -= freed
    return float(most)


def _cast_gradients(layer: LayerProfile) -> float:
    # An earlier micro-batch made the casts, and autograd processes them last.
    return layer.cast_bytes * layer.trained_bytes / layer.weights_bytes if layer.weights_bytes else 0.0


def _weight_operands(
    layers: Sequence[LayerProfile], inputs: Sequence[float], samples: float, tensors: StageInputs
) -> float:
    """Bytes between the halves of a split backward, without the stage's input."""
    total = sum(layer.kept(samples) for layer in layers)
    for before, piece in pairwise(_pieces(layers, tensors)):
        first = piece.start
        of_graph = layers[first].peak(layers[first].held_input_bytes, samples)
        # What the piece before passes on, that one holds.
        total += max(0.0, of_graph - min(tensors.passed[before.start + 1 : first + 1]))
    return total - _needed_input(layers[0], inputs[0], samples)


def leaf_bytes(layers: Sequence[LayerProfile], tensors: StageInputs) -> float:
    """Bytes of one micro-batch that the pieces of a split backward hold from the forward on.

    They are inputs of pieces, without the stage's own, that no layer saves.
    """
    return sum((tensors.unsaved[piece.start] for piece in _pieces(layers, tensors)[1:]), 0.0)


def _pieces(layers: Sequence[LayerProfile], tensors: StageInputs) -> list[range]:
    """Layers of each piece of the stage's graph, if its backward is split."""
    of_input = layers[0].input_tensors
    inputs = len(of_input.gradients) if of_input is not None else 1
    separates = tensors.gradients[0] > 0
    nodes = [layer.graph_nodes for layer in layers]
    starts = piece_starts(nodes, separates=separates, inputs=inputs if separates else 0)
    return [range(*bounds) for bounds in pairwise([*starts, len(layers)])]


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
    tensors: StageInputs,
) -> float:
    between = tensors.first_saved
    # stays: the part of the input of the layer after that is counted with this one
    most = growth = stays = 0.0
    for piece in reversed(_pieces(layers, tensors)):
        freed = 0.0
        for number in reversed(piece):
            layer, last = layers[number], number + 1 == len(layers)
            # Nothing is copied here to pass it on.
            gradient = 0.0 if last else tensors.gradients[number + 1]
            most = max(most, growth + gradient + layer.peak(layer.input_gradient_peak_bytes, samples))
            gradients = layer.peak(layer.kept_gradient_bytes, samples)
            needed = _needed_input(layer, inputs[number], samples)
            # part of the tensors that the forward saved
            operands = max(0.0, layer.kept(samples) - gradients - needed)
            freed += max(0.0, internal[number] - operands - stays)
            stays = needed
            counted = between[number]
            if number == piece.start:
                stays += layer.peak(layer.held_input_bytes, samples)
                counted += tensors.unsaved[number]  # in a leaf since the forward
            freed += max(0.0, between[number] - stays)
            stays = max(0.0, stays - counted)
            growth += gradients - (layer.kept_output_gradient(samples) if last else 0.0)
        growth -= freed
    return float(most)
