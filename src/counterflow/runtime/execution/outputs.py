"""What becomes of a stage's output: it goes to the next stage, or the loss is made of it.

Invariant: it runs no layer of a stage but the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from ..dtensors import whole
from ..messages.values import Unit, Value, take_apart
from ..mini_batch.batch import Batch
from ..mini_batch.losses import Found, LossFunction, divisor_of, elements_in
from ..mini_batch.samples import Dims, cut, refuse_whole_entries
from ..stages.graph_check import check_graph
from ..stages.randomness import SampleRows
from ..stages.recomputation import mapped
from ..stages.split_backward import Joints
from ..stages.stage import StageCopy
from .meters import SavedBytes
from .skips import Output, apart
from .stash import tensors_in


class Outputs:
    """One worker's.

    Args:
        schedule: what is run.
        loss_function: gives the loss of the last layer's output and target; None: the output is the loss.
        saved: counts what is saved for backward.
    """

    def __init__(self, schedule: Schedule, loss_function: LossFunction | None, saved: SavedBytes) -> None:
        self._loss_function = loss_function
        self._scheme, self._synchronous = schedule.scheme, schedule.synchronous
        self._saved = saved

    def apart(self, copy: StageCopy, output: Any) -> Output:
        """What a stage that is not the last gives for a unit; None: it has no samples."""
        place, skips = f"stage {copy.stage}", copy.skips
        if skips is None or not skips.gives:
            return take_apart(output, place)
        return apart(skips, output, place)

    def handed_on(self, tensors: list[Tensor]) -> list[Tensor]:
        """What a stage gives, and copies of what its weights and buffers are: these change in place."""
        saved = self._saved
        if not any(map(saved.is_constant, tensors)):
            return tensors
        return [
            t.detach().clone().requires_grad_(t.requires_grad) if saved.is_constant(t) else t for t in tensors
        ]

    def check(
        self,
        copy: StageCopy,
        batch: Batch,
        value: Value,
        unit: Unit,
        graph: tuple[Sequence[Tensor], Sequence[Tensor], Joints | None],
    ) -> None:
        """Look at a stage's first graph.

        Args:
            copy: the stage's.
            batch: its mini-batch.
            value: a copy of what the stage ran on, on which it may run once more.
            unit: of the mini-batch.
            graph: what went in, what was given, and where it is joined.
        """
        inputs, outputs, joints = graph

        def again() -> Sequence[Tensor]:
            if copy.replays is not None:
                copy.replays.hold = None
            with copy.buffers.as_then(copy.buffers.now()):
                output = copy.forward(value, batch.step, batch.rows[unit])
                return self.read(copy, batch, output, unit, again=True)[1]

        check_graph(copy, outputs, [*inputs, *tensors_in(batch.targets)], joints, again=again)

    def read(self, copy: StageCopy, batch: Batch, output: Any, unit: Unit, *, again: bool = False) -> Output:
        """A stage's output taken apart; after the last stage, the unit's share of the loss."""
        if not copy.last:
            return self.apart(copy, output)
        if batch.outputs is not None and not again:
            batch.outputs[unit] = mapped(_kept, output)
        if not batch.has_loss:
            return None, []
        rows = batch.rows[unit]
        samples = rows.stop - rows.start
        size, check = samples, None if again else batch.check
        if self._loss_function is not None:
            assert batch.targets is not None
            target = part(batch.targets[unit.micro_batch], unit, batch, batch.target_dims)
            if check is not None:
                check.begin(copy, self._loss_function, output, target, samples)
            size = elements_in(output)
            output = self._loss(copy, batch, output, target, rows)
        found = copy.means.read(output, samples)
        batch.losses.note_graph(found.loss, again=again)
        if found.weight is not None and not self._synchronous:
            if samples < batch.total:
                raise ConfigError(
                    f"{self._scheme} updates weights before the LossSum of all micro-batches is "
                    "known; return the mean loss of each, or take a synchronous scheme"
                )
            loss, weight = found.loss, found.weight
            found = Found(loss / weight, None, {name: x / weight for name, x in found.metrics.items()})
        divisor = batch.divisor or divisor_of(batch.total, flushes=self._synchronous)
        entry = found.entered(unit, samples, divisor, size)
        if not again:
            batch.losses.entries.append(entry)
        if check is not None and check.end(entry):
            batch.check = None
        return None, [found.loss * entry.by]

    def _loss(self, copy: StageCopy, batch: Batch, output: Any, target: Any, rows: SampleRows) -> Any:
        """What the loss function returns.

        Raises:
            ConfigError: it fails, and on targets that are as many as the mini-batch's samples.
        """
        assert self._loss_function is not None
        try:
            return copy.loss((self._loss_function, output, target), batch.step, rows)
        except Exception as error:
            samples = rows.stop - rows.start
            refuse_whole_entries(error, target, batch.target_dims, samples, sum(batch.samples))
            raise


def part(tree: Any, unit: Unit, batch: Batch, dims: Dims) -> Any:
    """A unit's samples of its micro-batch."""
    if unit.parts == 1:
        return tree
    return cut(tree, unit.rows(batch.samples[unit.micro_batch]), dims)


def _kept(tensor: Tensor) -> Tensor:
    """Its content as it is now: the user's loss, or an update, may change it."""
    return whole(tensor.detach()).clone()
