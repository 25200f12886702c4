"""What things cost: seconds for ops, messages and gradient syncs, bytes for weights and activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute, Sync, parse_mode

PerStage = float | Sequence[float]
"""One number for every stage, or one number a stage."""

PerLink = float | Sequence[Sequence[float]]
"""One number for every pair of workers, or ``table[sender][receiver]``."""


class Link(StrEnum):
    """How many messages a link carries at once in each direction."""

    ONE_AT_A_TIME = "one-at-a-time"
    INFINITE = "infinite"


@dataclass(frozen=True, slots=True)
class ByteCosts:
    """Bytes of one stage; each a number for all stages or one a stage.

    Attributes:
        weights: one version of one copy of the stage's weights.
        gradients: gradients of one copy; None means as many as the weights.
        optimizer: optimiser state of one copy.
        activations: what a forward saves for its backward, for one micro-batch, without recomputation.
        kept_for_weights: of it, what weight gradients still need once the input gradient is made, where these
            are two ops; None means all of it.
        inputs: the stage's input for one micro-batch: all that is kept with ``recompute="stage"``. If the
            backward needs it, it is a part of ``activations``.
        layers: layers in the stage; with ``recompute="layer"`` one input a layer is kept.
        layer_inputs: those inputs together; None means ``layers`` times ``inputs``.
        largest_layer: most that a layer saves beyond its input, for one micro-batch; None means that all
            layers of the stage save the same.
    """

    weights: PerStage = 0.0
    gradients: PerStage | None = None
    optimizer: PerStage = 0.0
    activations: PerStage = 0.0
    kept_for_weights: PerStage | None = None
    inputs: PerStage = 0.0
    layers: PerStage = 1.0
    layer_inputs: PerStage | None = None
    largest_layer: PerStage | None = None


@dataclass(frozen=True, slots=True)
class Costs:
    """What a simulation is fed with. Times are in seconds (any one unit does).

    Attributes:
        forward: forward of one stage on one micro-batch; a doubled forward lasts twice as long.
        backward: backward of one stage on one micro-batch; a half one lasts half as long.
        input_gradient: the part of a split backward that makes the input gradient; None means half of
            ``backward``.
        weight_gradients: the other part; None means what ``backward`` takes beyond ``input_gradient``, but
            no less than nothing.
        doubled_forward: forward of one stage on two micro-batches at once; None means twice ``forward``.
        half_backward: backward of one stage on half a micro-batch; None means half of ``backward``.
        halved_forward: forward of one stage on a micro-batch whose backwards are halves, which a runtime may
            run half by half; None means ``forward``.
        p2p: one message between two workers; a number, or ``p2p[sender][receiver]``.
        p2p_per_byte: what each byte of a message adds, in the same forms.
        message_bytes: bytes of a stage's output for one micro-batch, and of the gradient of it.
        link: whether a link carries one message at a time in each direction, or any number (``infinite``), as
            papers' formulas have it.
        overlap: whether a message travels while its sender computes on; else the sender is busy with it.
        sync: all-reduce of one stage's gradients; nothing where there is only one copy.
        sync_mode: when gradients are synchronised (``end``, ``eager``, ``eager-opt``).
        sync_slowdown: share by which a second of compute is longer beside a gradient sync of its worker.
            Which ops that are is taken from a play without it.
        agreement: after all syncs, the workers' agreement on loss and gradient norm; nothing without a flush.
        replicas: copies of the whole pipeline group (W); with more than one every stage has a sync.
        recompute: ``stage`` and ``layer`` add one forward to each backward.
        op_seconds: measured times of single ops, by their text (``"F3.7"``), in place of the above.
        memory: byte costs; None leaves memory out.

    Raises:
        ConfigError: a cost is negative or not a number.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    input_gradient: PerStage | None = None
    weight_gradients: PerStage | None = None
    doubled_forward: PerStage | None = None
    half_backward: PerStage | None = None
    halved_forward: PerStage | None = None
    p2p: PerLink = 0.0
    p2p_per_byte: PerLink = 0.0
    message_bytes: PerStage = 0.0
    link: Link | str = "one-at-a-time"
    overlap: bool = True
    sync: PerStage = 0.0
    sync_mode: Sync | str = Sync.EAGER_OPT
    sync_slowdown: float = 0.0
    agreement: float = 0.0
    replicas: int = 1
    recompute: Recompute | str = Recompute.NONE
    op_seconds: Mapping[str, float] | None = None
    memory: ByteCosts | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync_mode", parse_mode(Sync, "sync_mode", self.sync_mode))
        object.__setattr__(self, "link", parse_mode(Link, "link", self.link))
        object.__setattr__(self, "recompute", parse_mode(Recompute, "recompute", self.recompute))
        shared = ("input_gradient", "weight_gradients", "doubled_forward", "half_backward", "halved_forward")
        for name in ("forward", "backward", *shared, "sync", "sync_slowdown", "agreement"):
            if (value := getattr(self, name)) is not None:
                _refuse_negative(name, value)
        _refuse_negative("message_bytes", self.message_bytes, "bytes")
        for name, links in (("p2p", self.p2p), ("p2p_per_byte", self.p2p_per_byte)):
            for row in [links] if isinstance(links, (int, float)) else links:
                _refuse_negative(name, row)
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas}: must be 1 or more")

    def op_cost(self, stages: int) -> tuple[list[float], list[float]]:
        """Seconds of a forward and of a backward by stage, recomputation included."""
        forward = per_stage("forward", self.forward, stages)
        backward = per_stage("backward", self.backward, stages)
        if self.recompute is not Recompute.NONE:
            backward = [b + f for f, b in zip(forward, backward, strict=True)]
        return forward, backward

    def split_cost(self, stages: int) -> tuple[list[float], list[float]]:
        """Seconds of an input gradient and of weight gradients by stage.

        What is recomputed is recomputed once, with the input gradient.
        """
        forward = per_stage("forward", self.forward, stages)
        backward = per_stage("backward", self.backward, stages)
        inputs = [b / 2 for b in backward]
        if self.input_gradient is not None:
            inputs = per_stage("input_gradient", self.input_gradient, stages)
        weights = [max(0.0, b - i) for b, i in zip(backward, inputs, strict=True)]
        if self.weight_gradients is not None:
            weights = per_stage("weight_gradients", self.weight_gradients, stages)
        if self.recompute is not Recompute.NONE:
            inputs = [i + f for f, i in zip(forward, inputs, strict=True)]
        return inputs, weights

    def shared_op_cost(self, stages: int) -> tuple[list[float], list[float]]:
        """Seconds of a doubled forward and of a half backward by stage, recomputation included."""
        forward, backward = self.op_cost(stages)
        doubled = [2 * f for f in forward]
        if self.doubled_forward is not None:
            doubled = per_stage("doubled_forward", self.doubled_forward, stages)
        half = [b / 2 for b in backward]
        if self.half_backward is not None:
            half = per_stage("half_backward", self.half_backward, stages)
            if self.recompute is not Recompute.NONE:
                half = [b + f / 2 for f, b in zip(forward, half, strict=True)]
        return doubled, half


def per_stage(name: str, value: PerStage, stages: int) -> list[float]:
    """``value`` for each of ``stages`` stages.

    Raises:
        ConfigError: it is a list of another length.
    """
    if isinstance(value, (int, float)):
        return [float(value)] * stages
    if len(value) != stages:
        raise ConfigError(
            f"{name}: {len(value)} numbers for {stages} stages; give one number, or one a stage"
        )
    return [float(v) for v in value]


def _refuse_negative(name: str, value: PerStage, unit: str = "seconds") -> None:
    for number in [value] if isinstance(value, (int, float)) else value:
        if not math.isfinite(number) or number < 0:
            raise ConfigError(f"{name}={number}: must be a finite number of {unit}, 0 or more")
