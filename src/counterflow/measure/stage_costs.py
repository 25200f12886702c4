"""Costs of a pipeline's stages on its workers: times and bytes of one micro-batch.

All workers measure their own stages at the same time, as they compute in a step, so workers that share a core
are measured while they share it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.runtime.execution.meters import SavedBytes
from counterflow.runtime.graphs import graph_of, pointers, saved_by
from counterflow.runtime.messages.values import Structure, Unit, put_together, take_apart, takes_gradient
from counterflow.runtime.mini_batch.losses import read_loss
from counterflow.runtime.mini_batch.samples import cut, moved, samples_in, split_points
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.features import Feature, Run, composed
from counterflow.runtime.stages.named_layer import NamedLayer
from counterflow.runtime.stages.randomness import SampleRows
from counterflow.runtime.stages.recomputation import InputGuard
from counterflow.runtime.stages.skips import Carried
from counterflow.runtime.stages.split_backward import SplitBackward
from counterflow.runtime.stages.stage import StageCopy
from counterflow.schedule.ir import SkipLink

from .sequences import Growth, at_lengths
from .workspace import NO_WORKSPACE, Workspace, measure_workspace


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one stage for one micro-batch.

    Attributes:
        forward_seconds: median seconds of a forward.
        backward_seconds: median seconds of a backward, without recomputation.
        activation_bytes: bytes that autograd saves for the backward, without recomputation.
        input_bytes: size of the stage's input, which is all that is saved with recomputation of the stage.
        layer_input_bytes: size of the inputs of all its layers, and of the loss's saved tensors: all that is
            saved with recomputation of layers.
        largest_layer_bytes: maximum bytes that a layer saves beyond its input, while layers are recomputed.
        layers: number of layers.
        weight_bytes: bytes of the parameters.
        cast_bytes: size of their casts to another precision, made once for all micro-batches in flight.
        kept_bytes: bytes that a split backward saves between input gradient and weight gradients.
        held_input_bytes: bytes of its input that the graph holds between them although no weight gradient
            needs it.
        input_gradient_seconds: median seconds of the first half of a split backward.
        weight_gradients_seconds: median seconds of the other half.
        beyond_input_bytes: bytes that autograd saves beyond the stage's input.
        output_bytes: bytes that the next stage takes, without skip connections.
        skips: values for later stages.
        workspace: memory of its ops while they run.
        attention_share: share of its seconds that is attention to earlier positions; 0 without slices, like
            the next two.
        fixed_share: share of them that a slice takes however short it is.
        state_bytes: size of what slices of a micro-batch leave to later ones.
    """

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    input_bytes: int
    layer_input_bytes: int
    largest_layer_bytes: int
    layers: int
    weight_bytes: int
    kept_bytes: int
    input_gradient_seconds: float
    weight_gradients_seconds: float
    beyond_input_bytes: int
    cast_bytes: int = 0
    held_input_bytes: int = 0
    output_bytes: int = 0
    skips: tuple[SkipCost, ...] = ()
    workspace: Workspace = NO_WORKSPACE
    attention_share: float = 0.0
    fixed_share: float = 0.0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SkipCost:
    """A value that a stage makes for later ones.

    Attributes:
        targets: the stages that use it.
        size_bytes: its size for one micro-batch.
        once: whether it is sent once per step.
    """

    targets: tuple[int, ...]
    size_bytes: int
    once: bool


_Described = tuple[Structure | None, list[tuple[torch.Size, torch.dtype, bool]]]


def measure_stages(pipeline: Pipeline, inputs: Any, targets: Any, *, repeats: int = 3) -> list[StageCost]:
    """The costs of all stages; all workers call it with a mini-batch as in ``step``.

    Call it between steps: weights, running statistics and random state are left unchanged.

    Args:
        pipeline: pipeline with the stages.
        inputs: see ``Pipeline.step``.
        targets: see ``Pipeline.step``.
        repeats: number of measurements.
    """
    count = pipeline.schedule.micro_batches
    samples = split_points(samples_in(inputs, pipeline.batching.input_dims), count)[1]
    # What one backward computes is measured: halves do not cost half of a whole to the byte. Of slices a
    # whole micro-batch is, for which each worker has room: they cost their shares, and see what is before.
    parts = pipeline.schedule.workload.sample_parts
    unit = Unit(0, 0, parts).rows(samples)
    rows = SampleRows(0, samples, unit.start, unit.stop)
    sliced = pipeline.schedule.workload.slices > 1
    whole, *shorter = (
        _Chain.of(pipeline, rows, share, *its)
        for share, *its in (
            at_lengths(inputs, targets, pipeline.batching) if sliced else [(1.0, inputs, targets)]
        )
    )
    costs = {
        stage: _measured(pipeline, copy, whole, shorter, rows=rows, repeats=repeats)
        for stage, copy in pipeline.stages.items()
    }
    by_rank = cast("list[dict[int, StageCost]]", pipeline.transport.gather_objects(costs))
    stages = range(pipeline.schedule.stages)
    found = [_median([row[stage] for row in by_rank if stage in row]) for stage in stages]
    scale = rows.samples / (rows.stop - rows.start)
    return [
        *(replace(cost, **one.costs(scale)) for cost, one in zip(found, whole.made, strict=False)),
        found[-1],
    ]


