"""Runs the forwards of a worker's stages.

Invariant: what a forward leaves for its backward is in its stash; what it gives is ``outputs.py``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute

from ..messages.arrivals import Taken
from ..messages.values import Unit, put_together, take_apart, takes_gradient
from ..mini_batch.batch import Batch
from ..mini_batch.feed import Feed
from ..stages.randomness import versions
from ..stages.recomputation import copied, mapped, same_tensors
from ..stages.skips import Carried
from ..stages.stage import StageCopy
from .in_flight import NOTHING, InFlight
from .meters import Kept
from .outputs import Outputs, part
from .skips import Came, Output
from .stash import Again, ForwardInput, Stash, tensors_in
from .tasks import Task

_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""torch's word for a gradient of what has no graph."""


class Forwards:
    """One worker's.

    Args:
        in_flight: what is in flight.
        outputs: what becomes of their outputs.
    """

    def __init__(self, in_flight: InFlight, outputs: Outputs) -> None:
        self._in_flight, self._outputs = in_flight, outputs
        self._transport, self._clock = in_flight.transport, in_flight.clock
        self._last_stage = in_flight.last_stage
        self._batches, self._handed, self._stashes, self._over = (
            in_flight.batches,
            in_flight.handed,
            in_flight.stashes,
            in_flight.over,
        )
        self._messages, self._skips = in_flight.messages, in_flight.skips

    def forward(self, task: Task) -> None:
        """Run a forward, and lay ready what it gives."""
        op, copy = task.op, task.copy
        assert op is not None
        assert copy is not None
        self._transport.stay_near()
        if self._over:
            self._in_flight.end_ops()
        batch = self._batches[task.slot]
        given = self._inputs(task, copy, batch)
        begin = self._clock.begin()
        if copy.versions is not None and batch.training:
            copy.versions.use(op.version + self._in_flight.period_offset)
        if not copy.precision.plain or (batch.training and copy.recompute is Recompute.STAGE):
            found = self._forward_in_context(task, copy, batch, given)
        else:
            found = [self._forward_unit(task, copy, batch, each) for each in given]
        self._clock.end(op, self._in_flight.period_offset, begin)
        self._transport.computed()
        if task.stage != self._last_stage:
            self._outputs.hand_on(task, batch, found)
        elif task.ends_losses:
            batch.losses.ask()

    def _forward_in_context(
        self, task: Task, copy: StageCopy, batch: Batch, given: Sequence[ForwardInput]
    ) -> Sequence[Output]:
        """The units' forwards with another precision, or without a graph where that is made later."""
        without_graph = batch.training and copy.recompute is Recompute.STAGE
        with torch.no_grad() if without_graph else NOTHING, copy.precision.computing():
            try:
                if without_graph and len(given) > 1 and copy.joins is not False:
                    found = self._forward_together(task, copy, batch, given)
                    if found is not None:
                        return found
                return [self._forward_unit(task, copy, batch, each) for each in given]
            except RuntimeError as error:
                if without_graph and _NO_GRAPH in str(error):
                    raise ConfigError(
                        f"stage {task.stage}, or the loss, makes gradients in its forward "
                        "(torch.autograd.grad), and recompute='stage' runs that without a graph first; take "
                        "recompute='none', or make the graph that it needs under torch.enable_grad()"
                    ) from error
                raise

    def _inputs(self, task: Task, copy: StageCopy, batch: Batch) -> list[ForwardInput]:
        """The op's inputs by unit, as leaves."""
        units = task.units
        rows = list(map(batch.rows.__getitem__, units))
        none: list[Tensor] = []
        if task.stage == 0:
            found = []
            assert batch.inputs is not None
            for unit, its in zip(units, rows, strict=True):
                value = self._first_input(unit, batch, batch.inputs)
                found.append(ForwardInput(unit, None, tensors_in(value), value, none, its))
            for unit in units:
                batch.inputs.used(unit.micro_batch)
            return found
        if task.number < 0:
            taken: list[Taken] = []
            leaf = _leaf if copy.entry.changes is False else copied  # the stage before may need it as it is
            for unit in units:
                structure, handed = self._handed.pop((task.stage, unit))
                taken.append((structure, [leaf(tensor) for tensor in handed], none))
        else:
            taken = self._messages.take(task.number, len(units), as_leaves=batch.training)
        found = [
            ForwardInput(unit, structure, tensors, put_together(structure, tensors), buffers, its)
            for unit, (structure, tensors, buffers), its in zip(units, taken, rows, strict=True)
        ]
        if task.takes:
            leaf = _leaf if copy.entry.changes is False else copied
            found = list(map(_with_skips, found, self._skips.take(task, batch, leaf)))
        return found

    def _first_input(self, unit: Unit, batch: Batch, inputs: Feed) -> Any:
        own = part(inputs[unit.micro_batch], unit, batch, batch.input_dims)
        if isinstance(own, Tensor):
            return own
        return pytree.tree_map(lambda leaf: leaf, own)  # a layer may take things out of its dicts

    def _forward_unit(self, task: Task, copy: StageCopy, batch: Batch, given: ForwardInput) -> Output:
        """One unit's forward; gives what later stages take."""
        unit, _, inputs, value, buffers, rows, by_skips = given
        if rows.start == rows.stop:
            return self._without_samples(task, batch, unit, buffers)
        held: list[Kept] = []
        if not batch.training:
            output = copy.forward(value, batch.step, rows)
            found, tensors = self._outputs.with_loss(task, batch, output, unit)
            self._messages.give_back(buffers)
            return found, self._outputs.handed_on(tensors)
        if copy.recompute is Recompute.STAGE:
            return self._forward_to_recompute(task, copy, batch, given)
        if copy.replays is not None:
            copy.replays.hold = self._in_flight.holds(held)
        spare = None if copy.checked else mapped(copied, value)
        with copy.joining() if task.splits else NOTHING as joints:
            output = copy.forward(value, batch.step, rows)
        found, tensors = self._outputs.with_loss(task, batch, output, unit)
        if self._in_flight.counting or joints is not None:
            self._in_flight.graph_made(inputs, tensors, held, joints=joints)
        if not copy.checked:
            self._outputs.check(task, batch, spare, unit, (inputs, tensors, joints))
        stash = Stash(inputs, tensors, (), buffers, held, None, by_skips, joints)
        self._over.append(stash)
        self._stashes[task.stage, unit] = stash
        return found, self._outputs.handed_on(tensors)

    def _without_samples(self, task: Task, batch: Batch, unit: Unit, buffers: Sequence[Tensor]) -> Output:
        """What has no samples runs as nothing: it hands on None and gets no gradient."""
        self._messages.give_back(buffers)
        if batch.training:
            self._stashes[task.stage, unit] = Stash([], [], (), (), [])
        return self._outputs.apart(task, batch, None, unit)

    def _forward_to_recompute(self, task: Task, copy: StageCopy, batch: Batch, given: ForwardInput) -> Output:
        """The same without a graph: the input is kept."""
        unit, value, rows = given.unit, given.value, given.rows
        contents = copy.buffers.now()
        same = same_tensors(value)
        kept, before = copy.entry.kept(same), versions(same)
        output = copy.forward(value, batch.step, rows)
        if copy.entry.changes:
            before = versions(kept)
        else:
            kept = same
        found, tensors = self._outputs.with_loss(task, batch, output, unit)
        again = Again(kept, before, contents, [], copy.first_runs.of(tensors, batch.step))
        return found, self._stashed(task, copy, given, again, tensors)

    def _stashed(
        self, task: Task, copy: StageCopy, given: ForwardInput, again: Again, tensors: list[Tensor]
    ) -> list[Tensor]:
        """Keep what a stage is computed again from; its outputs, marked as they would be with a graph."""
        inputs, held = tensors_in(again.value), list[Kept]()
        trained = copy.trains or any(t.requires_grad for t in inputs)
        if trained:
            self._in_flight.hold(inputs, held)
            tensors = [t.detach().requires_grad_(takes_gradient(t)) for t in tensors]
            again.marked.extend(t.requires_grad for t in tensors)
        self._stashes[task.stage, given.unit] = Stash(
            inputs,
            [],
            None if trained else (),
            given.buffers,
            held,
            again if trained else None,
            given.by_skips,
        )
        return self._outputs.handed_on(tensors)

    def _forward_together(
        self, task: Task, copy: StageCopy, batch: Batch, given: Sequence[ForwardInput]
    ) -> list[Output] | None:
        """A doubled forward whose graph is made later, unit by unit: all units in one run.

        None where they have to run one by one: a stage that draws, say, draws for each as it will again. The
        first time they run both ways, to see whether the samples' outputs depend on each other.
        """
        sizes = [each.rows.stop - each.rows.start for each in given]
        if not _joins([each.value for each in given], sizes, batch):
            return None
        contents = copy.buffers.now()
        output = copy.forward_joined(torch.cat([each.value for each in given]), batch.step, given[0].rows)
        if output is None:
            copy.joins = False
            return None
        try:
            structure, whole = take_apart(output, f"stage {task.stage}")
        except ConfigError:  # an object, which a loss function may take
            if task.stage != self._last_stage:
                raise
            copy.joins = False
            return None
        if any(not t.dim() or t.shape[0] % sum(sizes) for t in whole):  # not all are its samples'
            return None
        pieces = [t.split([t.shape[0] // sum(sizes) * size for size in sizes]) for t in whole]
        joined = [[piece[index] for piece in pieces] for index in range(len(given))]
        if copy.joins is None:
            apart = [self._forward_unit(task, copy, batch, each) for each in given]
            if task.stage == self._last_stage:
                values = [put_together(structure, tensors) for tensors in joined]
                joined = [
                    self._outputs.with_loss(task, batch, value, each.unit, again=True)[1]
                    for each, value in zip(given, values, strict=True)
                ]
            alike = task.stage == self._last_stage or all(found == structure for found, _ in apart)
            copy.joins = alike and all(map(_alike, joined, [tensors for _, tensors in apart]))
            return apart
        outputs: list[Output] = []
        for each, tensors in zip(given, joined, strict=True):
            if task.stage == self._last_stage:
                self._outputs.with_loss(task, batch, put_together(structure, tensors), each.unit)
            again = Again(each.value, versions(each.value), contents, [])
            outputs.append((structure, self._stashed(task, copy, each, again, tensors)))
        return outputs


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
