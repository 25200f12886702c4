"""Cache of layers' states between the tokens of a generated sequence.

A layer leaves its state in its ``Carry``, as it does for the next slice of a sequence; the cache saves it on
the layer's worker, by micro-batch, until the next tokens run.

Invariant: outside of ``GenerationCache.active`` the cache is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from counterflow.api.carry import NOTHING, Carry

from ..messages.values import Value
from .carrying import add_carries, carries_in, carrying
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper


class GenerationCache(StageWrapper):
    """States of one stage's layers.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Iterable[NamedLayer]) -> None:
        layers = list(layers)
        add_carries(layer.module for layer in layers)
        self._carries: dict[int, list[Carry]] = {layer.index: carries_in(layer.module) for layer in layers}
        self._states: dict[tuple[int, int], list[Any]] = {}
        self.paused = False
        """True while a whole sequence runs."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of the parts of one sequence: layers leave states, which are dropped after it."""
        carries = [carry for of_layer in self._carries.values() for carry in of_layer]
        before = [carry.expects_slices for carry in carries]
        try:
            for carry in carries:
                carry.expect_slices(expected=True)
            yield
        finally:
            self._states.clear()
            for carry, expected in zip(carries, before, strict=True):
                carry.expect_slices(expected=expected)

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Raises:
        ConfigError: the layer leaves nothing in a ``Carry`` that it holds.
        """
        carries = self._carries[layer.index]
        if not carries or self.paused:
            return run(value, step, rows)
        place = layer.index, rows.micro_batch
        states = self._states.get(place) or [NOTHING] * len(carries)
        with carrying(layer, carries, states, joins=True) as states_out:
            output = run(value, step, rows)
        self._states[place] = states_out
        return output
