"""Costs of layers on a device: seconds and saved bytes by size of the micro-batch.

Invariant: a curve passes through the measured values. Between two sizes it is linear; above the largest it is
extrapolated from the last two; below the smallest seconds are constant, because a device that is not fully
used is not faster with less work (bytes are proportional).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import mul
from typing import Any, Self

from counterflow.errors import ConfigError
from counterflow.schedule.op import OpKind
from counterflow.simulation.layer_cost import LayerCost, Line
from counterflow.simulation.slice_lengths import exceed_whole

from .cluster import FORM, require_number
from .layer_parts import Contexts, Division, Experts, InputTensors

_AT_SIZES = "forward_seconds", "backward_seconds", "saved_bytes"
_ALONE = (
    "weights_bytes",
    "output_bytes",
    "buffer_bytes",
    "noted_buffer_bytes",
    "cast_bytes",
    "frozen_bytes",
    "update_peak_bytes",
    "low_precision_bytes",
    "attention_share",
    "fixed_share",
    "state_bytes",
    "slice_state_bytes",
    "graph_nodes",
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
    "kept_output_gradient_bytes",
    "kept_anyway_bytes",
    "held_input_bytes",
    *_PEAKS,
)
_PARTS = (
    ("frozen_bytes", "weights_bytes"),
    ("low_precision_bytes", "trained_bytes"),
    ("noted_buffer_bytes", "buffer_bytes"),
)
"""Fields that are a part of others."""

CURVES = (*_AT_SIZES, *_IF_THERE)
"""Fields of ``LayerProfile`` with an amount for each size."""

FACTORS = "low_factors", "high_factors"
"""Fields of ``LayerProfile`` with a multiple of the seconds for each size."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One kind of layer.

    Attributes:
        samples: sizes of a micro-batch, in samples, rising, each above 0.
        forward_seconds: duration of the forward at each size.
        backward_seconds: duration of the backward at each size, without recomputation.
        saved_bytes: bytes that the forward saves for the backward at each size, including the layer's input.
        weights_bytes: size of the layer's weights, trained or not.
        output_bytes: size of the layer's output for one sample.
        sources: origins of numbers, by name.
        input_gradient_seconds: duration of the first half of a split backward at each size; empty: half of
            the backward.
        weight_gradients_seconds: duration of the other half; empty: the rest of the backward.
        kept_bytes: bytes saved between the two at each size; empty: all that the forward saves.
        cast_bytes: casts of one version of its weights to another precision, for all micro-batches.
        frozen_bytes: size of the weights that are not trained, which have no gradients and optimiser state.
        kept_input_bytes: the part of ``saved_bytes`` at each size that is the layer's input; empty: the whole
            input.
        kept_output_bytes: the part of ``saved_bytes`` at each size that is the layer's output, the next one's
            input.
        forward_peak_bytes: maximum memory of a forward without its input, at each size: saved tensors, its
            output, and memory of its kernels; empty: saved tensors only.
        backward_peak_bytes: maximum memory of a backward in addition to that when it began, including its
            gradients of the input and of the weights; empty: 0.
        input_gradient_peak_bytes: the same for the first half of a split backward.
        weight_gradients_peak_bytes: the same for the other half.
        kept_anyway_bytes: the part of ``saved_bytes`` at each size that stays although the layer is computed
            again: that of the loss, which is not. Empty: 0.
        kept_gradient_bytes: gradients that the first half saves for the other, including that of the output.
        kept_output_gradient_bytes: the part of these that is the gradient of the output. Empty: all, up to
            the size of the output.
        held_input_bytes: the part of its input that exists between the halves although no weight needs it,
            because the pending graph holds it, if the layer begins a piece of the graph. Empty: 0.
        update_peak_bytes: memory that the optimiser needs while it updates the layer, in addition to its
            state.
        attention_share: share of the seconds of a forward, and of a backward, that is attention to earlier
            positions, so that a later slice of a sequence takes longer.
        fixed_share: share of them that a slice takes however short it is.
        state_bytes: size of what slices leave to later ones, as far as it grows with them; of a whole
            sequence, for one sample.
        slice_state_bytes: size of what each slice leaves however short it is, for one sample.
        low_precision_bytes: size of its trained weights in bfloat16 or float16, whose gradients are
            accumulated in float32 and take twice as much.
        tensor_parallel: the parts that tensor parallelism divides; None: none.
        experts: its routed experts, which expert parallelism divides; None: none.
        contexts: its attention, for which positions that share sequences gather keys and values; None: none.
        low_factors: multiples of its seconds at each size, at most 1, that give a low quantile of repeats;
            empty: seconds are exact.
        high_factors: the same for a high quantile, at least 1.
        parameter_bytes: size of each trained parameter, in the layer's order, because whole parameters have
            owners if optimiser state is sharded. None: the layer's bytes are assumed to be divided evenly.
        input_tensors: the tensors of its input; None: one, which it does not pass on.
        buffer_bytes: size of its buffers, such as running statistics and masks, of which each copy of the
            layer has one version; one that several layers share counts in each.
        noted_buffer_bytes: the part of these without running statistics, whose contents are noted if a stage
            has copies, or forwards are computed again.
        one_copy: True if training changes its buffers or weights beside updates, and copies would differ.
        graph_nodes: number of nodes of its autograd graph, which tells the pieces of a split backward; 0:
            not known, the layer is one.

    Raises:
        ConfigError: there are no sizes, sizes do not rise, or a number for a size is missing or negative.

    >>> layer = LayerProfile((1, 4), (1.0, 2.5), (2.0, 5.0), (10.0, 40.0), 100.0, 1.0)
    >>> [layer.seconds(OpKind.FORWARD, samples) for samples in (0.5, 2, 8)], layer.saved(2), layer.saved(8)
    ([1.0, 1.5, 4.5], 20.0, 80.0)
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
    attention_share: float = 0.0
    fixed_share: float = 0.0
    state_bytes: float = 0.0
    slice_state_bytes: float = 0.0
    experts: Experts | None = None
    contexts: Contexts | None = None
    low_factors: tuple[float, ...] = ()
    high_factors: tuple[float, ...] = ()
    input_tensors: InputTensors | None = None
    buffer_bytes: float = 0.0
    noted_buffer_bytes: float = 0.0
    kept_output_gradient_bytes: tuple[float, ...] = ()
    graph_nodes: int = 0
    one_copy: bool = False

    def __post_init__(self) -> None:
        if not self.samples or self.samples[0] <= 0 or any(a >= b for a, b in pairwise(self.samples)):
            raise ConfigError(
                f"samples={list(self.samples)}: must be one size or more, above 0, each more than the last"
            )
        for name in CURVES:
            values = getattr(self, name)
            if name in _IF_THERE and not values:
                continue
            if len(values) != len(self.samples):
                raise ConfigError(
                    f"{name}: {len(values)} numbers for {len(self.samples)} sizes; give one per size"
                )
            for value in values:
                require_number(name, value)
        self._require_factors()
        for name in _ALONE:
            require_number(name, getattr(self, name))
        self._require_parts()
        if exceed_whole(self.attention_share, self.fixed_share):
            raise ConfigError(
                f"attention_share={self.attention_share:g} and fixed_share={self.fixed_share:g}: are shares "
                "of one time; their sum must be 1 or less"
            )
        for size in self.parameter_bytes:
            require_number("parameter_bytes", size)
        if self.parameter_bytes and not math.isclose(sum(self.parameter_bytes), self.trained_bytes):
            raise ConfigError(
                f"parameter_bytes: {sum(self.parameter_bytes):g} bytes, but {self.trained_bytes:g} "
                "are trained (weights_bytes less frozen_bytes); make the numbers equal, or leave "
                "parameter_bytes out"
            )

    def _require_factors(self) -> None:
        for name in FACTORS:
            factors = getattr(self, name)
            if factors and len(factors) != len(self.samples):
                raise ConfigError(
                    f"{name}: {len(factors)} numbers for {len(self.samples)} sizes; give one per size"
                )
            for factor in factors:
                require_number(name, factor)
        if any(factor > 1 for factor in self.low_factors) or any(factor < 1 for factor in self.high_factors):
            raise ConfigError(
                f"low_factors={list(self.low_factors)} and high_factors={list(self.high_factors)}: are "
                "multiples of the seconds; must be at most 1, and at least 1"
            )

    def _require_parts(self) -> None:
        for name, total in _PARTS:
            part, of = getattr(self, name), getattr(self, total)
            if part > of:
                raise ConfigError(f"{name}={part:g}: is a part of {total}={of:g}; must be no more")
        if self.experts is not None and self.experts.weights_bytes > self.weights_bytes:
            raise ConfigError(
                f"experts.weights_bytes={self.experts.weights_bytes:g}: is a part of "
                f"weights_bytes={self.weights_bytes:g}; must be no more"
            )

    @property
    def trained_bytes(self) -> float:
        """Size of its trained weights."""
        return self.weights_bytes - self.frozen_bytes

    @property
    def gradient_bytes(self) -> float:
        """Size of its weights' gradients as they are accumulated."""
        return self.trained_bytes + self.low_precision_bytes

    @property
    def summed_bytes(self) -> float:
        """Size of its gradients as copies of its stage sum them."""
        return self.gradient_bytes

    @property
    def gathered_bytes(self) -> float:
        """Memory of an op for weights that it gathers."""
        return 0.0

    @property
    def position_sum_seconds(self) -> float:
        """Time of the sum of its gradients over the positions of a worker."""
        return 0.0

    def multiplied(self, factors: tuple[float, ...]) -> Self:
        """The layer with its seconds multiplied by a factor for each size; empty: as they are."""
        if not factors:
            return self
        scaled: dict[str, Any] = {
            name: tuple(map(mul, getattr(self, name), factors))
            for name in CURVES
            if name.endswith("_seconds")
        }
        return replace(self, **scaled, low_factors=(), high_factors=())

    def lines(self) -> dict[OpKind, Line]:
        """Seconds of an op of each kind."""
        inputs = self.input_gradient_seconds or tuple(seconds / 2 for seconds in self.backward_seconds)
        weights = self.weight_gradients_seconds or tuple(
            max(0.0, both - first) for both, first in zip(self.backward_seconds, inputs, strict=True)
        )
        seconds = {
            OpKind.FORWARD: self.forward_seconds,
            OpKind.BACKWARD: self.backward_seconds,
            OpKind.INPUT_GRADIENT: inputs,
            OpKind.WEIGHT_GRADIENTS: weights,
        }
        repeated_kinds = {kind: kind.again for kind in OpKind if kind.again is not None and not kind.makes}
        seconds |= {kind: seconds[repeated] for kind, repeated in repeated_kinds.items()}
        return {kind: Line(self.samples, amounts) for kind, amounts in seconds.items()}

    def seconds(self, kind: OpKind, samples: float) -> float:
        """Seconds of an op on a micro-batch of ``samples``; of a backward without recomputation."""
        return self.lines()[kind].at(samples)

    def cost(self) -> LayerCost:
        """Cost of the layer."""
        lines = {kind: ((1, line),) for kind, line in self.lines().items()}
        share = self.attention_share
        attention = {kind: share for kind in OpKind if kind.attends} if share else {}
        return LayerCost(lines, self.fixed_share, attention)

    def saved(self, samples: float) -> float:
        """Bytes that its forward saves for its backward."""
        return self._bytes(self.saved_bytes, samples)

    def kept(self, samples: float) -> float:
        """Bytes saved between the halves of a split backward."""
        return self._bytes(self.kept_bytes or self.saved_bytes, samples)

    def kept_input(self, samples: float, size: float) -> float:
        """The part of the saved bytes that is the layer's input, whose size is ``size``."""
        if not self.kept_input_bytes:
            return min(size, self.saved(samples))
        return self._bytes(self.kept_input_bytes, samples)

    def kept_output(self, samples: float) -> float:
        """The part of the saved bytes that is the layer's output."""
        return self._bytes(self.kept_output_bytes or (0.0,) * len(self.samples), samples)

    def kept_output_gradient(self, samples: float) -> float:
        """Bytes between the halves of a split backward that are the gradient of the layer's output."""
        if not self.kept_output_gradient_bytes:
            return min(self.peak(self.kept_gradient_bytes, samples), self.output_bytes * samples)
        return self._bytes(self.kept_output_gradient_bytes, samples)

    def forward_peak(self, samples: float, size: float) -> float:
        """Maximum memory of its forward without its input, whose size is ``size``."""
        if not self.forward_peak_bytes:
            return self.saved(samples) - self.kept_input(samples, size)
        return self._bytes(self.forward_peak_bytes, samples)

    def peak(self, values: tuple[float, ...], samples: float) -> float:
        """One of the curves of bytes; 0 if it is empty."""
        return self._bytes(values, samples) if values else 0.0

    def _bytes(self, values: tuple[float, ...], samples: float) -> float:
        return Line(self.samples, values).in_proportion(samples)


