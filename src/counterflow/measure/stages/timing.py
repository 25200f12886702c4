"""Measurement of a pipeline's stages on its workers: times and bytes of one micro-batch.

All workers measure their own stages at the same time, as they compute in a step, so workers that share a core
are measured while they share it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from counterflow.common.tensors.dtensors import parts
from counterflow.common.tensors.graphs import graph_of, pointer, pointers, saved_by, storage_bytes
from counterflow.common.trees import bytes_in, tensors_in
from counterflow.planning.inputs.profile import LayerProfile
from counterflow.runtime.messages.values import Unit, flatten_value
from counterflow.runtime.mini_batch.loss_output import total_loss
from counterflow.runtime.mini_batch.samples import samples_in, split_points
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.saved_bytes import LayerSavedBytes, SavedBytes, graph_bytes
from counterflow.runtime.stages.stage import NOT_COUNTED, LocalStage

from ..sequences import Growth, at_lengths
from .chain import Chain, output_of
from .stage_record import StageCost, median_of
from .subject import StageSubject, with_workspace


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
        Chain.of(pipeline, rows, share, *its)
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
    found = [median_of([row[stage] for row in by_rank if stage in row]) for stage in stages]
    scale = rows.samples / (rows.stop - rows.start)
    for stage, outputs in enumerate(whole.made):
        profile = replace(found[stage].profile, output_bytes=round(scale * outputs.output_bytes))
        found[stage] = replace(found[stage], profile=profile, skips=outputs.skips(stage, scale))
    return found


def _measured(
    pipeline: Pipeline,
    copy: LocalStage,
    whole: Chain,
    shorter: Sequence[Chain],
    *,
    rows: SampleRows,
    repeats: int,
) -> StageCost:
    value, target = whole.taken[copy.stage], whole.target if copy.last else None
    given = list(tensors_in(value))
    sliced = pipeline.schedule.workload.slices > 1
    parameters = copy.parameters()
    buffers = [buffer for layer in copy.with_weights for buffer in layer.module.buffers()]
    constant = [*parameters, *buffers]
    if copy.stage == 0:
        constant += given  # the mini-batch belongs to the user
    if target is not None:
        constant += tensors_in(target)

    def loss(output: Any, target: Any = target) -> list[Tensor]:
        if target is not None:
            assert pipeline.loss_function is not None
            with copy.precision.computing():  # autocast has its own precision for losses
                return [total_loss(pipeline.loss_function, output, target)]
        return [t for t in flatten_value(output, "a stage")[1] if t.requires_grad]

    subject = StageSubject(pipeline, copy, rows, whole, loss)

    def outputs_of() -> list[Tensor]:
        return subject.begin(NOT_COUNTED).forward(given, value)[1]

    scale = rows.samples / (rows.stop - rows.start)
    pipeline.weights.attach()
    contexts = ExitStack()
    contexts.enter_context(copy.precision.step())
    contexts.enter_context(copy.isolated(splits=True))
    try:
        cast_to: list[Tensor] = []
        if not copy.precision.plain:
            cast_to = _in_both([*constant, *given], outputs_of)
            constant += cast_to
        lengths = whole, *shorter
        turns = [
            [StageSubject(pipeline, copy, rows, chain, loss).seconds() for chain in lengths]
            for _ in range(repeats + 1)
        ][1:]
        state, slice_state = _state_bytes(pipeline, copy, lengths[:2], rows) if sliced else (0.0, 0.0)
        saved, beyond_input = (subject.saved_bytes(known) for known in (constant, [*constant, *given]))
        halves, kept = subject.split_seconds(repeats)
        growth = Growth.of(
            [chain.share for chain in lengths],
            [statistics.median(map(sum, one)) for one in zip(*turns, strict=True)],
            attends=state + slice_state > 0,
        )
        passing = [tensor for tensor in given if tensor.requires_grad]
        profile = LayerProfile(
            samples=(1.0,),
            forward_seconds=(scale * statistics.median(turn[0][0] for turn in turns),),
            backward_seconds=(scale * statistics.median(turn[0][1] for turn in turns),),
            input_gradient_seconds=(scale * statistics.median(first for first, _ in halves),),
            weight_gradients_seconds=(scale * statistics.median(second for _, second in halves),),
            saved_bytes=(round(scale * saved),),
            kept_bytes=(round(scale * _held(constant, kept)),),
            kept_input_bytes=(round(scale * saved) - round(scale * beyond_input),),
            held_input_bytes=(round(scale * _held([*constant, *kept], passing)) if kept else 0,),
            weights_bytes=sum(p.numel() * p.element_size() for p in parameters),
            buffer_bytes=bytes_in(buffers),
            noted_buffer_bytes=bytes_in([module.get_buffer(name) for module, name in copy.buffers.places]),
            output_bytes=0,
            cast_bytes=_held([], cast_to),
            attention_share=growth.attention,
            fixed_share=growth.fixed,
            state_bytes=round(scale * state),
            slice_state_bytes=round(scale * slice_state),
            input_tensors=subject.input_tensors(),
        )
        profile = with_workspace(profile, subject, pipeline.device, scale)
        by_layer = LayerSavedBytes(constant)
        output = output_of(copy, value, rows, pipeline.steps, by_layer)
        layer_inputs = by_layer.inputs.current
        if target is not None:  # the loss is not computed again
            layer_inputs += graph_bytes(constant, loss(output))
    finally:
        contexts.close()
        copy.precision.forget()
        pipeline.weights.clear()
        pipeline.weights.detach()
    input_bytes = 0 if copy.stage == 0 else round(scale * sum(storage_bytes(given).values()))
    layer_input_bytes = round(scale * layer_inputs)
    return StageCost(
        profile=replace(profile, kept_anyway_bytes=(max(0, layer_input_bytes - input_bytes),)),
        input_bytes=input_bytes,
        layer_input_bytes=layer_input_bytes,
        largest_layer_bytes=round(scale * max(by_layer.beyond, default=0)),
        layers=len(copy.layers),
    )


def _state_bytes(
    pipeline: Pipeline, copy: LocalStage, chains: Sequence[Chain], rows: SampleRows
) -> tuple[float, float]:
    """Bytes that the layers of a stage leave to a later slice: those that grow with it, of a whole sequence,
    and the others.

    Args:
        pipeline: the stage's.
        copy: the stage.
        chains: the whole sequence, and a shorter one, if there is one, that tells the two apart.
        rows: of the mini-batch.
    """
    if copy.skips is None or not copy.skips.carries:
        return 0.0, 0.0
    found = []
    for chain in chains:
        output = output_of(copy, chain.taken[copy.stage], rows._replace(slices=2), pipeline.steps)
        found.append(bytes_in([output.skips[number] for number in copy.skips.carries]))
    if len(found) == 1:
        return found[0], 0.0
    growing = (found[0] - found[1]) / (1.0 - chains[1].share)
    return growing, found[0] - growing


def _in_both(constant: list[Tensor], run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Tensors that the graphs of two runs both save, in addition to constants: those made once for all
    runs.
    """
    graphs = [graph_of(run()) for _ in range(2)]
    saved = [
        {pointer(t): t for tensor in saved_by(graph) for t in parts(tensor) if t.untyped_storage().nbytes()}
        for graph in graphs
    ]
    return [saved[0][p] for p in saved[0].keys() & saved[1].keys() - pointers(constant)]


def _held(constant: list[Tensor], kept: list[Tensor]) -> int:
    count = SavedBytes(constant)
    for tensor in kept:
        count.count(tensor, [])
    return count.peak
