"""Forwards of a worker's stages.

Invariant: what a forward leaves for later ops of its units is in their passes (``stages/passes.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.skip import Carried
from counterflow.common.trees import each_tensor, mapped
from counterflow.errors import ConfigError
from counterflow.program.actions import Compute
from counterflow.schedule.modes import Recompute

from ..messages.arrivals import NONE
from ..messages.values import Unit, Value, ValueLayout, unflatten_value
from ..mini_batch.batch import Batch
from ..mini_batch.prefetcher import MicroBatchPrefetcher
from ..mini_batch.probes import diagnose_aux, diagnose_slices
from ..stages.input_guard import copied
from ..stages.passes import Head, StagePass
from ..stages.recomputed_pass import RecomputedPass, forward_joined
from ..stages.sample_rows import SampleRows
from .outputs import UnitHead, part
from .skips import Output, OutputLayout, SkipInputs
from .tasks import RunOp, Tools


class ForwardInput(NamedTuple):
    """Input of a forward for one unit.

    Attributes:
        unit: the unit.
        tensors: tensors of the input, as leaves.
        value: the input.
        buffers: receive buffers of the input.
        rows: samples of the unit.
        skip_gradients: number of tensors with a gradient by skip connection.
    """

    unit: Unit
    tensors: list[Tensor]
    value: Value
    buffers: Sequence[Tensor]
    rows: SampleRows
    skip_gradients: Sequence[int] = ()


class RunForward(RunOp):
    """A forward."""

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action, tools, period_offset)
        self.ends_losses = False
        """True if all losses of the mini-batch exist after it."""
        self._messages, self._shares = self.in_flight.messages, False
        self._sliced = self.op.parts > 1
        self._make_pass = self.local_stage.pass_maker(splits=self.splits, sliced=self._sliced)
        self._joins = self.local_stage.recompute is Recompute.STAGE and len(self.units) > 1
        self._head = self._outputs.boundary_head(self.local_stage)

    @override
    def receive(self, batch: Batch) -> list[ForwardInput]:
        all_rows = batch.rows
        leaf = (
            _leaf if self.local_stage.entry.changes is False else copied
        )  # another stage may need it as it is
        if self.source is None:
            assert batch.inputs is not None
            inputs = [
                ForwardInput(unit, each_tensor(value), value, NONE, all_rows[unit])
                for unit in self.units
                for value in (_first_input(unit, batch, batch.inputs),)
            ]
            for unit in self.units:
                if unit.part == unit.parts - 1:
                    batch.inputs.used(unit.micro_batch)
        else:
            received = self.source.receive(self.units, leaf, as_leaves=batch.training)
            inputs, self._shares = [], False
            for unit, (structure, tensors, buffers) in zip(self.units, received, strict=True):
                value = unflatten_value(structure, tensors)
                self._shares = self._shares or (structure is not None and structure.shares)
                inputs.append(ForwardInput(unit, tensors, value, buffers, all_rows[unit]))
        if self.skips.takes:
            inputs = list(map(_with_skips, inputs, self.skips.receive(batch, leaf)))
        return inputs

    @override
    def compute(self, batch: Batch, inputs: Sequence[ForwardInput]) -> Sequence[Output]:
        if self._joins and batch.training and self.local_stage.joins is not False:
            joined = self._forward_joined(batch, inputs)
            if joined is not None:
                return joined
        outputs = []
        diagnosed = batch.diagnoses.aux is not None or batch.diagnoses.slices is not None
        for unit_input in inputs:
            unit_pass = self._begin(batch, unit_input)
            if diagnosed:
                output = self._diagnosed_forward(batch, unit_input, unit_pass)
            else:
                output = unit_pass.forward(unit_input.tensors, unit_input.value)
            if self._shares and self.local_stage.entry.changes:
                raise ConfigError(
                    f"stage {self.stage} changes a tensor in place that it was given with another one in the "
                    "same memory (a view), which messages take apart: in one process both would change; "
                    "clone it in the layer before, or do not change it in place"
                )
            outputs.append(self._save(batch, unit_input, unit_pass, output))
        return outputs

    @override
    def publish(self, batch: Batch, inputs: Sequence[ForwardInput], result: Sequence[Output]) -> None:
        del inputs
        if self._sliced and batch.training:
            for unit, output in zip(self.units, result, strict=True):
                self._count_state(unit, output)
        pieces: Any = self.skips.send(batch, result) if self.skips.gives else result
        if self.target is not None:
            self.target.send(self.units, pieces)
            if batch.known is None:
                for unit, piece in zip(self.units, pieces, strict=True):
                    batch.learnt[self.stage, unit.shape] = ValueLayout.of(*piece)
        elif self.ends_losses:
            for diagnosis in batch.diagnoses.losses:
                diagnosis.finish()
            batch.losses.start_reading()

    def _begin(self, batch: Batch, inputs: ForwardInput) -> StagePass:
        local_stage, saved = self.local_stage, self.in_flight.saved
        head: Head | None = self._head
        if head is None or not local_stage.checked:
            head = UnitHead(self._outputs, local_stage, batch, inputs.unit, self.skips)
        if not batch.training:
            return local_stage.begin_evaluation(inputs.rows, batch.step, head, saved, guarded=batch.guarded)
        unit_pass = local_stage.begin(inputs.rows, batch.step, head, saved, self._make_pass)
        unit_pass.buffers, unit_pass.skip_gradients = inputs.buffers, inputs.skip_gradients
        return unit_pass

    def _diagnosed_forward(self, batch: Batch, inputs: ForwardInput, unit_pass: StagePass) -> Output:
        diagnoses, rows = batch.diagnoses, inputs.rows
        is_empty = rows.start == rows.stop
        if diagnoses.slices is not None and not is_empty:
            diagnose_slices(diagnoses.slices, self.local_stage, inputs.value, batch.step, rows)
        if (
            diagnoses.aux is None
            or self.local_stage.aux_losses.collects is False
            or batch.guarded
            or is_empty
        ):
            return unit_pass.forward(inputs.tensors, inputs.value)
        value = mapped(copied, inputs.value)
        output = unit_pass.forward(inputs.tensors, inputs.value)
        if self.local_stage.aux_losses.collects:
            diagnose_aux(diagnoses.aux, self.local_stage, value, batch.step, rows)
        return output

    def _save(self, batch: Batch, inputs: ForwardInput, unit_pass: StagePass, output: Output) -> Output:
        structure, tensors = output
        if batch.training:
            self.in_flight.passes[self.stage, inputs.unit] = unit_pass
            self.in_flight.end_later(unit_pass)
        else:
            self._messages.return_buffers(inputs.buffers)
        return structure, self.in_flight.saved.without_constants(tensors)

    def _forward_joined(self, batch: Batch, inputs: Sequence[ForwardInput]) -> list[Output] | None:
        # None: they have to run one by one
        sizes = [item.rows.stop - item.rows.start for item in inputs]
        values = [item.value for item in inputs]
        if not _can_join(values, sizes, batch):
            return None
        passes = [self._begin(batch, item) for item in inputs]
        outputs = forward_joined(
            [unit_pass for unit_pass in passes if isinstance(unit_pass, RecomputedPass)],
            values,
            lambda index: self._diagnosed_forward(batch, inputs[index], passes[index]),
        )
        if outputs is None:
            return None
        return [self._save(batch, *item) for item in zip(inputs, passes, outputs, strict=True)]

    def _count_state(self, unit: Unit, output: Output) -> None:
        passes = self.in_flight.passes
        if unit.part:  # it has the state of the slice before as input
            passes[self.stage, unit._replace(part=unit.part - 1)].release_state()
        skips, (parts, tensors) = self.local_stage.skips, output
        if skips is not None and skips.carries and unit.part < unit.parts - 1:
            assert isinstance(parts, OutputLayout)
            _, count = parts.pieces[-1]
            passes[self.stage, unit].count_state(tensors[len(tensors) - count :])


def _first_input(unit: Unit, batch: Batch, inputs: MicroBatchPrefetcher) -> Any:
    value = part(inputs[unit.micro_batch], unit, batch, of_targets=False)
    if isinstance(value, Tensor):
        return value
    return pytree.tree_map(lambda leaf: leaf, value)  # a layer may remove entries of its dicts


def _with_skips(inputs: ForwardInput, received: SkipInputs) -> ForwardInput:
    value, skips = inputs.value if type(inputs.value) is Carried else (inputs.value, {})
    return inputs._replace(
        tensors=[*inputs.tensors, *received.tensors],
        value=Carried(value, {**skips, **received.skips}),
        buffers=[*inputs.buffers, *received.buffers],
        skip_gradients=received.gradients,
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _can_join(values: Sequence[Any], sizes: Sequence[int], batch: Batch) -> bool:
    return batch.input_dims == 0 and all(
        size > 0 and isinstance(value, Tensor) and value.dim() > 0 and not value.shape[0] % size
        for value, size in zip(values, sizes, strict=True)
    )
