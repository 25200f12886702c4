"""Regions of received messages, for one list of actions.

The program says when each message is in use. Shapes are known after the first mini-batch of a kind; then each
receive has its region of a block of memory, and nothing is chosen when it is posted. If messages are
compressed, or if one has tensors both on the device and on the host, the pool reuses any buffer instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from counterflow.program.communication.buffer_layout import CHANGES, arrange
from counterflow.program.communication.receive_buffers import Lifetime

from .compression import Compression
from .envelope import Envelope
from .receive_memory import Region, message_bytes
from .values import Shapes, TensorSpec

_MOST_LAYOUTS = 16
"""Layouts that are cached. Irregular batches may have other sizes in each step: then less time is spent on a
layout."""


class ReceiveLayout:
    """Regions of one list.

    Args:
        lifetimes: lives of its messages.
        envelopes: their envelopes.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], envelopes: Sequence[Envelope]) -> None:
        self._lifetimes, self._envelopes = lifetimes, envelopes
        self._known: dict[tuple[tuple[int, int], ...], list[Region]] = {}
        self._changes = CHANGES
        for envelope in envelopes:
            envelope.layout = self

    def assign(self, known: Shapes, compression: Compression | None) -> None:
        """Assign regions to the envelopes for the shapes of a mini-batch."""
        forms = [envelope.look_up(known, compression) for envelope in self._envelopes]
        regions: list[Region | None] = [None] * len(forms)
        if compression is None:
            for on_host in (False, True):
                numbers = [
                    number
                    for number, form in enumerate(forms)
                    if {spec.on_host for spec in form.message} == {on_host}
                ]
                sizes = [message_bytes(forms[number].message) for number in numbers]
                for number, place in zip(numbers, self._regions(numbers, sizes), strict=True):
                    regions[number] = place
        specs: dict[tuple[TensorSpec, ...], Sequence[TensorSpec]] = {}
        """Specs of equal messages are one object, so that a region has its tensors for all of them."""
        for envelope, form, region in zip(self._envelopes, forms, regions, strict=True):
            message = specs.setdefault(tuple(form.message), form.message)
            envelope.known_form = replace(form, message=message, region=region)

    def _regions(self, numbers: Sequence[int], sizes: Sequence[int]) -> list[Region]:
        key = tuple(zip(numbers, sizes, strict=True))
        if key not in self._known:
            if len(self._known) >= _MOST_LAYOUTS:
                self._known.clear()
                self._changes = 0
            layout = arrange([self._lifetimes[number] for number in numbers], sizes, self._changes)
            self._known[key] = [
                Region(offset, offset + size, layout)
                for offset, size in zip(layout.offsets, sizes, strict=True)
            ]
        return self._known[key]
