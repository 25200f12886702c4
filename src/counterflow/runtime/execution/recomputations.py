"""Runs the recomputations of a worker's stages: forwards again, with the graph that a backward goes through.

A recomputation takes nothing of another stage. So its worker runs it while the gradient that the backward
takes is made and sent.

Invariant: a forward that runs again has the input, weights, buffers and random draws of the first one.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from counterflow.common.trees import versions
from counterflow.errors import ConfigError
from counterflow.program.actions import Compute

from ..mini_batch.batch import Batch
from ..stages.recomputation import copied, mapped, other_values, refuse_other
from .in_flight import NOTHING
from .stash import Again, Stash
from .tasks import RunOp, Tools


class RunRecomputation(RunOp):
    """A recomputation of a stage for one unit, whose forward saved only its input."""

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action, tools, period_offset)
        (self._unit,) = self.units

    def _take(self, batch: Batch) -> Stash:
        """What its forward left, which the backward takes too."""
        del batch
        return self._in_flight.stashes[self.stage, self._unit]

    def _compute(self, batch: Batch, taken: Stash) -> list[Tensor]:
        """The outputs that need a gradient, with their graph; none of a unit that needs no backward."""
        again = taken.again
        return [] if again is None else self._outputs_again(batch, taken, again)

    def _leave(self, batch: Batch, taken: Stash, made: list[Tensor]) -> None:
        """Leave where the backward begins; outputs that it does not need are gone then."""
        del batch
        if taken.again is None:
            return
        graded = [tensor.requires_grad for tensor in made]
        taken.edges = [get_gradient_edge(t) for t in made if t.requires_grad]
        taken.graded = None if all(graded) else graded
        taken.again = None

    def _outputs_again(self, batch: Batch, stash: Stash, again: Again) -> list[Tensor]:
        """The outputs that were said to need a gradient."""
        copy, unit, splits = self.copy, self._unit, self.splits
        if versions(again.value) != again.versions:
            raise ConfigError(
                f"the input of stage {self.stage} was changed in place before the stage was computed again, "
                "which did not happen in the first forward; copy it before it is changed"
            )
        spare = None if copy.checked else mapped(copied, again.value)
        with (
            copy.precision.computing(),
            copy.buffers.as_then(again.buffers),
            copy.joining() if splits else NOTHING as stash.joints,
        ):
            output = copy.forward(again.value, batch.step, batch.rows[unit])
            _, tensors = self._outputs.read(copy, batch, output, unit, again=True)
        if again.marked and len(tensors) != len(again.marked):
            raise other_values(f"stage {self.stage}")
        if again.first is not None:
            refuse_other(tensors, again.first, f"stage {self.stage}")
        self._in_flight.graph_made(stash.inputs, tensors, stash.held, joints=stash.joints)
        if not copy.checked:
            with copy.precision.computing():
                self._outputs.check(copy, batch, spare, unit, (stash.inputs, tensors, stash.joints))
        return [tensor for tensor, was in zip(tensors, again.marked, strict=True) if was]
