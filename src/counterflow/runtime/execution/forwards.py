"""Runs the forwards of a worker's stages.

Invariant: what a forward leaves for its backward is in its stash; ``outputs.py`` takes apart what it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.trees import each_tensor, versions
from counterflow.errors import ConfigError
from counterflow.program.actions import Compute
from counterflow.schedule.modes import Recompute

from ..messages.arrivals import NONE
from ..messages.values import Unit, ValueLayout, put_together, take_apart, takes_gradient
from ..mini_batch.added_check import AddedCheck
from ..mini_batch.batch import Batch
from ..mini_batch.feed import Feed
from ..stages.joints import Joints
from ..stages.recomputation import copied, mapped, same_tensors
from ..stages.skips import Carried
from ..transport.base import Lost, TimedOut
from .in_flight import NOTHING
from .meters import Kept
from .outputs import part
from .skips import Came, Output, Parts
from .stash import Again, ForwardInput, Stash
from .tasks import RunOp, Tools

_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""torch's word for a gradient of what has no graph."""


class RunForward(RunOp):
    """A forward."""

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action, tools, period_offset)
        self.ends_losses = False
        """Whether the losses of the mini-batch are all there after it."""
        self._messages = self._in_flight.messages
        self._sliced = self.op.parts > 1
        by_stage = self.copy.recompute is Recompute.STAGE
        self._plain = self.copy.precision.plain and not by_stage and not self._sliced
        """Whether its units' forwards run in nothing but the context of a step."""

    def _take(self, batch: Batch) -> list[ForwardInput]:
        """The op's inputs by unit, as leaves."""
        rows = list(map(batch.rows.__getitem__, self.units))
        leaf = _leaf if self.copy.entry.changes is False else copied  # another stage may need it as it is
        if self.source is None:
            assert batch.inputs is not None
            found = [
                ForwardInput(unit, each_tensor(value), value, NONE, its)
                for unit, its in zip(self.units, rows, strict=True)
                for value in (_first_input(unit, batch, batch.inputs),)
            ]
            for unit in self.units:
                if unit.part == unit.parts - 1:
                    batch.inputs.used(unit.micro_batch)
        else:
            taken = self.source.take(self.units, leaf, as_leaves=batch.training)
            found = [
                ForwardInput(unit, tensors, put_together(structure, tensors), buffers, its)
                for unit, (structure, tensors, buffers), its in zip(self.units, taken, rows, strict=True)
            ]
        if self.skips.takes:
            found = list(map(_with_skips, found, self.skips.take(batch, leaf)))
        return found

    def _compute(self, batch: Batch, taken: Sequence[ForwardInput]) -> Sequence[Output]:
        """The op's outputs by unit, taken apart."""
        if self._plain:
            return [self._forward(batch, each) for each in taken]
        return self._in_context(batch, taken)

    def _leave(self, batch: Batch, taken: Sequence[ForwardInput], made: Sequence[Output]) -> None:
        """Lay ready for later stages, or the next slice, what was made."""
        del taken
        if self._sliced and batch.training:
            for unit, output in zip(self.units, made, strict=True):
                self._count_state(unit, output)
        pieces: Any = self.skips.give(batch, made) if self.skips.gives else made
        if self.target is not None:
            self.target.give(self.units, pieces)
            if batch.known is None:
                for unit, piece in zip(self.units, pieces, strict=True):
                    batch.learnt[self.stage, unit.shape] = ValueLayout.of(*piece)
        elif self.ends_losses:
            for check in batch.checks:
                check.finish()
            batch.losses.ask()

    def _in_context(self, batch: Batch, given: Sequence[ForwardInput]) -> Sequence[Output]:
        copy = self.copy
        if self._sliced and batch.training:
            for each in given:
                copy.look_at_slice(each.value, batch.step, each.rows)
        without_graph = batch.training and copy.recompute is Recompute.STAGE
        with torch.no_grad() if without_graph else NOTHING, copy.precision.computing():
            try:
                if without_graph and len(given) > 1 and copy.joins is not False:
                    found = self._forward_together(batch, given)
                    if found is not None:
                        return found
                return [self._forward(batch, each) for each in given]
            except RuntimeError as error:
                if without_graph and _NO_GRAPH in str(error):
                    raise ConfigError(
                        f"stage {self.stage}, or the loss, makes gradients in its forward "
                        "(torch.autograd.grad), and recompute='stage' runs that without a graph first; take "
                        "recompute='none', or make the graph that it needs under torch.enable_grad()"
                    ) from error
                raise

    def _count_state(self, unit: Unit, output: Output) -> None:
        """Count what a slice leaves to the next one, among whose inputs is what the one before left."""
        stashes, saved = self._in_flight.stashes, self._in_flight.saved
        if unit.part:
            saved.release(stashes[self.stage, unit._replace(part=unit.part - 1)].left)
        skips, (parts, tensors) = self.copy.skips, output
        if skips is not None and skips.carries and unit.part < unit.parts - 1:
            assert isinstance(parts, Parts)
            _, count = parts.each[-1]
            self._in_flight.hold(tensors[len(tensors) - count :], stashes[self.stage, unit].left)

    def _forward(self, batch: Batch, given: ForwardInput, *, checked: bool = False) -> Output:
        """One unit's forward; gives what later stages take. ``checked``: what layers add is looked at."""
        copy, rows = self.copy, given.rows
        if rows.start == rows.stop:
            return self._without_samples(batch, given)
        if batch.guarded:
            return self._forward_guarded(batch, given)
        if batch.added_check is not None and not checked and copy.adding.adds is not False:
            return self._checked(batch.added_check, batch, given)
        if not batch.training:
            found, tensors = self._read(batch, copy.forward(given.value, batch.step, rows), given.unit)
            self._messages.give_back(given.buffers)
            return found, self._outputs.handed_on(tensors)
        if copy.recompute is Recompute.STAGE:
            return self._forward_to_recompute(batch, given)
        held: list[Kept] = []
        inputs = given.tensors
        if copy.replays is not None:
            copy.replays.hold = self._in_flight.saved.holds(held)
        spare = None if copy.checked else mapped(copied, given.value)
        joints: Joints | None = None
        if self.splits:
            with copy.joining() as joints:
                output = copy.forward(given.value, batch.step, rows)
        else:
            output = copy.forward(given.value, batch.step, rows)
        found, tensors = self._read(batch, output, given.unit)
        if self._in_flight.saved.counting or joints is not None:
            self._in_flight.graph_made(inputs, tensors, held, joints=joints)
        if not copy.checked:
            self._outputs.check(copy, batch, spare, given.unit, (inputs, tensors, joints))
        stash = Stash(inputs, tensors, (), given.buffers, held, None, given.by_skips, joints)
        if self._sliced and copy.last:
            stash.loss = tensors[0].detach()
        self._in_flight.over.append(stash)
        self._in_flight.stashes[self.stage, given.unit] = stash
        return found, self._outputs.handed_on(tensors)

    def _forward_guarded(self, batch: Batch, given: ForwardInput) -> Output:
        """One unit's forward, skipped if a layer fails, or failed in an earlier stage."""
        value = given.value.value if type(given.value) is Carried else given.value
        if value is None:
            return self._without_samples(batch, given)
        try:
            output = self.copy.forward(given.value, batch.step, given.rows)
        except (Lost, TimedOut):
            raise
        except Exception:  # it is the outcome of the check for which the unit runs
            return self._without_samples(batch, given)
        structure, tensors = self._read(batch, output, given.unit)
        self._messages.give_back(given.buffers)
        return structure, self._outputs.handed_on(tensors)

    def _checked(self, check: AddedCheck, batch: Batch, given: ForwardInput) -> Output:
        """One unit's forward, and the check of what its layers add to the loss."""
        value = mapped(copied, given.value)
        output = self._forward(batch, given, checked=True)
        if self.copy.adding.adds:
            check.look(self.copy, value, batch.step, given.rows)
        return output

    def _read(self, batch: Batch, output: Any, unit: Unit) -> Output:
        """A stage's output taken apart; what it saves once in a mini-batch is on its way."""
        if self.skips.gives:
            self.skips.give_once(batch, unit, output and output.skips)
        return self._outputs.read(self.copy, batch, output, unit)

    def _without_samples(self, batch: Batch, given: ForwardInput) -> Output:
        """Skip a unit without samples: it passes on None and receives no gradient."""
        self._messages.give_back(given.buffers)
        if batch.training:
            self._in_flight.stashes[self.stage, given.unit] = Stash([], [], (), (), [])
        if self.skips.gives:
            self.skips.give_once(batch, given.unit, None)
        return self._outputs.apart(self.copy, None, given.unit)

    def _forward_to_recompute(self, batch: Batch, given: ForwardInput) -> Output:
        """Run a forward without a graph, and save the input for recomputation."""
        copy, contents = self.copy, self.copy.buffers.now()
        same = same_tensors(given.value)
        kept, before = copy.entry.kept(same), versions(same)
        output = copy.forward(given.value, batch.step, given.rows)
        if copy.entry.changes:
            before = versions(kept)
        else:
            kept = same
        found, tensors = self._read(batch, output, given.unit)
        again = Again(kept, before, contents, [], copy.first_runs.of(tensors, batch.step))
        return found, self._stashed(given, again, tensors)

    def _stashed(self, given: ForwardInput, again: Again, tensors: list[Tensor]) -> list[Tensor]:
        """Keep what a stage is computed again from; its outputs, marked as they would be with a graph."""
        stash = Stash(each_tensor(again.value), [], (), given.buffers, [], None, given.by_skips)
        if self._sliced and self.copy.last:
            stash.loss = tensors[0].detach()
        if self.copy.trains or any(t.requires_grad for t in stash.inputs):
            stash.edges, stash.again = None, again
            self._in_flight.hold(stash.inputs, stash.held)
            tensors = [t.detach().requires_grad_(takes_gradient(t)) for t in tensors]
            again.marked.extend(t.requires_grad for t in tensors)
        self._in_flight.stashes[self.stage, given.unit] = stash
        return self._outputs.handed_on(tensors)

    def _forward_together(self, batch: Batch, given: Sequence[ForwardInput]) -> list[Output] | None:
        """A doubled forward whose graph is made later, unit by unit: all units in one run.

        None where they have to run one by one: a stage that draws, say, draws for each as it will again. The
        first time they run both ways, to see whether the samples' outputs depend on each other.
        """
        copy, last = self.copy, self.copy.last
        sizes = [each.rows.stop - each.rows.start for each in given]
        if not _joins([each.value for each in given], sizes, batch):
            return None
        contents = copy.buffers.now()
        output = copy.forward_joined(torch.cat([each.value for each in given]), batch.step, given[0].rows)
        if output is None:
            copy.joins = False
            return None
        try:
            structure, whole = take_apart(output, f"stage {self.stage}")
        except ConfigError:  # an object, which a loss function may take
            if not last:
                raise
            copy.joins = False
            return None
        if any(not t.dim() or t.shape[0] % sum(sizes) for t in whole):  # not all are its samples'
            return None
        pieces = [t.split([t.shape[0] // sum(sizes) * size for size in sizes]) for t in whole]
        joined = [[piece[index] for piece in pieces] for index in range(len(given))]
        if copy.joins is None:
            apart = [self._forward(batch, each) for each in given]
            if last:
                values = [put_together(structure, tensors) for tensors in joined]
                joined = [
                    self._outputs.read(copy, batch, value, each.unit, again=True)[1]
                    for each, value in zip(given, values, strict=True)
                ]
            alike = last or all(found == structure for found, _ in apart)
            copy.joins = alike and all(map(_alike, joined, [tensors for _, tensors in apart]))
            return apart
        outputs: list[Output] = []
        for each, tensors in zip(given, joined, strict=True):
            if last:
                self._outputs.read(copy, batch, put_together(structure, tensors), each.unit)
            again = Again(each.value, versions(each.value), contents, [])
            outputs.append((structure, self._stashed(each, again, tensors)))
        return outputs


def _first_input(unit: Unit, batch: Batch, inputs: Feed) -> Any:
    own = part(inputs[unit.micro_batch], unit, batch, of_targets=False)
    if isinstance(own, Tensor):
        return own
    return pytree.tree_map(lambda leaf: leaf, own)  # a layer may take things out of its dicts


def _with_skips(given: ForwardInput, came: Came) -> ForwardInput:
    """What a forward runs on with what came by skips."""
    value, held = given.value if type(given.value) is Carried else (given.value, {})
    return given._replace(
        tensors=[*given.tensors, *came.tensors],
        value=Carried(value, {**held, **came.skips}),
        buffers=[*given.buffers, *came.buffers],
        by_skips=came.gradients,
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _joins(values: Sequence[Any], sizes: Sequence[int], batch: Batch) -> bool:
    """Whether values of several units are one of all their samples: lone tensors with these before all."""
    return batch.input_dims == 0 and all(
        size > 0 and isinstance(value, Tensor) and value.dim() > 0 and not value.shape[0] % size
        for value, size in zip(values, sizes, strict=True)
    )


def _alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are the same but for rounding."""
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not takes_gradient(one):
            if not torch.equal(one, other):
                return False
        elif one.numel():
            error = 8 * torch.finfo(one.dtype).eps ** 0.5
            if not bool((one - other).abs().max() <= error * other.abs().max()):  # nor is what is not finite
                return False
    return True