@dataclass(frozen=True, slots=True)
class Profile:
    """The kinds of layers on a device.

    Attributes:
        name: name of the profile.
        machine: the device, in words.
        date: date of the measurement, or the publication of the numbers.
        layers: the kinds by name.
        update_seconds_per_byte: time of the optimiser's update per byte of weights.
        sources: origins of numbers, by name.
        op_overhead_seconds: additional time of an op: the runtime's own code, and posting messages.
        step_overhead_seconds: time of an update in addition to ops, syncs and the optimiser: to begin
            together, and to agree on loss and gradient norm.
        message_core_seconds: processor seconds of a message, of both of its workers and beside their ops;
            counts where workers leave no core to the threads that carry messages.
        update_together: True if the optimiser updates all weights of a stage at once, so its memory adds up
            over the layers.
        norm_bytes_per_byte: memory that the gradient norm needs per byte of gradients, up to
            ``norm_peak_bytes``.
        norm_peak_bytes: maximum memory of the gradient norm.
        positions: positions of a sample's sequence, which slices divide; 0: it has none.
        min_samples: fewest samples of a micro-batch with which the layers run; batch norms need two.
        waiting_share: mean share of the timed ops in which threads of a worker waited for a processor that
            others had.

    Raises:
        ConfigError: there are no kinds, or a number is negative.
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
    message_core_seconds: float = 0.0
    update_together: bool = False
    norm_bytes_per_byte: float = 0.0
    norm_peak_bytes: float = 0.0
    positions: int = 0
    min_samples: int = 1
    waiting_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"profile {self.name}: has no layers; give one kind or more")
        for name in (
            "update_seconds_per_byte",
            "op_overhead_seconds",
            "step_overhead_seconds",
            "message_core_seconds",
            "norm_bytes_per_byte",
            "norm_peak_bytes",
            "positions",
            "min_samples",
            "waiting_share",
        ):
            require_number(name, getattr(self, name))

    def layer(self, kind: str) -> LayerProfile:
        """The layer of that kind.

        Raises:
            ConfigError: the profile does not contain the kind.
        """
        known = self.layers.get(kind)
        if known is None:
            raise ConfigError(
                f"profile {self.name}: has no layers of kind {kind!r}; kinds: {', '.join(self.layers)}"
            )
        return known

    def bounds(self) -> tuple[Profile, Profile] | None:
        """The profile with all seconds of layers at their low quantile, and at their high one.

        All layers are low or high at once, as on a machine that is quick or slow. None: no layer has
        quantiles.
        """
        if not any(layer.low_factors or layer.high_factors for layer in self.layers.values()):
            return None
        low = {kind: layer.multiplied(layer.low_factors) for kind, layer in self.layers.items()}
        high = {kind: layer.multiplied(layer.high_factors) for kind, layer in self.layers.items()}
        return replace(self, layers=low), replace(self, layers=high)
