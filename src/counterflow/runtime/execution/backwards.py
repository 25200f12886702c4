"""Runs the backwards of a worker's stages, whole or in halves.

Invariant: a backward takes what its forward, or the recomputation of that, left in the stash.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from counterflow.program.actions import Compute

from ..dtensors import settled
from ..messages.arrivals import NONE
from ..mini_batch.batch import Batch
from ..stages.recomputation import Hold
from ..stages.replays import LayerReplays
from ..stages.split_backward import SplitBackward, accumulate
from .in_flight import NOTHING
from .meters import Kept, SavedBytes
from .stash import Stash, Waiting
from .tasks import RunOp, Tools


class _Taken(NamedTuple):
    """What a backward runs on: its forward's stash, a backward that is split, gradients and their buffers."""

    stash: Stash
    split: SplitBackward | None
    gradients: Sequence[Tensor | None]
    reused: Sequence[Tensor]


class Differentiates(RunOp):
    """An op that makes gradients."""

    ends_gradients = False
    """Whether it is its list's last one that makes gradients of its stage's weights, in its period."""

    def _around(self) -> AbstractContextManager[Any] | None:
        """What autograd runs in; None: in nothing."""
        copy, saved = self.copy, self._in_flight.saved
        replays = copy.replays if saved.counting else None
        gathered = copy.gathered()
        if copy.precision.plain and replays is None and gathered is None:
            return copy.streams.backward() if copy.streams.shared else None
        context = ExitStack()
        if gathered is not None:
            context.enter_context(gathered)
        if replays is not None:
            _recount(context, replays, saved)
        context.enter_context(copy.streams.backward())
        context.enter_context(copy.precision.backward())
        return context


class RunBackward(Differentiates):
    """A whole backward, or an input gradient."""

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action, tools, period_offset)
        (self._unit,) = self.units
        self._key = self.stage, self._unit
        self._leaves_weights = self.op.kind.rest is not None
        """Whether the weights' gradients are another op's."""
        self._direct = self._transport.device.type == "cpu"

    def _take(self, batch: Batch) -> _Taken:
        """What its forward left, and the gradients of what that gave."""
        del batch
        stash = self._in_flight.stashes.pop(self._key)
        split = None
        if self.splits:
            assert stash.edges is not None  # a recomputation has made them
            split = SplitBackward(self.copy.splitting, stash.inputs, stash.joints)
            split.look_ahead(stash.edges)  # before anything is waited for
        gradients, reused = ([], NONE) if self.source is None else self.source.take_gradients(self._unit)
        if self.skips.takes:
            more, buffers = self.skips.take_gradients()
            if self.copy.last and stash.loss is not None:  # beside it is the gradient of a state
                gradients = [torch.ones_like(stash.loss)]
            gradients, reused = [*gradients, *more], [*reused, *buffers]
        return _Taken(stash, split, gradients, reused)

    def _compute(self, batch: Batch, taken: _Taken) -> SplitBackward | None:
        """Make gradients; gives the backward that is half done, if it is split."""
        del batch
        stash, split, gradients, _ = taken
        assert stash.edges is not None
        if stash.graded is not None and gradients:
            gradients = [g for g, graded in zip(gradients, stash.graded, strict=True) if graded]
        edges, known = _with_gradients(stash.edges, gradients)
        if (around := self._around()) is None:
            self._differentiate(edges, known, split)
        else:
            with around:
                self._differentiate(edges, known, split)
        if self.ends_gradients:
            self.copy.sum_gradients()
        return split

    def _leave(self, batch: Batch, taken: _Taken, made: SplitBackward | None) -> None:
        """Lay ready the gradients of inputs; leave what the weights' gradients are made of, and count it."""
        del batch
        stash, in_flight = taken.stash, self._in_flight
        if self.target is not None or self.skips.gives:
            found = self._input_gradients(stash)
            if self.target is not None:
                self.target.give_gradients(self._unit, found)
        stash.done = [*taken.reused, *stash.reused]
        in_flight.over.append(stash)
        waiting = None
        if made is not None and self._leaves_weights:
            waiting = in_flight.waiting[self._key] = Waiting(made, [])
        in_flight.saved.release(stash.held)
        if waiting is not None and in_flight.saved.counting:
            in_flight.hold(waiting.split.kept(), waiting.held)

    def _differentiate(
        self, edges: Sequence[Any], gradients: Sequence[Tensor], split: SplitBackward | None
    ) -> None:
        """The gradients that the op makes."""
        if not edges:
            return
        if split is None:
            accumulate(edges, gradients, into=None, direct=self._direct)
            return
        split.input_gradient(edges, gradients, look=self._in_flight.saved.counting)
        if not self._leaves_weights:  # the backward of another share is split
            split.weight_gradients()

    def _input_gradients(self, stash: Stash) -> list[Tensor | None]:
        """Gradients of the previous stage's outputs, or None; those of skip connections are in flight."""
        found: list[Tensor | None] = []
        for tensor in stash.inputs:
            if tensor.requires_grad:
                grad = tensor.grad
                found.append(grad if grad is None or type(grad) is Tensor else settled(grad))
                tensor.grad = None
        return self.skips.give_gradients(found, stash.by_skips) if self.skips.gives else found


class RunWeightGradients(Differentiates):
    """What an input gradient left to be made."""

    def _take(self, batch: Batch) -> Waiting:
        """The half of the backward that is left."""
        del batch
        return self._in_flight.waiting.pop((self.stage, self.units[0]))

    def _compute(self, batch: Batch, taken: Waiting) -> None:
        """Make gradients of weights."""
        del batch
        with self._around() or NOTHING:
            taken.split.weight_gradients()
        if self.ends_gradients:
            self.copy.sum_gradients()

    def _leave(self, batch: Batch, taken: Waiting, made: None) -> None:
        """What was kept for it is kept no more."""
        del batch, made
        self._in_flight.saved.release(taken.held)


def _recount(context: ExitStack, replays: LayerReplays, saved: SavedBytes) -> None:
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
    """Edges of a stage's outputs that have a gradient, and the gradients; a loss needs none."""
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) < len(gradients):
        edges = [e for e, gradient in zip(edges, gradients, strict=True) if gradient is not None]
    return edges, there
