"""A new record of a model, cut where the layers of an earlier one were.

Invariant: each layer calls modules that it called before, and what crosses between two layers has the shapes
and dtypes that crossed before; else there is no cut. Dtypes do not count in records of weights of their own
dtype, which autocast and the user change.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cutting import Living
from .layer_contents import LayerSteps
from .placeholders import Ref
from .record import Record, RecordedCall

Crossing = tuple[tuple[object, ...], int]
"""Shapes and dtypes of the tensors between two layers, and the number of sizes."""


class Uncut(Exception):  # noqa: N818 - nothing is wrong with the model
    """A record that cannot be cut where the layers were."""


def crossings_of(record: Record, parts: Sequence[LayerSteps]) -> list[Crossing]:
    """Tensors that cross after each layer but the last."""
    return [(_kinds(record, part.gives), len(part.numbers)) for part in parts[:-1]]


def _kinds(record: Record, refs: Sequence[Ref]) -> tuple[object, ...]:
    kinds = (record.shapes[ref] for ref in refs)
    return tuple(kinds if record.mark is not None else (shape for shape, _ in kinds))


def places_of(record: Record, parts: Sequence[LayerSteps], crossings: Sequence[Crossing]) -> list[int]:
    """Number of steps before each layer, and of all steps.

    Args:
        record: the new record.
        parts: the layers' earlier steps.
        crossings: what crossed between the layers.

    Raises:
        Uncut: there is no such place.
    """
    old = [step for part in parts for step in part.steps]
    sizes = [len(part.steps) for part in parts]
    before = [sum(sizes[:number]) for number in range(len(parts) + 1)]
    if [_call(step) for step in old] == [_call(step) for step in record.steps]:
        return before
    living = Living(record)
    windows = _windows(record.steps, parts)
    places = [0]
    for (low, high), crossing, part in zip(windows, crossings, parts, strict=False):
        after = next((n for n, s in enumerate(reversed(part.steps)) if s.module is not None), 0)
        fitting = [
            place
            for place in range(max(low, places[-1]), high + 1)
            if living.allowed(place) and _kinds(record, living.across(place)) == crossing[0]
        ]
        if not fitting:
            raise Uncut
        places.append(min(fitting, key=lambda place: abs(place - low - after)))
    return [*places, len(record.steps)]


def _call(step: RecordedCall) -> tuple[object, object]:
    return step.module, step.function


def _windows(steps: Sequence[RecordedCall], parts: Sequence[LayerSteps]) -> list[tuple[int, int]]:
    homes: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for step in part.steps:
            if step.module is not None:
                homes.setdefault(step.module, []).append(number)
    layer, layers = 0, []
    for step in steps:
        if step.module in homes:
            layer = next((home for home in homes[step.module] if home >= layer), -1)
            if layer < 0:
                raise Uncut
        layers.append(layer if step.module is not None else None)
    windows = []
    for number in range(len(parts) - 1):
        low = max((n + 1 for n, home in enumerate(layers) if home is not None and home <= number), default=0)
        high = min(
            (n for n, home in enumerate(layers) if home is not None and home > number), default=len(steps)
        )
        windows.append((low, high))
    return windows
