"""Runs the backwards of a worker's stages, whole or in halves.

Invariant: a backward takes what its forward left in the stash, and what recomputes runs the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind

from ..dtensors import settled
from ..messages.values import Unit
from ..stages.randomness import versions
from ..stages.recomputation import Hold, copied, mapped, refuse_other
from ..stages.replays import LayerReplays
from ..stages.split_backward import SplitBackward, accumulate
from ..stages.stage import StageCopy
from .in_flight import NOTHING, InFlight
from .meters import Kept, SavedBytes
from .outputs import Outputs
from .stash import Stash, Waiting
from .tasks import Task


class Backwards:
    """One worker's.

    Args:
        in_flight: what is in flight.
        outputs: what becomes of the outputs of forwards that are run again.
    """

    def __init__(self, in_flight: InFlight, outputs: Outputs) -> None:
        self._in_flight, self._outputs = in_flight, outputs
        self._transport, self._clock, self._saved = in_flight.transport, in_flight.clock, in_flight.saved
        self._direct = in_flight.transport.device.type == "cpu"
        self._last_stage = in_flight.last_stage
        self._batches, self._gradients, self._stashes = (
            in_flight.batches,
            in_flight.gradients,
            in_flight.stashes,
        )
        self._waiting, self._over = in_flight.waiting, in_flight.over
        self._messages, self._skips = in_flight.messages, in_flight.skips

    def backward(self, task: Task) -> None:
        """Run a whole backward, or an input gradient."""
        op, copy = task.op, task.copy
        assert op is not None
        assert copy is not None
        self._transport.stay_near()
        if self._over:
            self._in_flight.end_ops()
        (unit,) = task.units
        stash = self._stashes.pop((task.stage, unit))
        edges: Sequence[Any] | None = stash.edges
        split: SplitBackward | None = None
        if task.splits and edges is not None:
            split = SplitBackward(copy.splitting, stash.inputs, stash.joints)
            split.look_ahead(edges)  # before anything is waited for
        gradients, reused = self._output_gradients(task)
        begin = self._clock.begin()
        if copy.versions is not None:
            copy.versions.use(op.version + self._in_flight.period_offset)
        if edges is None:
            edges, known = self._recomputed(task, copy, unit, stash, gradients)
            if task.splits:
                split = SplitBackward(copy.splitting, stash.inputs, stash.joints)
        else:
            edges, known = _with_gradients(edges, gradients)
        with self._around_backward(copy):
            self._differentiate(op, edges, known, split)
        self._clock.end(op, self._in_flight.period_offset, begin)
        self._transport.computed()
        if task.stage > 0:
            self._hand_back(task, unit, stash)
        if split is not None and op.kind is OpKind.INPUT_GRADIENT:
            self._waiting[task.stage, unit] = Waiting(split, [])
        stash.done = [*reused, *stash.reused]
        self._over.append(stash)
        if stash.held or self._in_flight.counting:
            self._count(task, unit, stash)

    def weight_gradients(self, task: Task) -> None:
        """Make what an input gradient left to be made."""
        op, copy = task.op, task.copy
        assert op is not None
        assert copy is not None
        self._transport.stay_near()
        if self._over:
            self._in_flight.end_ops()
        (unit,) = task.units
        waiting = self._waiting.pop((task.stage, unit))
        begin = self._clock.begin()
        if copy.versions is not None:
            copy.versions.use(op.version + self._in_flight.period_offset)
        with self._around_backward(copy):
            waiting.split.weight_gradients()
        self._clock.end(op, self._in_flight.period_offset, begin)
        self._transport.computed()
        if waiting.held:
            assert self._saved is not None
            self._saved.release(waiting.held)

    def _hand_back(self, task: Task, unit: Unit, stash: Stash) -> None:
        """Lay ready for the stage before what a backward gave."""
        found = self._input_gradients(task, stash)
        if task.sent_as >= 0:
            self._messages.put(task.sent_as, found)
        elif task.hands_over:
            self._gradients[task.stage - 1, unit] = found

    def _count(self, task: Task, unit: Unit, stash: Stash) -> None:
        """What is kept after a backward, and what no more."""
        if self._saved is None:
            return
        self._saved.release(stash.held)
        waiting = self._waiting.get((task.stage, unit))
        if waiting is not None and self._in_flight.counting:
            self._in_flight.hold(waiting.split.kept(), waiting.held)

    def _differentiate(
        self, op: Op, edges: Sequence[Any], gradients: Sequence[Tensor], split: SplitBackward | None
    ) -> None:
        """The gradients that an op makes."""
        if not edges:
            return
        if split is None:
            accumulate(edges, gradients, into=None, direct=self._direct)
            return
        split.input_gradient(edges, gradients, look=self._in_flight.counting)
        if op.kind is not OpKind.INPUT_GRADIENT:  # the backward of another share is split
            split.weight_gradients()

    def _input_gradients(self, task: Task, stash: Stash) -> list[Tensor | None]:
        """Of what the stage before gave, None where there is none; those of skips are on their way."""
        found: list[Tensor | None] = []
        for tensor in stash.inputs:
            if tensor.requires_grad:
                grad = tensor.grad
                found.append(grad if grad is None or type(grad) is Tensor else settled(grad))
                tensor.grad = None
        return self._skips.give_gradients(task, found, stash.by_skips) if task.gives else found

    def _output_gradients(self, task: Task) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        found, reused = self._next_gradients(task)
        if task.takes:
            more, buffers = self._skips.take_gradients(task)
            return [*found, *more], [*reused, *buffers]
        return found, reused

    def _next_gradients(self, task: Task) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Of what the next stage took."""
        if task.stage == self._last_stage:
            return [], []
        if task.number < 0:
            return self._gradients.pop((task.stage, task.units[0])), []
        return self._messages.take_gradients(task.number, task.answers)

    def _recomputed(
        self, task: Task, copy: StageCopy, unit: Unit, stash: Stash, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a unit whose forward kept only its inputs, with their graph and gradients."""
        batch, again = self._batches[task.slot], stash.again
        assert again is not None
        if versions(again.value) != again.versions:
            raise ConfigError(
                f"the input of stage {task.stage} was changed in place before the stage was computed again, "
                "which did not happen in the first forward; copy it before it is changed"
            )
        spare = None if copy.checked else mapped(copied, again.value)
        with (
            copy.precision.computing(),
            copy.buffers.as_then(again.buffers),
            copy.joining() if task.splits else NOTHING as stash.joints,
        ):
            output = copy.forward(again.value, batch.step, batch.rows[unit])
            _, tensors = self._outputs.with_loss(task, batch, output, unit, again=True)
        if again.first is not None:
            refuse_other(tensors, again.first, f"stage {task.stage}")
        self._in_flight.graph_made(stash.inputs, tensors, stash.held, joints=stash.joints)
        if not copy.checked:
            with copy.precision.computing():
                self._outputs.check(task, batch, spare, unit, (stash.inputs, tensors, stash.joints))
        if task.stage == self._last_stage:
            return [tensor for tensor in tensors if tensor.requires_grad], []
        marked = [tensor for tensor, was in zip(tensors, again.marked, strict=True) if was]
        pairs = zip(marked, gradients, strict=True)
        there = [(t, g) for t, g in pairs if t.requires_grad and g is not None]
        return [t for t, _ in there], [g for _, g in there]

    def _around_backward(self, copy: StageCopy) -> AbstractContextManager[Any]:
        """What a backward runs in."""
        replays, saved = copy.replays, self._saved if self._in_flight.counting else None
        if copy.precision.plain and (replays is None or saved is None):
            return copy.streams.backward()
        context = ExitStack()
        if replays is not None and saved is not None:
            self._recount(context, replays, saved)
        context.enter_context(copy.streams.backward())
        context.enter_context(copy.precision.backward())
        return context

    def _recount(self, context: ExitStack, replays: LayerReplays, saved: SavedBytes) -> None:
        """Let what a layer saves when it is computed again count until the next one, within a context."""
        held: list[Kept] = []

        def recount() -> Hold:
            saved.release(held)
            return partial(saved.hold, collected=held)

        replays.recount = recount
        context.callback(saved.release, held)
        context.callback(setattr, replays, "recount", None)


def _with_gradients(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None]
) -> tuple[Sequence[GradientEdge], list[Tensor]]:
    """Those of a stage's outputs that have a gradient; a loss needs none."""
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) < len(gradients):
        edges = [e for e, gradient in zip(edges, gradients, strict=True) if gradient is not None]
    return edges, there
