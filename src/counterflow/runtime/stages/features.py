"""What a stage has beside its layers: features, each of which is around the stage's run or its layers' runs.

Invariant: features do not know each other. A run is composed of those that there are, once, and does not ask
for others when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..messages.values import Keyworded, Value

if TYPE_CHECKING:
    from .named_layer import NamedLayer
    from .randomness import SampleRows

Run = Callable[[Value, int, "SampleRows"], Value]
"""What a stage, or a layer, makes of a value in a step; the value has some rows of the mini-batch."""


class Feature:
    """Is around nothing; each one overrides what it is around."""

    def around_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """What the stage makes of a value; ``run`` does without the feature."""
        return run(value, step, rows)

    def around_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Run one of the stage's layers, or a loss function, within this feature."""
        del layer
        return run(value, step, rows)


def composed(layers: Sequence[NamedLayer], features: Sequence[Feature]) -> Run:
    """The run of a stage.

    Args:
        layers: in their order.
        features: the outermost first.
    """
    runs = tuple(layer_run(layer, partial(called, layer.module), features) for layer in layers)

    def through(value: Value, step: int, rows: SampleRows) -> Value:
        for run in runs:
            value = run(value, step, rows)
        return value

    found: Run = through
    for feature in reversed(features):
        if type(feature).around_stage is not Feature.around_stage:
            found = partial(feature.around_stage, found)
    return found


def layer_run(layer: NamedLayer, run: Run, features: Sequence[Feature]) -> Run:
    """The run of a layer; arguments as of ``composed``."""
    for feature in reversed(features):
        if type(feature).around_layer is not Feature.around_layer:
            run = partial(feature.around_layer, layer, run)
    return run


def called(module: Callable[..., Value], value: Value, step: int, rows: SampleRows) -> Value:
    """What a layer gives; the model's first one may take keyword arguments."""
    del step, rows
    if type(value) is not Keyworded:
        return module(value)
    given = () if value.positional is None else (value.positional,)
    return module(*given, **value.kwargs)
