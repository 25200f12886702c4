"""Backwards, weight gradients and recomputations of a worker's stages.

Invariant: an op continues the pass that the forward of its unit began (``stages/passes.py``). A recomputation
receives nothing of another stage, so it runs while the gradient that its backward needs is made and sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from counterflow.program.actions import Compute

from ..messages.arrivals import NONE
from ..mini_batch.batch import Batch
from ..stages.passes import StagePass
from .tasks import RunOp, Tools


class _Gradients(NamedTuple):
    unit_pass: StagePass
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]


class PassTask(RunOp):
    """An op that continues the pass of a unit.

    Args:
        action: the action.
        tools: the worker's.
        period_offset: how many periods later than it says it is going to run.
    """

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action, tools, period_offset)
        (self._unit,) = self.units
        self._key = self.stage, self._unit


class GradientTask(PassTask):
    """An op that makes gradients of weights, or may."""

    ends_gradients = False
    """True if it is its list's last op that makes gradients of its stage's weights, in its period."""


class RunBackward(GradientTask):
    """A whole backward, or an input gradient."""

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action, tools, period_offset)
        self._defers = self.op.kind.rest is not None
        """True if the weights' gradients are another op's."""
        self.prepares_late = False
        """True if the graph is made when the gradients were received already, as in a pair of ops."""

    @override
    def receive(self, batch: Batch) -> _Gradients:
        del batch
        passes = self.in_flight.passes
        unit_pass = passes[self._key] if self._defers else passes.pop(self._key)
        if not self.prepares_late:
            unit_pass.prepare(defers=self._defers)  # before anything is waited for
        gradients, buffers = ([], NONE) if self.source is None else self.source.receive_gradients(self._unit)
        if self.skips.takes:
            more, more_buffers = self.skips.receive_gradients()
            gradients, buffers = [*gradients, *more], [*buffers, *more_buffers]
        return _Gradients(unit_pass, gradients, buffers)

    @override
    def compute(self, batch: Batch, inputs: _Gradients) -> None:
        del batch
        if self.prepares_late:
            inputs.unit_pass.prepare(defers=self._defers)
        inputs.unit_pass.backward(inputs.gradients)
        if self.ends_gradients:
            self.local_stage.sum_fsdp_gradients()

    @override
    def publish(self, batch: Batch, inputs: _Gradients, result: None) -> None:
        del batch, result
        unit_pass = inputs.unit_pass
        if self.target is not None or self.skips.gives:
            gradients = unit_pass.input_gradients()
            if self.skips.gives:
                gradients = self.skips.send_gradients(gradients, unit_pass.skip_gradients)
            if self.target is not None:
                self.target.send_gradients(self._unit, gradients)
        self.in_flight.end_later(unit_pass, [*inputs.buffers, *unit_pass.buffers])
        unit_pass.buffers = NONE
        unit_pass.release()


class RunWeightGradients(GradientTask):
    """Weight gradients that an input gradient has deferred."""

    @override
    def receive(self, batch: Batch) -> StagePass:
        del batch
        return self.in_flight.passes.pop(self._key)

    @override
    def compute(self, batch: Batch, inputs: StagePass) -> None:
        del batch
        inputs.weight_gradients()
        if self.ends_gradients:
            self.local_stage.sum_fsdp_gradients()

    @override
    def publish(self, batch: Batch, inputs: StagePass, result: None) -> None:
        del batch, result
        inputs.release()


class RunVerb(PassTask):
    """An op without a product, which is a verb of its unit's pass (``OpKind.verb``), as a recomputation."""

    @override
    def receive(self, batch: Batch) -> StagePass:
        del batch
        return self.in_flight.passes[self._key]

    @override
    def compute(self, batch: Batch, inputs: StagePass) -> None:
        del batch
        getattr(inputs, self.op.kind.verb)()

    @override
    def publish(self, batch: Batch, inputs: StagePass, result: None) -> None:
        del batch, result
        inputs.settle()