@dataclass(frozen=True, slots=True)
class _Chain:
    """What this worker's stages are run on, of a share of the sequence.

    Attributes:
        share: the share.
        taken: inputs by stage.
        target: target of the last stage, if it is here.
        made: outputs of all stages but the last.
    """

    share: float
    taken: dict[int, Any]
    target: Any
    made: list[_Made]

    @classmethod
    def of(cls, pipeline: Pipeline, rows: SampleRows, share: float, inputs: Any, targets: Any) -> _Chain:
        """Run stage after stage; all workers call it."""
        unit, last = slice(rows.start, rows.stop), pipeline.schedule.stages - 1
        taken: dict[int, Any] = {}
        made: list[_Made] = []
        for stage in range(last + 1):
            mine = None
            if stage in pipeline.stages:
                if stage == 0:
                    taken[stage] = moved(cut(inputs, unit, pipeline.batching.input_dims), pipeline.device)
                else:
                    taken[stage] = _input_of(stage, made, pipeline.device)
                if stage < last:
                    with torch.no_grad():
                        output = _run_of(pipeline, pipeline.stages[stage], rows)(taken[stage])
                    takes = any(tensor.requires_grad for tensor in _tensors(taken[stage]) if stage)
                    mine = _Made.of(output, pipeline.stages[stage], takes=takes)
            told = cast("list[_Made | None]", pipeline.transport.gather_objects(mine))
            made += [row for row in told if row is not None][:1]
        target = None
        if last in pipeline.stages:
            target = moved(cut(targets, unit, pipeline.batching.target_dims), pipeline.device)
        return cls(share, taken, target, made)


@dataclass(frozen=True, slots=True)
class _Made:
    """Outputs of a stage: to the next one, and by each skip connection past it.

    Attributes:
        following: the output, with additional values for the next stage.
        links: by target, the numbers of values for later stages.
        users: by number, the stages that use the value.
        sizes: by number, size of the value.
        output_bytes: size of the output alone.
    """

    following: _Described
    links: dict[SkipLink, _Described]
    users: dict[int, tuple[int, ...]]
    sizes: dict[int, int]
    output_bytes: int

    @classmethod
    def of(cls, output: Any, copy: StageCopy, *, takes: bool) -> _Made:
        """Outputs of a copy; ``takes`` says whether a gradient is computed for its inputs."""
        place = f"stage {copy.stage}"

        def described(value: Any, *, once: bool = False) -> _Described:
            structure, tensors = take_apart(value, place)
            trains = (copy.trains or takes) and not once
            return structure, [(t.shape, t.dtype, trains and takes_gradient(t)) for t in tensors]

        def size(value: Any) -> int:
            return sum(tensor.nbytes for tensor in take_apart(value, place)[1])

        skips = copy.skips
        if skips is None or type(output) is not Carried:
            return cls(described(output), {}, {}, {}, size(output))
        value, held = output
        users: dict[int, tuple[int, ...]] = {}
        for link, numbers in skips.gives:
            for number in numbers:
                users[number] = (*users.get(number, ()), link.target)
        for number in skips.next:
            users[number] = (copy.stage + 1, *users.get(number, ()))
        return cls(
            described(Carried(value, {n: held[n] for n in skips.next}) if skips.next else value),
            {link: described({n: held[n] for n in numbers}, once=link.once) for link, numbers in skips.gives},
            users,
            {number: size(held[number]) for number in users},
            size(value),
        )

    def costs(self, scale: float) -> dict[str, Any]:
        """Bytes for ``StageCost``."""
        once = {link.target for link in self.links if link.once}
        skips = [
            SkipCost(
                users,
                self.sizes[n] if once & {*users} else round(scale * self.sizes[n]),
                bool(once & {*users}),
            )
            for n, users in sorted(self.users.items())
        ]
        return {"output_bytes": round(scale * self.output_bytes), "skips": tuple(skips)}


