"""Passes whose forward makes no graph: they save the input, and run again for the backward.

Invariant: the second run has the input, weights, buffers and random draws of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.common.trees import each_tensor, mapped, versions
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.comparison import distance
from counterflow.verification.diagnosis.reruns import FirstOutput, rerun_error
from counterflow.verification.diagnosis.tolerances import ROW_FACTOR, square_root_tolerance

from ..messages.values import Value, flatten_value, takes_gradient, unflatten_value
from .buffers import Contents
from .input_guard import copied, same_tensors
from .interface import RunnableStage
from .passes import Output, PlainPass
from .wrapping_pass import WrappingPass

_NOTHING = nullcontext()

_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""torch's error for a gradient of a tensor without a graph."""


class RecomputeInput(NamedTuple):
    """Input of a stage's recomputation.

    Attributes:
        value: the stage's input.
        versions: versions of the input's tensors.
        buffers: contents of the stage's buffers.
        marked: for each output tensor, True if it was published as requiring a gradient.
        first: the output, if the second one is compared with it.
    """

    value: Value
    versions: list[int]
    buffers: Contents
    marked: list[bool]
    first: FirstOutput | None = None


class RecomputedPass(WrappingPass):
    """A unit whose forward saves its input alone; ``recompute`` makes the graph for the backward.

    Attributes:
        graph: the pass whose graph is made.
        source: what it is made from; None: the unit needs no backward, or the graph was made.
    """

    __slots__ = ("graph", "source")

    def __init__(self, graph: PlainPass) -> None:
        super().__init__(graph)
        self.graph = graph
        self.source: RecomputeInput | None = None

    @override
    def forward(self, inputs: list[Tensor], value: Value) -> Output:
        with without_graph(self.stage):
            return self._forward(inputs, value)

    @override
    def _forward(self, inputs: list[Tensor], value: Value) -> Output:
        del inputs
        stage = self.stage
        contents = stage.buffers.snapshot()
        same = same_tensors(value)
        saved, before = stage.entry.saved_copy(same), versions(same)
        output = self.graph.run_first(value)
        if stage.entry.changes:
            before = versions(saved)
        else:
            saved = same
        structure, tensors = self.head(output)
        first = stage.reruns.first_output(tensors, self.step)
        return structure, self.save(RecomputeInput(saved, before, contents, [], first), tensors)

    def save(self, source: RecomputeInput, outputs: list[Tensor]) -> list[Tensor]:
        """Save the input; return the outputs, marked as a graph would mark them.

        Args:
            source: the input.
            outputs: outputs without a graph.
        """
        stage, graph = self.stage, self.graph
        graph.inputs = each_tensor(source.value)
        if not (stage.trains or any(tensor.requires_grad for tensor in graph.inputs)):
            return outputs
        self.source = source
        if self.meter.counting:
            for tensor in graph.inputs:
                self.meter.count(tensor, graph.saved)
        outputs = [t.detach().requires_grad_(takes_gradient(t)) for t in outputs]
        source.marked.extend(t.requires_grad for t in outputs)
        return outputs

    @override
    def recompute(self) -> None:
        source, stage, graph = self.source, self.stage, self.graph
        if source is None:
            return
        place = f"stage {stage.stage}"
        if versions(source.value) != source.versions:
            raise ConfigError(
                f"the input of {place} was changed in place before the stage was computed again, "
                "which did not happen in the first forward; copy it before it is changed"
            )
        spare = None if stage.checked else mapped(copied, source.value)
        with stage.precision.computing(), stage.buffers.swapped_in(source.buffers):
            output = graph.run(source.value)
            _, tensors = self.head(output, rerun=True)
        del output
        if source.marked and len(tensors) != len(source.marked):
            raise rerun_error(place)
        if source.first is not None:
            source.first.compare(tensors, place)
        with stage.precision.computing() if not stage.checked else _NOTHING:
            graph.end_graph(tensors, spare)
        graph.outputs = [tensor for tensor, marked in zip(tensors, source.marked, strict=True) if marked]
        graded = [tensor.requires_grad for tensor in graph.outputs]
        graph.graded = None if all(graded) else graded
        self.source = None


@contextmanager
def without_graph(stage: RunnableStage) -> Iterator[None]:
    """Context of a forward whose graph is made by a recomputation.

    Raises:
        ConfigError: a layer makes gradients in the forward, for which it needs the graph.
    """
    with torch.no_grad(), stage.precision.computing():
        try:
            yield
        except RuntimeError as error:
            if _NO_GRAPH not in str(error):
                raise
            raise ConfigError(
                f"stage {stage.stage}, or the loss, makes gradients in its forward "
                "(torch.autograd.grad), and recompute='stage' runs that without a graph first; take "
                "recompute='none', or make the graph that it needs under torch.enable_grad()"
            ) from error


def forward_joined(
    passes: Sequence[RecomputedPass], values: Sequence[Tensor], run_alone: Callable[[int], Output]
) -> list[Output] | None:
    """Run several units as one; their graphs are made later, unit by unit.

    The first time the units run both ways, which shows whether outputs of samples depend on each other.

    Args:
        passes: passes of the units, of one stage and in one mini-batch.
        values: inputs of the units, each with its samples in the first dimension.
        run_alone: runs the forward of one unit, by its place.

    Returns:
        The outputs by unit; None if the units have to run one by one: a stage that draws random numbers, for
        instance, draws for each unit as its recomputation will.
    """
    first = passes[0]
    stage, last = first.stage, first.stage.last
    sizes = [unit.rows.stop - unit.rows.start for unit in passes]
    with without_graph(stage):
        contents = stage.buffers.snapshot()
        output = stage.forward_joined(torch.cat(list(values)), first.step, first.rows)
        if output is None:
            stage.joins = False
            return None
        try:
            structure, joined = flatten_value(output, f"stage {stage.stage}")
        except ConfigError:  # an object, which a loss function may accept
            if not last:
                raise
            stage.joins = False
            return None
        if any(not t.dim() or t.shape[0] % sum(sizes) for t in joined):  # not all are the samples'
            return None
        pieces = [t.split([t.shape[0] // sum(sizes) * size for size in sizes]) for t in joined]
        tensors = [[piece[index] for piece in pieces] for index in range(len(passes))]
        if stage.joins is None:
            outputs = [run_alone(index) for index in range(len(passes))]
            if last:
                tensors = [
                    unit_pass.head(unflatten_value(structure, its_tensors), rerun=True)[1]
                    for unit_pass, its_tensors in zip(passes, tensors, strict=True)
                ]
            same = last or all(of_unit == structure for of_unit, _ in outputs)
            stage.joins = same and all(map(_nearly_equal, tensors, [alone for _, alone in outputs]))
            return outputs
        return [
            _published(unit_pass, value, contents, structure, its_tensors)
            for unit_pass, value, its_tensors in zip(passes, values, tensors, strict=True)
        ]


def _published(
    unit_pass: RecomputedPass, value: Tensor, contents: Contents, structure: Any, tensors: list[Tensor]
) -> Output:
    if unit_pass.stage.last:
        unit_pass.head(unflatten_value(structure, tensors))
    source = RecomputeInput(value, versions(value), contents, [])
    return structure, unit_pass.save(source, tensors)


def _nearly_equal(tensors: Sequence[Tensor], references: Sequence[Tensor]) -> bool:
    return all(
        bool(reference.isfinite().all())
        and distance(reference, tensor, skip_non_finite=False)
        <= square_root_tolerance(reference.dtype, ROW_FACTOR)
        for tensor, reference in zip(tensors, references, strict=True)
    )
