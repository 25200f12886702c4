"""What layers cost on a device: seconds and saved bytes against the size of the micro-batch.

Invariant: a curve goes through what was measured. Between two sizes it is a straight line; above the largest
it goes on as between the last two; below the smallest it stays, for a device that is not full is not quicker
with less (bytes go down in proportion).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from counterflow.errors import ConfigError

from .cluster import FORM, require_number

_AT_SIZES = "forward_seconds", "backward_seconds", "saved_bytes"
_ALONE = (
    "weights_bytes",
    "output_bytes",
    "cast_bytes",
    "frozen_bytes",
    "update_peak_bytes",
    "low_precision_bytes",
)
_PEAKS = (
    "forward_peak_bytes",
    "backward_peak_bytes",
    "input_gradient_peak_bytes",
    "weight_gradients_peak_bytes",
)
_IF_THERE = (
    "input_gradient_seconds",
    "weight_gradients_seconds",
    "kept_bytes",
    "kept_input_bytes",
    "kept_output_bytes",
    "kept_gradient_bytes",
    "kept_anyway_bytes",
    "held_input_bytes",
    *_PEAKS,
)


@dataclass(frozen=True, slots=True)
class Division:
    """What tensor parallelism divides of a kind of layer; the rest is whole at every position.

    With T positions a share s that is divided leaves 1 − s + s/T of bytes at each. It takes as many seconds
    as 1/T of the samples take whole: a device that is filled as far is as fast.

    Attributes:
        weights: share of its weights' bytes; of their gradients, casts and optimiser state likewise.
        forward: share of a forward's seconds.
        backward: share of a backward's, and of both halves of a split one.
        saved: share of what a forward keeps for its backward, and of what is kept between the halves.
        peaks: share of what forwards and backwards hold while they run.
        forward_sums: all-reduces over the positions in a forward.
        backward_sums: in a backward; of a split one they are in the input gradient.
        sum_bytes: of each, for one sample; None: the layer's output.
        overhead_seconds: what a divided layer's forward takes beside its sums whatever its size, and its
            backward likewise, with its first half: on a CPU, torch's DTensors.
        parts: T divides this number, that of attention heads; 0: any T will do.

    Raises:
        ConfigError: a share above 1, or a number below 0.

    >>> Division(weights=1.5)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: weights=1.5: is a share; must be 1 or less
    """

    __pydantic_config__ = FORM

    weights: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    saved: float = 0.0
    peaks: float = 0.0
    forward_sums: int = 0
    backward_sums: int = 0
    sum_bytes: float | None = None
    overhead_seconds: float = 0.0
    parts: int = 0

    def __post_init__(self) -> None:
        for name in ("weights", "forward", "backward", "saved", "peaks"):
            require_number(name, getattr(self, name))
            if getattr(self, name) > 1:
                raise ConfigError(f"{name}={getattr(self, name):g}: is a share; must be 1 or less")
        for name in ("forward_sums", "backward_sums", "overhead_seconds", "parts"):
            require_number(name, getattr(self, name))
        if self.sum_bytes is not None:
            require_number("sum_bytes", self.sum_bytes)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One kind of layer.

    Attributes:
        samples: sizes of a micro-batch, in samples, rising, each above 0.
        forward_seconds: the forward at each size.
        backward_seconds: the backward at each size, without recomputation.
        saved_bytes: what the forward keeps for the backward at each size, the layer's input included.
        weights_bytes: the layer's weights, trained or not.
        output_bytes: the layer's output, for one sample.
        sources: where a number comes from, by its name.
        input_gradient_seconds: the first half of a split backward at each size; none: half of the backward.
        weight_gradients_seconds: the other half; none: what the backward takes beyond the first.
        kept_bytes: what is kept between the two at each size; none: all that the forward keeps.
        cast_bytes: what one version of its weights is cast to in another precision, for all micro-batches.
        frozen_bytes: of its weights, those that are not trained: without gradients and optimiser state.
        kept_input_bytes: of ``saved_bytes`` at each size, the layer's input; none: all of the input.
        kept_output_bytes: of ``saved_bytes`` at each size, the layer's output: the next one's input.
        forward_peak_bytes: the most that a forward holds beside its input, at each size: what it saves, its
            output, and what its kernels need; none: what it saves.
        backward_peak_bytes: the most that a backward holds beside what was there when it began, its
            gradients of the input and of the weights as well; none: nothing.
        input_gradient_peak_bytes: the same of the first half of a split backward.
        weight_gradients_peak_bytes: of the other half.
        kept_anyway_bytes: of ``saved_bytes`` at each size, what stays though the layer is computed again: the
            loss, which is not. None: nothing.
        kept_gradient_bytes: gradients that the first half keeps for the other, with that of the output.
        held_input_bytes: of its input, what is there between the halves though no weight needs it: the graph
            of those that wait holds it. None: nothing.
        update_peak_bytes: what the optimiser needs while it updates the layer, beside its state.
        low_precision_bytes: of its trained weights, those in bfloat16 or float16: their gradients are added
            up in float32 and take twice as much.
        tensor_parallel: what tensor parallelism divides of it; None: nothing.
        parameter_bytes: of each trained parameter, in the layer's order: whole ones are owned where optimiser
            state is sharded. None: the layer's bytes are taken to be shared out evenly.

    Raises:
        ConfigError: no sizes, sizes that do not rise, a number for a size missing or negative.

    >>> layer = LayerProfile((1, 4), (1.0, 2.5), (2.0, 5.0), (10.0, 40.0), 100.0, 1.0)
    >>> layer.forward(2), layer.forward(8), layer.forward(0.5), layer.saved(2), layer.saved(8)
    (1.5, 4.5, 1.0, 20.0, 80.0)
    """

    __pydantic_config__ = FORM

    samples: tuple[float, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    weights_bytes: float
    output_bytes: float
    sources: Mapping[str, str] = field(default_factory=dict)
    input_gradient_seconds: tuple[float, ...] = ()
    weight_gradients_seconds: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()
    cast_bytes: float = 0.0
    frozen_bytes: float = 0.0
    kept_input_bytes: tuple[float, ...] = ()
    kept_output_bytes: tuple[float, ...] = ()
    forward_peak_bytes: tuple[float, ...] = ()
    backward_peak_bytes: tuple[float, ...] = ()
    input_gradient_peak_bytes: tuple[float, ...] = ()
    weight_gradients_peak_bytes: tuple[float, ...] = ()
    kept_gradient_bytes: tuple[float, ...] = ()
    kept_anyway_bytes: tuple[float, ...] = ()
    held_input_bytes: tuple[float, ...] = ()
    update_peak_bytes: float = 0.0
    tensor_parallel: Division | None = None
    parameter_bytes: tuple[float, ...] = ()
    low_precision_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.samples or self.samples[0] <= 0 or any(a >= b for a, b in pairwise(self.samples)):
            raise ConfigError(
                f"samples={list(self.samples)}: must be one size or more, above 0, each more than the last"
            )
        for name in (*_AT_SIZES, *_IF_THERE):
            values = getattr(self, name)
            if name in _IF_THERE and not values:
                continue
            if len(values) != len(self.samples):
                raise ConfigError(
                    f"{name}: {len(values)} numbers for {len(self.samples)} sizes; give one a size of samples"
                )
            for value in values:
                require_number(name, value)
        for name in _ALONE:
            require_number(name, getattr(self, name))
        self._require_parts()
        for size in self.parameter_bytes:
            require_number("parameter_bytes", size)
        if self.parameter_bytes and not math.isclose(sum(self.parameter_bytes), self.trained_bytes):
            raise ConfigError(
                f"parameter_bytes: {sum(self.parameter_bytes):g} bytes, and {self.trained_bytes:g} "
                "are trained (weights_bytes less frozen_bytes); make them the same, or leave them out"
            )

    def _require_parts(self) -> None:
        """Refuse more of the weights than there are."""
        for name, whole in (("frozen_bytes", "weights_bytes"), ("low_precision_bytes", "trained_bytes")):
            part, of = getattr(self, name), getattr(self, whole)
            if part > of:
                raise ConfigError(f"{name}={part:g}: is a part of {whole}={of:g}; must be no more")

    @property
    def trained_bytes(self) -> float:
        """Of its weights, those that are trained."""
        return self.weights_bytes - self.frozen_bytes

    @property
    def gradient_bytes(self) -> float:
        """Of its weights' gradients, as they are added up."""
        return self.trained_bytes + self.low_precision_bytes

    def forward(self, samples: float) -> float:
        """Seconds of the forward of a micro-batch of ``samples``."""
        return self._at(self.forward_seconds, samples)

    def backward(self, samples: float) -> float:
        """Seconds of its backward."""
        return self._at(self.backward_seconds, samples)

    def input_gradient(self, samples: float) -> float:
        """Seconds of the first half of a split backward."""
        if not self.input_gradient_seconds:
            return self.backward(samples) / 2
        return self._at(self.input_gradient_seconds, samples)

    def weight_gradients(self, samples: float) -> float:
        """Seconds of the other half."""
        if not self.weight_gradients_seconds:
            return max(0.0, self.backward(samples) - self.input_gradient(samples))
        return self._at(self.weight_gradients_seconds, samples)

    def saved(self, samples: float) -> float:
        """Bytes that its forward keeps for its backward."""
        return self._bytes(self.saved_bytes, samples)

    def kept(self, samples: float) -> float:
        """Bytes that are kept between the halves of a split backward."""
        return self._bytes(self.kept_bytes or self.saved_bytes, samples)

    def kept_input(self, samples: float, size: float) -> float:
        """Of what its forward keeps, the layer's input, which is of that size."""
        if not self.kept_input_bytes:
            return min(size, self.saved(samples))
        return self._bytes(self.kept_input_bytes, samples)

    def kept_output(self, samples: float) -> float:
        """Of what its forward keeps, the layer's output."""
        return self._bytes(self.kept_output_bytes or (0.0,) * len(self.samples), samples)

    def forward_peak(self, samples: float, size: float) -> float:
        """The most that its forward holds beside its input, which is of that size."""
        if not self.forward_peak_bytes:
            return self.saved(samples) - self.kept_input(samples, size)
        return self._bytes(self.forward_peak_bytes, samples)

    def peak(self, values: tuple[float, ...], samples: float) -> float:
        """One of the curves of bytes; none: 0."""
        return self._bytes(values, samples) if values else 0.0

    def _bytes(self, values: tuple[float, ...], samples: float) -> float:
        if samples < self.samples[0]:
            return values[0] * samples / self.samples[0]
        return self._at(values, samples)

    def _at(self, values: tuple[float, ...], samples: float) -> float:
        sizes = self.samples
        if samples <= sizes[0]:
            return values[0]
        if len(sizes) == 1:
            return values[0] * samples / sizes[0]
        high = min(bisect_left(sizes, samples), len(sizes) - 1)
        low = high - 1
        slope = (values[high] - values[low]) / (sizes[high] - sizes[low])
        return max(0.0, values[high] + slope * (samples - sizes[high]))


@dataclass(frozen=True, slots=True)
class Profile:
    """A device's kinds of layers.

    Attributes:
        name: what to call it.
        machine: the device, in words.
        date: when it was measured, or of which publication the numbers are.
        layers: the kinds by name.
        update_seconds_per_byte: the optimiser's update, for each byte of weights.
        sources: where a number comes from, by its name.
        op_overhead_seconds: what an op takes beside its layers: the engine's own code, and to post messages.
        step_overhead_seconds: what an update takes beside ops, syncs and the optimiser: to begin together,
            and to agree on loss and gradient norm.
        update_together: whether the optimiser updates all weights of a stage at once, so that what it needs
            meanwhile adds up over the layers.
        norm_bytes_per_byte: what the gradient norm needs for each byte of gradients, up to
            ``norm_peak_bytes``.
        norm_peak_bytes: what it needs at most.

    Raises:
        ConfigError: no kinds, or a negative number.
    """

    __pydantic_config__ = FORM

    name: str
    machine: str
    date: str
    layers: Mapping[str, LayerProfile]
    update_seconds_per_byte: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    op_overhead_seconds: float = 0.0
    step_overhead_seconds: float = 0.0
    update_together: bool = False
    norm_bytes_per_byte: float = 0.0
    norm_peak_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"profile {self.name}: has no layers; give one kind or more")
        for name in (
            "update_seconds_per_byte",
            "op_overhead_seconds",
            "step_overhead_seconds",
            "norm_bytes_per_byte",
            "norm_peak_bytes",
        ):
            require_number(name, getattr(self, name))

    def layer(self, kind: str) -> LayerProfile:
        """The layers of that kind.

        Raises:
            ConfigError: there are none.
        """
        known = self.layers.get(kind)
        if known is None:
            raise ConfigError(
                f"profile {self.name}: has no layers of kind {kind!r}; kinds: {', '.join(self.layers)}"
            )
        return known
