"""What a stage has beside its layers: features, each of which is around the stage's run or its layers' runs.

Invariant: features do not know each other. A run is composed of those that there are, once, and does not ask
for others when it runs.

Where torch compiles a stage, consecutive layers are one function, a block. Each feature says of a layer
whether it has to be around that layer by itself; otherwise it is around the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..messages.values import Keyworded, Value
from .named_layer import NamedLayer
from .sample_rows import SampleRows

Run = Callable[[Value, int, SampleRows], Value]
"""What a stage, or a layer, makes of a value in a step; the value has some rows of the mini-batch."""


class Feature:
    """Is around nothing; each one overrides what it is around."""

    why_apart = "something is around each layer"
    """Why no block of layers is within it, if it is around layers."""

    def around_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """What the stage makes of a value; ``run`` does without the feature."""
        return run(value, step, rows)

    def around_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Run one of the stage's layers, or a loss function, within this feature."""
        del layer
        return run(value, step, rows)

    def surrounds(self, layer: NamedLayer) -> bool:
        """Whether it is around this layer of the stage, or loss function, at all."""
        del layer
        return _overrides(self, "around_layer")

    def separates(self, layer: NamedLayer) -> str | None:
        """Why it has to be around a layer by itself; None: it may be around a block with that layer."""
        return self.why_apart if self.surrounds(layer) else None

    def around_block(
        self, layers: Sequence[NamedLayer], runs: Runs, value: Value, step: int, rows: SampleRows
    ) -> Value:
        """Run a block, none of whose layers it separates, within this feature."""
        return self.around_layer(layers[0], runs.whole, value, step, rows)


@dataclass(frozen=True, slots=True)
class Runs:
    """The ways to run a block.

    Attributes:
        whole: as one function, without the feature that is asked to run it.
        anew: within that feature, in the blocks that there are now: it may have learnt what separates them.
    """

    whole: Run
    anew: Run


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive layers of a stage that are one function.

    Attributes:
        layers: in their order.
        alone: why there is one only; None: nothing separates it from its neighbours.
    """

    layers: tuple[NamedLayer, ...]
    alone: str | None = None


Compile = Callable[[Sequence[NamedLayer]], Run]
"""Makes the compiled run of some layers, without any feature."""


def composed(
    layers: Sequence[NamedLayer], features: Sequence[Feature], compiled: Compile | None = None
) -> Run:
    """The run of a stage.

    Args:
        layers: in their order.
        features: the outermost first.
        compiled: compiles blocks; None: nothing is compiled.
    """
    if compiled is None:
        runs = tuple(layer_run(layer, partial(called, layer.module), features) for layer in layers)
    else:
        runs = tuple(_block_run(block.layers, features, compiled) for block in blocks(layers, features))

    def through(value: Value, step: int, rows: SampleRows) -> Value:
        for run in runs:
            value = run(value, step, rows)
        return value

    found: Run = runs[0] if len(runs) == 1 else through
    for feature in reversed(features):
        if _overrides(feature, "around_stage"):
            found = partial(feature.around_stage, found)
    return found


def blocks(layers: Sequence[NamedLayer], features: Sequence[Feature]) -> list[Block]:
    """The longest blocks of a stage whose layers no feature separates; arguments as of ``composed``."""
    found: list[Block] = []
    for layer in layers:
        alone = next((why for feature in features if (why := feature.separates(layer)) is not None), None)
        if found and alone is None and found[-1].alone is None:
            found[-1] = Block((*found[-1].layers, layer))
        else:
            found.append(Block((layer,), alone))
    return found


def layer_run(layer: NamedLayer, run: Run, features: Sequence[Feature]) -> Run:
    """The run of a layer; arguments as of ``composed``."""
    for feature in reversed(features):
        if feature.surrounds(layer):
            run = partial(feature.around_layer, layer, run)
    return run


def _block_run(layers: Sequence[NamedLayer], features: Sequence[Feature], compiled: Compile) -> Run:
    """The run of a block; a lone layer is not one."""
    if len(layers) == 1:
        return layer_run(layers[0], compiled(layers), features)
    run = compiled(layers)
    for place, feature in reversed(list(enumerate(features))):
        if any(map(feature.surrounds, layers)):
            anew = _anew(layers, features[place:], compiled)
            run = partial(feature.around_block, layers, Runs(run, anew))
    return run


def _anew(layers: Sequence[NamedLayer], features: Sequence[Feature], compiled: Compile) -> Run:
    def through(value: Value, step: int, rows: SampleRows) -> Value:
        for block in blocks(layers, features):
            value = _block_run(block.layers, features, compiled)(value, step, rows)
        return value

    return through


def called(module: Callable[..., Value], value: Value, step: int, rows: SampleRows) -> Value:
    """What a layer gives; the model's first one may take keyword arguments."""
    del step, rows
    if type(value) is not Keyworded:
        return module(value)
    given = () if value.positional is None else (value.positional,)
    return module(*given, **value.kwargs)


def _overrides(feature: Feature, name: str) -> bool:
    return getattr(type(feature), name) is not getattr(Feature, name)
