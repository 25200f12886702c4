"""Posted receives, and the values that they receive by unit.

Invariant: a received value has its buffer to itself until nothing refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..transport.base import Described, Pending
from .envelope import Envelope, MessageForm, Of
from .values import Shapes, Structure, ValueLayout, read_description

Received = tuple[Structure | None, list[Tensor], Sequence[Tensor]]
"""Value of a unit: its structure, its tensors, and the buffers of the pool that contain them."""
NONE: Sequence[Tensor] = ()
Restore = Callable[[list[Tensor]], list[Tensor]]


class PostedReceive:
    """A posted receive of known shapes; ``restore`` converts a message in another form back to tensors."""

    __slots__ = ("buffers", "form", "pending", "restore")

    def __init__(
        self, pending: Pending, buffers: list[Tensor], form: MessageForm, restore: Restore | None
    ) -> None:
        self.pending, self.buffers, self.form, self.restore = pending, buffers, form, restore

    def take(self, count: int, *, as_leaves: bool) -> list[Received]:
        """Wait for the message and return its values by unit.

        The tensors are not the buffers: hooks and gradients of a tensor do not stay with a reused buffer.
        """
        self.pending.wait()
        buffers, form = self.buffers, self.form
        if self.restore is not None:
            buffers = self.restore(buffers)
        pooled = form.region is None
        if count == 1 and len(buffers) == 1:
            tensor = buffers[0].detach()
            if as_leaves and form.specs[0][0].requires_grad:
                tensor.requires_grad_()
            return [(form.structures[0], [tensor], buffers if pooled else NONE)]
        values: list[Received] = []
        at = 0
        for structure, specs in zip(form.structures, form.specs, strict=True):
            unit_buffers = buffers if count == 1 else buffers[at : at + len(specs)]
            at += len(specs)
            tensors = [buffer.detach() for buffer in unit_buffers]
            if as_leaves:
                for tensor, spec in zip(tensors, specs, strict=True):
                    if spec.requires_grad:
                        tensor.requires_grad_()
            values.append((structure, tensors, unit_buffers if pooled else NONE))
        return values

    def take_gradient(self) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Wait for the gradients of one unit (None if missing), and return their buffers too."""
        ((_, tensors, buffers),) = self.take(1, as_leaves=False)
        gradients: list[Tensor | None] = [*tensors]
        form = self.form
        if form.missing:
            present = iter(tensors)
            gradients = [None if place in form.missing else next(present) for place in range(form.gradients)]
        return gradients, buffers


class PostedDescribed:
    """A posted receive of unknown shapes."""

    __slots__ = ("learnt", "of", "pending")

    def __init__(self, pending: Described, envelope: Envelope, learnt: Shapes) -> None:
        self.pending, self.of, self.learnt = pending, envelope.of, learnt

    def take(self, count: int, *, as_leaves: bool) -> list[Received]:
        """Wait for the message, note its layouts, and return its values by unit, outside of the pool."""
        del as_leaves  # ``requires_grad`` is as on the sender
        tensors = self.pending.wait()
        structures, counts = read_description(tensors[0], count)
        values: list[Received] = []
        at = 1
        for of, structure, tensor_count in zip(self.of, structures, counts, strict=True):
            unit_tensors = tensors[at : at + tensor_count]
            at += tensor_count
            self.learnt[of] = ValueLayout.of(structure, unit_tensors)
            values.append((structure, unit_tensors, NONE))
        return values

    def take_gradient(self) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Wait for the gradients of one unit, in no buffers of the pool; None for those that are missing
        (noted).
        """
        tensors = self.pending.wait()
        missing = frozenset(place for place, tensor in enumerate(tensors) if tensor.dtype is torch.bool)
        note_missing(self.learnt, self.of[0], missing)
        return [None if place in missing else tensor for place, tensor in enumerate(tensors)], NONE


def note_missing(learnt: Shapes, of: Of, missing: frozenset[int]) -> None:
    """Note the missing gradients of a mini-batch whose shapes are learnt."""
    if missing and of in learnt:
        learnt[of] = replace(learnt[of], missing=missing)
