"""Passes of the slices of a sequence, and the choice of a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ..messages.values import Value
from .interface import RunnableStage
from .passes import Head, Output, PlainPass, StagePass
from .recomputed_pass import RecomputedPass
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes, SavedStorage
from .wrapping_pass import WrappingPass

PassMaker = Callable[[RunnableStage, SampleRows, int, Head, SavedBytes], StagePass]
"""Function that makes the pass of a unit."""

GraphPassMaker = Callable[[RunnableStage, SampleRows, int, Head, SavedBytes], PlainPass]
"""Function that makes the pass of a unit that saves its graph."""


class SlicedPass(WrappingPass):
    """A slice of a micro-batch, which takes the state that the slice before left, and leaves one to the next.

    Attributes:
        loss: loss of the last stage, beside which the gradient of a state is received; None: another stage.
        state: storages of the state that are counted until the next slice has it among its inputs.
    """

    __slots__ = ("loss", "state")

    def __init__(self, unit_pass: PlainPass | RecomputedPass) -> None:
        super().__init__(unit_pass)
        self.loss: Tensor | None = None
        self.state: list[SavedStorage] = []

    @override
    def forward(self, inputs: list[Tensor], value: Value) -> Output:
        structure, tensors = self.unit_pass.forward(inputs, value)
        if self.stage.last:
            self.loss = tensors[0].detach()
        return structure, tensors

    @override
    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        if self.loss is not None and gradients:
            gradients = [torch.ones_like(self.loss), *gradients]
        self.unit_pass.backward(gradients)

    @override
    def count_state(self, tensors: Sequence[Tensor]) -> None:
        if self.meter.counting:
            for tensor in tensors:
                self.meter.count(tensor, self.state)

    @override
    def release_state(self) -> None:
        self.meter.release(self.state)


def pass_maker(graph_pass: GraphPassMaker, *, sliced: bool, recomputed: bool) -> PassMaker:
    """Choose the way in which an op's units run in training.

    Args:
        graph_pass: makes the pass of a unit that saves its graph.
        sliced: True if a unit is a slice of a sequence.
        recomputed: True if the forward saves only its input.

    Returns:
        A function that makes the pass of a unit, with the arguments of ``StagePass``.
    """
    if not (recomputed or sliced):
        return graph_pass

    def make(stage: RunnableStage, rows: SampleRows, step: int, head: Head, meter: SavedBytes) -> StagePass:
        graph = graph_pass(stage, rows, step, head, meter)
        unit_pass = RecomputedPass(graph) if recomputed else graph
        return SlicedPass(unit_pass) if sliced else unit_pass

    return make
