"""Receive buffers of one list of actions, by the table of its communication plan.

The program says when the buffer of each message is in use. Shapes are known after the first mini-batch of a
kind; then each receive has its buffer, and nothing is chosen when it is posted. If messages differ so much
in size that the buffers would have more bytes than are in use at once, if messages are compressed, or if one
has tensors both on the device and on the host, the pool reuses any buffer instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from counterflow.program.communication.receive_buffers import Lifetime, colour

from .compression import Compression
from .envelope import Envelope
from .slot_buffers import message_bytes
from .values import Shapes, TensorSpec

_MOST_OVER = 1.1
"""Largest ratio of the bytes of all buffers to those in use at once. It is 1 for equal sizes; if they differ,
that of the pool may be 1.14 (``benchmarks/communication.py``)."""


class ReceiveSlots:
    """Receive buffers of one list.

    Args:
        lifetimes: lives of its messages.
        envelopes: their envelopes.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], envelopes: Sequence[Envelope]) -> None:
        self._lifetimes, self._envelopes = lifetimes, envelopes
        for envelope in envelopes:
            envelope.slots = self

    def assign(self, known: Shapes, compression: Compression | None) -> None:
        """Assign buffers to the envelopes for the shapes of a mini-batch."""
        forms = [envelope.look_up(known, compression) for envelope in self._envelopes]
        slots: Sequence[int | None] = [None] * len(forms)
        sizes = [message_bytes(form.message) for form in forms]
        places = [frozenset(spec.on_host for spec in form.message) for form in forms]
        if compression is None and all(len(place) == 1 for place in places):
            table = colour(self._lifetimes, sizes, places)
            if table.size <= _MOST_OVER * table.in_use:
                slots = table.slots
                sizes = [int(table.sizes[slot]) for slot in table.slots]
        specs: dict[tuple[TensorSpec, ...], Sequence[TensorSpec]] = {}
        """Specs of equal messages are one object, so that a buffer has its tensors for all of them."""
        for envelope, form, slot, size in zip(self._envelopes, forms, slots, sizes, strict=True):
            message = specs.setdefault(tuple(form.message), form.message)
            envelope.known_form = replace(form, message=message, slot=slot, slot_bytes=size)
