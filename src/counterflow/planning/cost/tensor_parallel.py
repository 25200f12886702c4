"""Tensor parallelism in a plan: each of T positions has its share of what is divided, and all of the rest.

T adjacent devices of a node share the work of each layer (``Division``). All-reduces over the positions
happen within an op, and compute waits for them. If nodes differ, the slowest links inside one count, and on a
slow device all-reduces are as slow as ops.

Not modelled: which all-reduces a second forward omits, norms and digests over the positions.
"""

from __future__ import annotations

from dataclasses import replace

from counterflow.schedule.op import OpKind
from counterflow.simulation.layer_cost import Line

from ..inputs.cluster import Collective
from ..inputs.layer_parts import Division
from ..inputs.profile import LayerProfile


def of_position(
    layer: LayerProfile, division: Division, positions: int, collective: Collective
) -> LayerProfile:
    """The layer of one position.

    Args:
        layer: the whole layer.
        division: the parts of it that are divided.
        positions: T.
        collective: cost of an all-reduce over the positions.

    >>> whole = LayerProfile((1.0,), (8.0,), (16.0,), (100.0,), weights_bytes=40.0, output_bytes=10.0)
    >>> half = Division(weights=1.0, forward=0.5, backward=0.5, saved=0.4, forward_sums=2, backward_sums=2)
    >>> one = of_position(whole, half, 2, Collective(latency_seconds=1.0, seconds_per_byte=0.1))
    >>> one.forward_seconds, one.backward_seconds, one.saved(1), one.weights_bytes  # 6 + 2·(1 + 1), 12 + 4
    ((10.0,), (16.0,), 80.0, 20.0)
    """

    def remaining(share: float) -> float:
        return 1 - share + share / positions

    def shrunk(values: tuple[float, ...], share: float) -> tuple[float, ...]:
        return tuple(remaining(share) * value for value in values)

    lines = layer.lines()

    def seconds(kind: OpKind, share: float, sums: int = 0, more: float = 0.0) -> tuple[float, ...]:
        line = lines[kind]
        return tuple(
            (1 - share) * line.at(n) + share * of_fewer(line, n / positions) + sums * communication + more
            for n, communication in zip(layer.samples, sum_seconds, strict=True)
        )

    size = layer.output_bytes if division.sum_bytes is None else division.sum_bytes
    sum_seconds = [collective.seconds(size * samples) for samples in layer.samples]

    weights, more = remaining(division.weights), division.overhead_seconds
    return replace(
        layer,
        forward_seconds=seconds(OpKind.FORWARD, division.forward, division.forward_sums, more),
        backward_seconds=seconds(OpKind.BACKWARD, division.backward, division.backward_sums, more),
        input_gradient_seconds=seconds(
            OpKind.INPUT_GRADIENT, division.backward, division.backward_sums, more
        ),
        weight_gradients_seconds=seconds(OpKind.WEIGHT_GRADIENTS, division.backward),
        saved_bytes=shrunk(layer.saved_bytes, division.saved),
        kept_bytes=shrunk(layer.kept_bytes, division.saved),
        kept_gradient_bytes=shrunk(layer.kept_gradient_bytes, division.saved),
        kept_output_gradient_bytes=shrunk(layer.kept_output_gradient_bytes, division.saved),
        forward_peak_bytes=shrunk(layer.forward_peak_bytes, division.peaks),
        backward_peak_bytes=shrunk(layer.backward_peak_bytes, division.peaks),
        input_gradient_peak_bytes=shrunk(layer.input_gradient_peak_bytes, division.peaks),
        weight_gradients_peak_bytes=shrunk(layer.weight_gradients_peak_bytes, division.peaks),
        weights_bytes=weights * layer.weights_bytes,
        frozen_bytes=weights * layer.frozen_bytes,
        low_precision_bytes=weights * layer.low_precision_bytes,
        cast_bytes=weights * layer.cast_bytes,
        state_bytes=remaining(division.saved) * layer.state_bytes,
        slice_state_bytes=remaining(division.saved) * layer.slice_state_bytes,
        update_peak_bytes=weights * layer.update_peak_bytes,
        parameter_bytes=(),  # unknown which of them are divided
    )


def of_fewer(line: Line, samples: float) -> float:
    """Seconds for this few samples; below the smallest size on the line through the first two.

    They are at least proportional. Micro-batches have whole samples, so a profile's curves are constant below
    the smallest size, but parts of a layer can be smaller.
    """
    sizes, seconds = line
    if samples >= sizes[0]:
        return line.at(samples)
    first, rate = seconds[0], seconds[0] / sizes[0]
    if len(sizes) > 1:
        rate = (seconds[1] - first) / (sizes[1] - sizes[0])
    return min(first, max(first - rate * (sizes[0] - samples), first * samples / sizes[0]))