def _input_of(stage: int, made: Sequence[_Made], device: torch.device) -> Any:
    """A stage's input of the real shapes; values do not affect costs."""
    value = _tensors_like(made[-1].following, device)
    by_skips: dict[int, Any] = {}
    for one in made:
        for link, described in one.links.items():
            if link.target == stage:
                by_skips |= _tensors_like(described, device)
    if not by_skips:
        return value
    before = value if type(value) is Carried else Carried(value, {})
    return Carried(before.value, before.skips | by_skips)


def _tensors_like(described: _Described, device: torch.device) -> Any:
    structure, tensors = described
    return put_together(
        structure,
        [
            torch.randn(shape, device=device).to(dtype).requires_grad_(grad)
            if dtype.is_floating_point or dtype.is_complex
            else torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, grad in tensors
        ],
    )


def _run_of(pipeline: Pipeline, copy: StageCopy, rows: SampleRows, *beside: Feature) -> Callable[[Any], Any]:
    """A stage's run as in a step, with everything saved; random state and buffers are restored."""
    run = composed(copy.layers, [InputGuard(), *beside, *copy.features])

    def apart(value: Any) -> Any:
        unchanged = copy.buffers.as_then(copy.buffers.now())
        with pipeline.streams.step(), copy.precision.computing(), unchanged:
            return run(value, pipeline.steps, rows)

    return apart


def _measured(
    pipeline: Pipeline,
    copy: StageCopy,
    whole: _Chain,
    shorter: Sequence[_Chain],
    *,
    rows: SampleRows,
    repeats: int,
) -> StageCost:
    value, target = whole.taken[copy.stage], whole.target if copy.last else None
    given = _tensors(value)
    sliced = pipeline.schedule.workload.slices > 1
    parameters = copy.parameters()
    constant = [*parameters, *(b for layer in copy.with_weights for b in layer.module.buffers())]
    if copy.stage == 0:
        constant += given  # the mini-batch belongs to the user
    if target is not None:
        constant += _tensors(target)

    def loss(output: Any, target: Any = target) -> list[Tensor]:
        if target is not None:
            assert pipeline.loss_function is not None
            with copy.precision.computing():  # autocast has its own precision for losses
                return [read_loss(pipeline.loss_function(output, target))[0]]
        return [t for t in take_apart(output, "a stage")[1] if t.requires_grad]

    def outputs_of() -> list[Tensor]:
        return loss(run(value))

    pipeline.weights.attach()
    run = _run_of(pipeline, copy, rows, copy.splitting)
    contexts = ExitStack()
    contexts.enter_context(copy.precision.step())
    try:
        cast_to: list[Tensor] = []
        if not copy.precision.plain:
            cast_to = _in_both([*constant, *given], outputs_of)
            constant += cast_to
        lengths = whole, *shorter
        turns = [
            [_seconds(pipeline, copy, chain, run, loss) for chain in lengths] for _ in range(repeats + 1)
        ][1:]
        state = _state_bytes(pipeline, copy, value, rows) if sliced else 0
        saved, beyond_input = (_saved(known, outputs_of) for known in (constant, [*constant, *given]))
        halves, kept = _split(pipeline, copy, given, outputs_of, repeats)
        workspace = measure_workspace(copy, pipeline.device, given, outputs_of, copy.precision.backward)
        each = _ByLayer(constant)
        output = _run_of(pipeline, copy, rows, each)(value)
        layer_inputs = each.inputs.current
        if target is not None:  # the loss is not computed again
            layer_inputs += _saved(constant, lambda: loss(output))
    finally:
        contexts.close()
        copy.precision.forget()
        pipeline.weights.clear()
        pipeline.weights.detach()
    scale = rows.samples / (rows.stop - rows.start)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given}
    passing = [tensor for tensor in given if tensor.requires_grad]
    growth = Growth.of(
        [chain.share for chain in lengths],
        [statistics.median(map(sum, one)) for one in zip(*turns, strict=True)],
        attends=state > 0,
    )
    return StageCost(
        forward_seconds=scale * statistics.median(turn[0][0] for turn in turns),
        backward_seconds=scale * statistics.median(turn[0][1] for turn in turns),
        activation_bytes=round(scale * saved),
        input_bytes=0 if copy.stage == 0 else round(scale * sum(held.values())),
        layer_input_bytes=round(scale * layer_inputs),
        largest_layer_bytes=round(scale * max(each.beyond, default=0)),
        layers=len(copy.layers),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        kept_bytes=round(scale * _held(constant, kept)),
        input_gradient_seconds=scale * statistics.median(first for first, _ in halves),
        weight_gradients_seconds=scale * statistics.median(second for _, second in halves),
        beyond_input_bytes=round(scale * beyond_input),
        cast_bytes=_held([], cast_to),
        held_input_bytes=round(scale * _held([*constant, *kept], passing)) if kept else 0,
        workspace=workspace.scaled(scale),
        attention_share=growth.attention,
        fixed_share=growth.fixed,
        state_bytes=round(scale * state),
    )


