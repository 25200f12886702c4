"""Costs: seconds of ops, messages and gradient syncs, bytes of weights and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import add, mul

from counterflow.common.cli_fields import cli_field
from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute, Sync, parse_mode
from counterflow.schedule.op import OpKind, Saved

from .layer_cost import LayerCost, proportional
from .op_costs import OpCosts, PerStage, StageBytes, StageOps, per_stage, refuse_negative

PerLink = float | Sequence[Sequence[float]]
"""One number for every pair of workers, or ``table[sender][receiver]``."""


class Link(StrEnum):
    """Number of messages that a link carries at once in each direction."""

    ONE_AT_A_TIME = "one-at-a-time"
    INFINITE = "infinite"


Crossings = Sequence[tuple[Sequence[int], float]]
"""For each stage's gradient sync the shared ways, by number, and its seconds on each."""

Ties = Sequence[tuple[tuple[int, ...], float]]
"""Groups of stages that share weights, and seconds of their sum."""


@dataclass(frozen=True, slots=True)
class ByteCosts:
    """Bytes of one stage; each a number for all stages or one per stage.

    Attributes:
        weights: one version of one copy of the stage's weights.
        gradients: gradients of one copy; None means as many as the weights.
        optimizer: optimiser state of one copy.
        activations: bytes that a forward saves for its backward, for one micro-batch, without recomputation.
        kept_for_weights: the part of it that weight gradients still need after the input gradient, if the
            backward is split; None means all of it.
        inputs: the stage's input for one micro-batch: all that is saved with ``recompute="stage"``. If the
            backward needs it, it is a part of ``activations``.
        casts: casts of one version of the weights to another precision, made once for all micro-batches.
        beyond_inputs: bytes that a forward saves beyond its input while the stage is computed again; None
            means ``activations`` less ``inputs``.
        layers: number of layers in the stage; with ``recompute="layer"`` one input per layer is saved.
        layer_inputs: those inputs together; None means ``layers`` times ``inputs``.
        largest_layer: maximum bytes that a layer saves beyond its input, for one micro-batch; None means that
            all layers of the stage save the same.
        state: bytes of one micro-batch that a stage leaves to later slices, such as keys and values: a part
            of ``activations`` that is saved in any case. Its gradient waits for the slice that made it.
        slice_state: bytes of it that each slice leaves, however short it is, such as a recurrent state.
        state_gradients: bytes of these gradients; None: as many as of the state.
    """

    weights: PerStage = cli_field(
        0.0, "Bytes of one version of the weights.", metavar="BYTES", name="weight_bytes", divided=0.0
    )
    gradients: PerStage | None = cli_field(
        None,
        "Bytes of gradients. Default: those of the weights.",
        metavar="BYTES",
        name="gradient_bytes",
        divided=0.0,
    )
    optimizer: PerStage = cli_field(
        0.0, "Bytes of optimiser state.", metavar="BYTES", name="optimizer_bytes", divided=0.0
    )
    activations: PerStage = cli_field(
        0.0,
        "What a forward of one micro-batch saves for its backward.",
        metavar="BYTES",
        name="activation_bytes",
        divided=0.0,
    )
    inputs: PerStage = cli_field(
        0.0,
        "Input of one micro-batch: what --recompute stage saves.",
        metavar="BYTES",
        name="input_bytes",
    )
    kept_for_weights: PerStage | None = cli_field(
        None,
        "What a split backward keeps from the input gradient to the weight gradients. Default: all of "
        "--activation-bytes.",
        metavar="BYTES",
        divided=0.0,
    )
    layers: PerStage = cli_field(
        1.0, "Number of layers: --recompute layer saves the input of each.", metavar="NUMBER", divided=1.0
    )
    layer_inputs: PerStage | None = None
    largest_layer: PerStage | None = None
    beyond_inputs: PerStage | None = None
    casts: PerStage = 0.0
    state: PerStage = cli_field(
        0.0,
        "What slices of one micro-batch leave to later ones (keys and values), a part of --activation-bytes.",
        metavar="BYTES",
        name="state_bytes",
        divided=0.0,
    )
    slice_state: PerStage = cli_field(
        0.0,
        "What each slice of a micro-batch leaves to the next one however short it is (a recurrent state).",
        metavar="BYTES",
        name="slice_state_bytes",
        divided=0.0,
    )
    state_gradients: PerStage | None = None

    def __post_init__(self) -> None:
        for cost in fields(self):
            if (value := getattr(self, cost.name)) is not None:
                refuse_negative(cost.name, value, "layers" if cost.name == "layers" else "bytes")


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a simulation. Times are in seconds (or any other single unit).

    Attributes:
        forward: time of a forward of one stage on one micro-batch; a doubled one lasts twice as long.
        backward: time of a backward of one stage on one micro-batch; a half one lasts half as long.
        input_gradient: the part of a split backward that makes the input gradient; None means half of
            ``backward``.
        weight_gradients: the other part; None means the rest of ``backward`` after ``input_gradient``, at
            least 0.
        attention: share of a forward's time, and of a backward's, that is causal attention: a slice's grows
            with the positions before it. A split backward has it in its input gradient.
        overhead: time that each op takes in addition, however small its part of a micro-batch is.
        all_to_all: the part of a forward's time in which its tokens travel to experts and back, and as much
            of the op that makes its input gradient. Ops that run at once (``with_pairs``) hide it.
        exchanges: number of all-to-alls of a forward, between equal parts of its compute.
        p2p: time of one message between two workers; a number, or ``p2p[sender][receiver]``.
        p2p_per_byte: additional time per byte of a message, in the same forms.
        message_bytes: bytes of a stage's output for one micro-batch, and of its gradient.
        skip_bytes: bytes of the values of skip connections; a number, or one per skip connection.
        link: number of messages that a link carries at once in each direction: one, or any
            (``infinite``), as in papers' formulas.
        ways: the way by which each message leaves its worker, ``ways[sender][receiver]``: links of one sender
            with the same number together carry one message at a time. None: each link is a way of its own.
        overlap: True if a message travels while its sender computes; otherwise the sender is busy with it.
        sync: time of the all-reduce of one stage's gradients; unused if there is only one copy.
        sync_crossings: the part of each stage's sync on ways that other stages' syncs use too: syncs in
            flight at the same time share these. None: nothing is shared.
        sync_mode: when gradients are synchronised (``end``, ``eager``, ``eager-opt``).
        sync_slowdown: share by which compute is slower during a gradient sync of its worker (0.1: an op takes
            10 % longer). The affected ops are those of a play without this cost.
        agreement: time of the workers' agreement on loss and gradient norm after all syncs; unused if
            asynchronous.
        ties: groups of stages that share weights, and seconds of the sum of these weights' gradients over all
            workers that hold one of them: ``(((0, 3), 0.1),)``. The sum follows all syncs of those workers
            and precedes the agreement.
        statistics: time of averaging one stage's running statistics over its copies, after the update.
        replicas: copies of the whole pipeline group (W); with more than one every stage has a sync.
        recompute: ``stage`` and ``layer`` add the work of one forward to each backward: ``stage`` as an op of
            its own before it, a recomputation, ``layer`` in the backward itself.
        recompute_ahead: True if ``stage`` does so, and workers recompute while they wait for gradients;
            otherwise that, too, is in the backward, as with torch's checkpoint. Schedules that have
            recomputations keep them.
        ops: costs of ops, in place of ``forward`` to ``weight_gradients``, ``recompute`` and the activations
            in ``memory``; with them devices may differ, and doubled ops have measured costs.
        memory: byte costs, or bytes of the stages after ``recompute``; None omits memory.
        relative: True if times are in forwards instead of seconds; None: if no time was given.

    Raises:
        ConfigError: a cost is negative or not a number.
    """

    forward: PerStage = cli_field(
        1.0, "Time of a forward of one micro-batch. Default 1.", metavar="SECONDS", divided=0.0
    )
    backward: PerStage = cli_field(2.0, "Time of a backward. Default 2.", metavar="SECONDS", divided=0.0)
    input_gradient: PerStage | None = cli_field(
        None,
        "Time of the input gradient of a split backward. Default half of --backward.",
        metavar="SECONDS",
        divided=0.0,
    )
    weight_gradients: PerStage | None = cli_field(
        None,
        "Time of its weight gradients. Default the rest of --backward.",
        metavar="SECONDS",
        name="weight_gradient",
        divided=0.0,
    )
    attention: PerStage = cli_field(
        0.0,
        "Share of a forward and of a backward that is attention, of which later slices have more. Default 0.",
        metavar="SHARE",
        divided=None,
    )
    overhead: PerStage = cli_field(
        0.0, "Time that each op takes in addition, however short its slice. Default 0.", metavar="SECONDS"
    )
    all_to_all: PerStage = 0.0
    exchanges: int = 2
    p2p: PerLink = cli_field(
        0.0, "Time of one message between two workers. Default 0.", float, metavar="SECONDS"
    )
    p2p_per_byte: PerLink = 0.0
    message_bytes: PerStage = 0.0
    skip_bytes: PerStage = 0.0
    link: Link | str = cli_field(
        "one-at-a-time",
        "one-at-a-time (the default): messages queue for a link, each way; infinite: no message waits.",
        Link,
        metavar="MODE",
    )
    ways: Sequence[Sequence[int]] | None = None
    overlap: bool = cli_field(
        True, "Whether a worker continues while its message travels. Default: yes.", bool
    )
    sync: PerStage = cli_field(
        0.0, "Time of summing gradients over copies. Default 0.", metavar="SECONDS", divided=0.0
    )
    sync_crossings: Crossings | None = None
    sync_mode: Sync | str = cli_field(
        Sync.EAGER_OPT,
        "When gradients are summed over copies. end: after all ops; eager: once they exist; eager-opt (the "
        "default): once they exist and the worker is idle.",
        Sync,
        metavar="MODE",
    )
    sync_slowdown: float = cli_field(
        0.0,
        "Share by which compute is slower while gradients of its worker are summed. Default 0.",
        float,
        metavar="SHARE",
    )
    agreement: float = cli_field(
        0.0,
        "Time of the workers' agreement on loss and gradient norm before the update. Default 0.",
        float,
        metavar="SECONDS",
    )
    ties: Ties = ()
    statistics: PerStage = 0.0
    replicas: int = cli_field(
        1, "W: copies of the pipeline group, whose gradients are summed. Default 1.", int
    )
    recompute: Recompute | str = cli_field(
        Recompute.NONE,
        "stage or layer save less and add a forward to each backward, stage as an op of its own before it; "
        "none is the default.",
        Recompute,
        metavar="MODE",
    )
    recompute_ahead: bool = True
    ops: OpCosts | None = None
    memory: ByteCosts | Sequence[StageBytes] | None = None
    relative: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync_mode", parse_mode(Sync, "sync_mode", self.sync_mode))
        object.__setattr__(self, "link", parse_mode(Link, "link", self.link))
        object.__setattr__(self, "recompute", parse_mode(Recompute, "recompute", self.recompute))
        for name in (
            "forward",
            "backward",
            "input_gradient",
            "weight_gradients",
            "overhead",
            "all_to_all",
            "sync",
            "agreement",
            "statistics",
        ):
            if (value := getattr(self, name)) is not None:
                refuse_negative(name, value)
        for _, seconds in self.sync_crossings or ():
            refuse_negative("sync_crossings", seconds)
        for _, seconds in self.ties:
            refuse_negative("ties", seconds)
        refuse_negative("sync_slowdown", self.sync_slowdown, "shares")
        refuse_negative("attention", self.attention, "shares")
        for share in [self.attention] if isinstance(self.attention, (int, float)) else self.attention:
            if share > 1:
                raise ConfigError(f"attention={share}: is a share of a forward; must be 1 or less")
        refuse_negative("message_bytes", self.message_bytes, "bytes")
        refuse_negative("skip_bytes", self.skip_bytes, "bytes")
        for name, links in (("p2p", self.p2p), ("p2p_per_byte", self.p2p_per_byte)):
            for row in [links] if isinstance(links, (int, float)) else links:
                refuse_negative(name, row)
        for name in ("replicas", "exchanges"):
            if (number := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={number}: must be 1 or more")

    @property
    def in_forwards(self) -> bool:
        """True if the unit of time is F, one forward: as ``relative`` says, or if a forward takes 1.

        >>> Costs(p2p=0.1).in_forwards, Costs(forward=0.02, p2p=0.1).in_forwards
        (True, False)
        """
        if self.relative is not None:
            return self.relative
        return self.ops is None and isinstance(self.forward, (int, float)) and self.forward == 1

    @property
    def time_unit(self) -> str:
        """Unit of times: ``s``, seconds, or ``F``, forwards."""
        return "F" if self.in_forwards else "s"

    @property
    def recomputes_ahead(self) -> bool:
        """True if stages are computed again by ops of their own."""
        return self.recompute is Recompute.STAGE and self.recompute_ahead

    def way(self, sender: int, receiver: int) -> int:
        """Number of the way by which messages leave a worker for another."""
        return receiver if self.ways is None else self.ways[sender][receiver]

    def of_ops(self, stages: int) -> OpCosts:
        """Costs of ops: those that were given, or those that follow from these numbers."""
        return self.ops or stage_ops(self, stages)


def stage_bytes(
    costs: ByteCosts | Sequence[StageBytes], recompute: Recompute, stages: int
) -> Sequence[StageBytes]:
    """Bytes of the stages after a kind of recomputation; ``StageBytes`` are already made for one."""
    if not isinstance(costs, ByteCosts):
        return costs

    def amounts(name: str, instead: PerStage = 0.0) -> list[float]:
        value = getattr(costs, name)
        return per_stage(name, instead if value is None else value, stages)

    stash = full = amounts("activations")
    inputs, layers, none = amounts("inputs"), amounts("layers"), [0.0] * stages
    recomputed = layer = none
    if recompute is Recompute.STAGE:  # the input exists already
        stash = inputs
        recomputed = amounts("beyond_inputs", [max(f - i, 0.0) for f, i in zip(full, inputs, strict=True)])
    elif recompute is Recompute.LAYER:
        stash = [i * n for i, n in zip(inputs, layers, strict=True)]
        layer = [max(f - s, 0.0) / n for f, s, n in zip(full, stash, layers, strict=True)]
        stash, layer = amounts("layer_inputs", stash), amounts("largest_layer", layer)
    tensors = {
        Saved.ACTIVATIONS: stash,
        Saved.RECOMPUTED: recomputed,
        Saved.WEIGHT_OPERANDS: amounts("kept_for_weights", full),
        Saved.STATE_GRADIENTS: amounts("state_gradients", costs.state),
    }
    if recompute.recomputes:
        tensors |= {Saved.STATE: amounts("state"), Saved.SLICE_STATE: amounts("slice_state")}
    weights = map(add, amounts("weights"), amounts("casts"))
    fixed = map(add, amounts("gradients", costs.weights), amounts("optimizer"))
    return [
        StageBytes(
            *state,
            tensors={saved: by_stage[stage] for saved, by_stage in tensors.items()},
            space={kind: layer[stage] for kind in OpKind if kind.again and kind.makes},
        )
        for stage, state in enumerate(zip(weights, fixed, strict=True))
    ]


def stage_ops(costs: Costs, stages: int) -> StageOps:
    """Costs of ops by stage, in proportion to the work and equal on all workers.

    Attention has no weights, so that a split backward has all of it in the input gradient.
    """
    forward = per_stage("forward", costs.forward, stages)
    backward = per_stage("backward", costs.backward, stages)
    shares = per_stage("attention", costs.attention, stages)
    attention = list(map(mul, shares, backward))
    inputs = [b / 2 + s / 2 for b, s in zip(backward, attention, strict=True)]
    if costs.input_gradient is not None:
        inputs = per_stage("input_gradient", costs.input_gradient, stages)
    weights = [max(0.0, b - i) for b, i in zip(backward, inputs, strict=True)]
    if costs.weight_gradients is not None:
        weights = per_stage("weight_gradients", costs.weight_gradients, stages)
    table = {
        OpKind.FORWARD: forward,
        OpKind.BACKWARD: backward,
        OpKind.INPUT_GRADIENT: inputs,
        OpKind.WEIGHT_GRADIENTS: weights,
        OpKind.RECOMPUTATION: forward,
    }
    overhead = per_stage("overhead", costs.overhead, stages)
    recompute = Recompute(costs.recompute)
    layers = []
    for stage, share in enumerate(shares):
        attends = {kind: share for kind in OpKind if kind.attends}
        if share:
            seconds = inputs[stage]
            attends[OpKind.INPUT_GRADIENT] = min(attention[stage] / seconds, 1.0) if seconds else 0.0
        lines = {kind: ((1, proportional(amounts[stage])),) for kind, amounts in table.items()}
        layers.append(LayerCost(lines, 0.0, attends, dict.fromkeys(OpKind, overhead[stage])))
    memory = None if costs.memory is None else stage_bytes(costs.memory, recompute, stages)
    return StageOps(layers, 1.0, recompute, memory)
