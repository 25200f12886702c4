"""Receives that are posted, and what comes of them by unit.

Invariant: what was received is in a buffer of its own until nothing refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..transport.base import Described, Pending
from .envelope import Envelope, MessageForm, Of
from .values import Shapes, Structure, ValueLayout, read_description

Taken = tuple[Structure | None, list[Tensor], Sequence[Tensor]]
"""What came for a unit: its structure, its tensors, and the buffers of the pool that they are in."""
NONE: Sequence[Tensor] = ()
Restore = Callable[[list[Tensor]], list[Tensor]]


class PostedReceive:
    """A posted receive of known shapes; ``restore`` makes tensors of what came in another form."""

    __slots__ = ("buffers", "form", "pending", "restore")

    def __init__(
        self, pending: Pending, buffers: list[Tensor], form: MessageForm, restore: Restore | None
    ) -> None:
        self.pending, self.buffers, self.form, self.restore = pending, buffers, form, restore

    def take(self, count: int, *, as_leaves: bool) -> list[Taken]:
        """What came, by unit: structure, tensors, and the buffers of the pool that they are in.

        The tensors are not the buffers: what is asked of a tensor (hooks, a gradient) stays with it.
        """
        self.pending.wait()
        buffers, form = self.buffers, self.form
        if self.restore is not None:
            buffers = self.restore(buffers)
        if count == 1 and len(buffers) == 1:
            tensor = buffers[0].detach()
            if as_leaves and form.specs[0][0].requires_grad:
                tensor.requires_grad_()
            return [(form.structures[0], [tensor], buffers)]
        found: list[Taken] = []
        at = 0
        for structure, specs in zip(form.structures, form.specs, strict=True):
            own = buffers if count == 1 else buffers[at : at + len(specs)]
            at += len(specs)
            tensors = [buffer.detach() for buffer in own]
            if as_leaves:
                for tensor, spec in zip(tensors, specs, strict=True):
                    if spec.requires_grad:
                        tensor.requires_grad_()
            found.append((structure, tensors, own))
        return found

    def take_gradient(self) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """The gradients of one unit, None for those that are missing; and their buffers."""
        ((_, tensors, buffers),) = self.take(1, as_leaves=False)
        found: list[Tensor | None] = [*tensors]
        form = self.form
        if form.missing:
            there = iter(tensors)
            found = [None if place in form.missing else next(there) for place in range(form.gradients)]
        return found, buffers


class PostedDescribed:
    """A posted receive whose shapes come with it."""

    __slots__ = ("learnt", "of", "pending")

    def __init__(self, pending: Described, envelope: Envelope, learnt: Shapes) -> None:
        self.pending, self.of, self.learnt = pending, envelope.of, learnt

    def take(self, count: int, *, as_leaves: bool) -> list[Taken]:
        """What came, by unit; in no buffers of the pool. Of activations the layouts are noted."""
        del as_leaves  # they are as on the sender
        tensors = self.pending.wait()
        structures, counts = read_description(tensors[0], count)
        found: list[Taken] = []
        at = 1
        for of, structure, own in zip(self.of, structures, counts, strict=True):
            taken = tensors[at : at + own]
            at += own
            self.learnt[of] = ValueLayout.of(structure, taken)
            found.append((structure, taken, NONE))
        return found

    def take_gradient(self) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """The gradients of one unit, None for those that are missing, which are noted; in no buffers."""
        tensors = self.pending.wait()
        missing = frozenset(place for place, tensor in enumerate(tensors) if tensor.dtype is torch.bool)
        note_missing(self.learnt, self.of[0], missing)
        return [None if place in missing else tensor for place, tensor in enumerate(tensors)], NONE


def note_missing(learnt: Shapes, of: Of, missing: frozenset[int]) -> None:
    """Note which gradients are missing in a mini-batch whose shapes are learnt."""
    if missing and of in learnt:
        learnt[of] = replace(learnt[of], missing=missing)