def _seconds(
    pipeline: Pipeline,
    copy: StageCopy,
    chain: _Chain,
    run: Callable[[Any], Any],
    loss: Callable[[Any, Any], list[Tensor]],
) -> tuple[float, float]:
    """Seconds of a forward of a stage, and of its backward."""
    start = _now(pipeline)
    outputs = loss(run(chain.taken[copy.stage]), chain.target if copy.last else None)
    middle = _now(pipeline)
    if outputs:
        with copy.precision.backward():
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return middle - start, _now(pipeline) - middle


def _state_bytes(pipeline: Pipeline, copy: StageCopy, value: Any, rows: SampleRows) -> int:
    """Bytes that the layers of a stage leave to a later slice, of a whole sequence as the first one."""
    if copy.skips is None or not copy.skips.carries:
        return 0
    with torch.no_grad():
        output = _run_of(pipeline, copy, rows._replace(slices=2))(value)
    left = _tensors([output.skips[number] for number in copy.skips.carries])
    return sum({id(tensor): tensor.nbytes for tensor in left}.values())


def _split(
    pipeline: Pipeline, copy: StageCopy, given: list[Tensor], run: Callable[[], list[Tensor]], repeats: int
) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Seconds of a split backward's halves, and the tensors saved between them."""
    seconds: list[tuple[float, float]] = []
    kept: list[Tensor] = []
    for turn in range(repeats + 2):  # the first graph shows the detach points of others
        with copy.splitting.joining() as joints:
            outputs = run()
        if not outputs:
            return [(0.0, 0.0)], []
        joints.learn(outputs, given)
        split = SplitBackward(copy.splitting, given, joints)
        start = _now(pipeline)
        split.input_gradient(outputs, [torch.ones_like(t) for t in outputs], look=turn == 1)
        middle = _now(pipeline)
        if turn == 1:
            kept = split.kept()
        again = _now(pipeline)
        split.weight_gradients()
        seconds.append((middle - start, _now(pipeline) - again))
        for tensor in given:
            tensor.grad = None
    return seconds[2:], kept


class _ByLayer(Feature):
    """Bytes that each layer saves beyond its input, and the bytes of all layers' inputs; no graph leads on.

    Args:
        constant: tensors that do not count.
    """

    def __init__(self, constant: list[Tensor]) -> None:
        self._constant = constant
        self.beyond: list[int] = []
        self.inputs = SavedBytes(constant)

    def around_layer(self, _: NamedLayer, run: Run, value: Any, step: int, rows: SampleRows) -> Any:
        given = _tensors(value)
        for tensor in given:
            self.inputs.hold(tensor, [])
        box: list[Any] = []

        def outputs() -> list[Tensor]:
            box.append(run(InputGuard().given(value), step, rows))
            return _tensors(box[0])

        self.beyond.append(_saved([*self._constant, *given], outputs))
        return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), box[0])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _saved(constant: list[Tensor], run: Callable[[], list[Tensor]]) -> int:
    count = SavedBytes(constant)
    count.note(graph_of(run()), [])
    return count.peak


def _in_both(constant: list[Tensor], run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Tensors that the graphs of two runs both save, in addition to constants: those made once for all
    runs.
    """
    graphs = [graph_of(run()) for _ in range(2)]
    saved = [
        {t.untyped_storage().data_ptr(): t for t in saved_by(graph) if t.untyped_storage().nbytes()}
        for graph in graphs
    ]
    return [saved[0][p] for p in saved[0].keys() & saved[1].keys() - pointers(constant)]


def _held(constant: list[Tensor], kept: list[Tensor]) -> int:
    count = SavedBytes(constant)
    for tensor in kept:
        count.hold(tensor, [])
    return count.peak


def _now(pipeline: Pipeline) -> float:
    with torch.cuda.device(pipeline.device) if pipeline.device.type == "cuda" else nullcontext():
        if pipeline.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _median(costs: list[StageCost]) -> StageCost:
    """The costs of a stage over its copies: bytes are equal, times differ."""
    times = (
        "forward_seconds",
        "backward_seconds",
        "input_gradient_seconds",
        "weight_gradients_seconds",
        "attention_share",
        "fixed_share",
    )
    return replace(
        costs[0], **{name: statistics.median(getattr(cost, name) for cost in costs) for name in times}
    )
