"""A stage with its input, run as passes beside the steps of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from counterflow.api.skip import Carried
from counterflow.common.laps import Reading, read_start
from counterflow.common.tensors.graphs import graph_of, pointer, pointers, saved_by, storage_bytes, variable
from counterflow.common.trees import tensors_in
from counterflow.planning.inputs.layer_parts import InputTensors
from counterflow.planning.inputs.profile import LayerProfile
from counterflow.runtime.messages.values import flatten_value
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.passes import PlainPass
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.saved_bytes import SavedBytes
from counterflow.runtime.stages.stage import NOT_COUNTED, LocalStage

from ..disturbance import thread_lap, undisturbed
from .allocations import allocated
from .chain import Chain, OutputHead


class StageSubject:
    """A stage that is measured, within ``LocalStage.isolated``.

    Args:
        pipeline: pipeline of the stage.
        copy: the stage.
        rows: samples of the unit.
        chain: inputs and target.
        loss: returns the tensors that a backward begins with, of the stage's output and the target.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        copy: LocalStage,
        rows: SampleRows,
        chain: Chain,
        loss: Callable[[Any, Any], list[Tensor]],
    ) -> None:
        self._pipeline, self.copy, self._rows, self._loss = pipeline, copy, rows, loss
        self.value = chain.taken[copy.stage]
        self.inputs = list(tensors_in(self.value))
        self._target = chain.target if copy.last else None

    def begin(self, meter: SavedBytes = NOT_COUNTED, *, splits: bool = False) -> PlainPass:
        """Begin a pass that saves its graph.

        Args:
            meter: count of the bytes that are saved for backwards.
            splits: True if the backward is two ops.
        """
        head = OutputHead(lambda output: self._loss(output, self._target))
        make = self.copy.graph_pass(splits=splits)
        return make(self.copy, self._rows, self._pipeline.steps, head, meter)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of a forward, and of its backward."""
        start = self._now()
        unit_pass = self.begin()
        _, outputs = unit_pass.forward(self.inputs, self.value)
        middle = self._now()
        if outputs:
            unit_pass.settle()
            unit_pass.backward([torch.ones_like(tensor) for tensor in outputs])
        return self._seconds(start, middle), self._seconds(middle, self._now())

    def saved_bytes(self, constant: Sequence[Tensor]) -> int:
        """Return the bytes that autograd saves for the backward.

        Args:
            constant: tensors that do not count.
        """
        meter = SavedBytes(constant)
        self.begin(meter).forward(self.inputs, self.value)
        return meter.peak

    def input_tensors(self) -> InputTensors:
        """Return the tensors of the input: those that are saved, that get a gradient, that are passed on."""
        outputs: list[Tensor] = []

        def heads(output: Any) -> list[Tensor]:
            outputs.extend(_tensors_of(output))
            return self._loss(output, self._target)

        make = self.copy.graph_pass(splits=False)
        unit_pass = make(self.copy, self._rows, self._pipeline.steps, OutputHead(heads), NOT_COUNTED)
        graph = graph_of(unit_pass.forward(self.inputs, self.value)[1])
        saved, tensors = pointers(saved_by(graph)), _tensors_of(self.value)
        numbers = {pointer(tensor): number for number, tensor in reversed([*enumerate(tensors)])}
        passed = [(numbers.get(pointer(tensor)), number) for number, tensor in enumerate(outputs)]
        first = self.copy.stage == 0
        total = sum(tensor.nbytes for tensor in tensors)
        return InputTensors(
            shares=tuple(0.0 if first or not total else tensor.nbytes / total for tensor in tensors),
            saved=() if first else tuple(n for n, tensor in enumerate(tensors) if pointer(tensor) in saved),
            gradients=tuple(n for n, tensor in enumerate(tensors) if tensor.requires_grad),
            passed=tuple((source, number) for source, number in passed if source is not None),
            saved_outputs=tuple(
                number for source, number in passed if source is None and pointer(outputs[number]) in saved
            ),
        )

    def split_seconds(self, repeats: int) -> tuple[list[tuple[float, float]], list[Tensor]]:
        """Return the seconds of a split backward's halves, and the tensors saved between them.

        Args:
            repeats: number of measurements.
        """
        seconds: list[tuple[float, float]] = []
        deferred: list[Tensor] = []
        for turn in range(repeats + 2):  # the first graph shows the detach points of others
            meter = SavedBytes([], counting=turn == 1)
            unit_pass = self.begin(meter, splits=True)
            _, outputs = unit_pass.forward(self.inputs, self.value)
            if not outputs:
                return [(0.0, 0.0)], []
            unit_pass.settle()
            gradients = [torch.ones_like(tensor) for tensor in outputs]
            start = self._now()
            unit_pass.prepare(defers=True)
            unit_pass.backward(gradients)
            middle = self._now()
            if turn == 1:
                deferred = unit_pass.deferred()
            again = self._now()
            unit_pass.weight_gradients()
            seconds.append((self._seconds(start, middle), self._seconds(again, self._now())))
            self.drop_gradients()
        return seconds[2:], deferred

    def drop_gradients(self) -> None:
        """Drop the gradients of the inputs."""
        for tensor in self.inputs:
            tensor.grad = None

    def _now(self) -> Reading:
        if self._pipeline.device.type == "cuda":
            torch.cuda.synchronize(self._pipeline.device)
        return read_start()

    def _seconds(self, begin: Reading, end: Reading) -> float:
        passed = thread_lap(begin, end)
        exact = self._pipeline.device.type == "cpu" and passed.waits == 0
        return undisturbed([passed], exact=exact)[0]


def _tensors_of(value: Any) -> list[Tensor]:
    return flatten_value(value.value if type(value) is Carried else value, "a layer")[1]


def with_workspace(
    profile: LayerProfile, subject: StageSubject, device: torch.device, scale: float
) -> LayerProfile:
    """A measured profile with the memory of its ops while they run.

    A forward and its backward are run once more, and then again with a split backward; all their allocations
    count (``allocations.py``): saved tensors, outputs, and scratch memory of kernels.

    Args:
        profile: the profile, for one micro-batch.
        subject: the stage, whose split backward has run before.
        device: device of the stage.
        scale: micro-batches for each sample of the subject.
    """
    unit_pass = subject.begin()
    with allocated(device) as forward:
        _, outputs = unit_pass.forward(subject.inputs, subject.value)
    if not outputs:
        zero = (0,)
        return replace(
            profile,
            forward_peak_bytes=(round(scale * forward.peak),),
            kept_output_bytes=zero,
            backward_peak_bytes=zero,
            input_gradient_peak_bytes=zero,
            weight_gradients_peak_bytes=zero,
            kept_gradient_bytes=zero,
            kept_output_gradient_bytes=zero,
            graph_nodes=1,
        )
    inputs = pointers(subject.inputs)
    size = sum(size for address, size in storage_bytes(outputs).items() if address not in inputs)
    gradients = [torch.ones_like(t) for t in outputs]
    with allocated(device, since=forward.current) as left:
        del outputs
        unit_pass.settle()
    with allocated(device) as backward:
        unit_pass.backward(gradients)
    subject.drop_gradients()
    split_pass = subject.begin(splits=True)
    _, outputs = split_pass.forward(subject.inputs, subject.value)
    gradients = [torch.ones_like(t) for t in outputs]
    ends = () if split_pass.detach_points is None else split_pass.detach_points.ends
    graph = list(graph_of(outputs, more=ends))
    leaves = (variable(node) for node in graph)
    graph_nodes = max(1, sum(leaf is None or pointer(leaf) not in inputs for leaf in leaves))
    saved = pointers(saved_by(graph)) | pointers(subject.inputs)
    del outputs, graph, leaves
    split_pass.settle()
    split_pass.prepare(defers=True)
    with allocated(device) as first:
        split_pass.backward(gradients)
    subject.drop_gradients()
    kept = storage_bytes(split_pass.deferred())
    with allocated(device) as second:
        split_pass.weight_gradients()
    created = {address: size for address, size in kept.items() if address not in saved}
    of_output = storage_bytes(gradients)
    return replace(
        profile,
        forward_peak_bytes=(round(scale * forward.peak),),
        kept_output_bytes=(round(scale * max(0, size - (forward.current - left.current))),),
        backward_peak_bytes=(round(scale * backward.peak),),
        input_gradient_peak_bytes=(round(scale * first.peak),),
        weight_gradients_peak_bytes=(round(scale * second.peak),),
        kept_gradient_bytes=(round(scale * sum(created.values())),),
        kept_output_gradient_bytes=(
            round(scale * sum(size for address, size in created.items() if address in of_output)),
        ),
        graph_nodes=graph_nodes,
    )
