"""Wrappers of a stage: each one wraps the stage's run or the runs of its layers.

Invariant: wrappers do not know each other. A run is composed of the wrappers that a stage has, once, and
looks for no further ones when it runs.

Where torch compiles a stage, consecutive layers are one function, a block. Each wrapper says of a layer
whether it has to wrap that layer by itself; otherwise it wraps the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

from ..messages.values import Keyworded, Value
from .named_layer import NamedLayer, place_of
from .sample_rows import SampleRows

Run = Callable[[Value, int, SampleRows], Value]
"""Function of (value, step, rows) to the output of a stage or layer; ``rows`` are those of the value."""


class StageWrapper:
    """Base class: wraps nothing. Subclasses override the calls that they wrap."""

    break_reason = "something is around each layer"
    """Reason why this wrapper wraps no block, if it wraps layers."""

    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Run the stage on a value; ``run`` is the run without this wrapper."""
        return run(value, step, rows)

    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Run one of the stage's layers, or a loss function, within this wrapper."""
        del layer
        return run(value, step, rows)

    def applies_to(self, layer: NamedLayer) -> bool:
        """Return True if this wrapper wraps the layer, or loss function."""
        del layer
        return _overrides(self, "wrap_layer")

    def breaks_block(self, layer: NamedLayer) -> str | None:
        """Return why the layer has to be wrapped by itself; None: a block with that layer may be wrapped."""
        return self.break_reason if self.applies_to(layer) else None

    def wrap_block(
        self, layers: Sequence[NamedLayer], runs: BlockRuns, value: Value, step: int, rows: SampleRows
    ) -> Value:
        """Run a block, which none of its layers breaks, within this wrapper."""
        return self.wrap_layer(layers[0], runs.fused, value, step, rows)


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Two ways to run a block.

    Attributes:
        fused: runs it as one function, without the current wrapper.
        recompose: runs it within that wrapper, in the blocks that its layers form now: it may have learnt
            which layers break a block.
    """

    fused: Run
    recompose: Run


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive layers of a stage that are one function.

    Attributes:
        layers: layers in order.
        alone: reason why it is a single layer; None: no wrapper breaks a block at it.
    """

    layers: tuple[NamedLayer, ...]
    alone: str | None = None


Compile = Callable[[Sequence[NamedLayer]], Run]
"""Function of some layers to their compiled run, without any wrapper."""


def composed(
    layers: Sequence[NamedLayer], wrappers: Sequence[StageWrapper], compiled: Compile | None = None
) -> Run:
    """Compose the run of a stage.

    Args:
        layers: layers in order.
        wrappers: wrappers, the outermost first.
        compiled: compiles blocks; None: nothing is compiled.
    """
    if compiled is None:
        runs = tuple(layer_run(layer, partial(called, layer.module), wrappers) for layer in layers)
    else:
        runs = tuple(_block_run(block.layers, wrappers, compiled) for block in blocks(layers, wrappers))

    def through(value: Value, step: int, rows: SampleRows) -> Value:
        for run in runs:
            value = run(value, step, rows)
        return value

    stage_run: Run = runs[0] if len(runs) == 1 else through
    for wrapper in reversed(wrappers):
        if _overrides(wrapper, "wrap_stage"):
            stage_run = partial(wrapper.wrap_stage, stage_run)
    return stage_run


def blocks(layers: Sequence[NamedLayer], wrappers: Sequence[StageWrapper]) -> list[Block]:
    """Return the longest blocks of a stage that no wrapper breaks; arguments as of ``composed``."""
    longest: list[Block] = []
    for layer in layers:
        alone = next((why for wrapper in wrappers if (why := wrapper.breaks_block(layer)) is not None), None)
        if longest and alone is None and longest[-1].alone is None:
            longest[-1] = Block((*longest[-1].layers, layer))
        else:
            longest.append(Block((layer,), alone))
    return longest


def layer_run(layer: NamedLayer, run: Run, wrappers: Sequence[StageWrapper]) -> Run:
    """Compose the run of a layer; arguments as of ``composed``."""
    for wrapper in reversed(wrappers):
        if wrapper.applies_to(layer):
            run = partial(wrapper.wrap_layer, layer, run)
    return run


def _block_run(layers: Sequence[NamedLayer], wrappers: Sequence[StageWrapper], compiled: Compile) -> Run:
    if len(layers) == 1:
        return layer_run(layers[0], compiled(layers), wrappers)
    run = compiled(layers)
    for place, wrapper in reversed(list(enumerate(wrappers))):
        if any(map(wrapper.applies_to, layers)):
            recompose = _recomposed(layers, wrappers[place:], compiled)
            run = partial(wrapper.wrap_block, layers, BlockRuns(run, recompose))
    return run


def _recomposed(layers: Sequence[NamedLayer], wrappers: Sequence[StageWrapper], compiled: Compile) -> Run:
    def through(value: Value, step: int, rows: SampleRows) -> Value:
        for block in blocks(layers, wrappers):
            value = _block_run(block.layers, wrappers, compiled)(value, step, rows)
        return value

    return through


def called(module: Callable[..., Value], value: Value, step: int, rows: SampleRows) -> Value:
    """Call a layer; the model's first one may take keyword arguments."""
    del step, rows
    if type(value) is not Keyworded:
        return module(value)
    positional = () if value.positional is None else (value.positional,)
    return module(*positional, **value.kwargs)


def called_loss(value: tuple[Callable[[Any, Any], Any], Any, Any], step: int, rows: SampleRows) -> Any:
    """Call a loss function, the first of three values, with an output and targets."""
    del step, rows
    return value[0](*value[1:])


def failing_part(error: BaseException, layers: Iterable[NamedLayer]) -> str | None:
    """Return the layer, or the loss function, in which an error was raised; None: none was called."""
    by_module = {id(layer.module): layer for layer in layers}
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is called_loss.__code__:
            return "the loss function"
        if frame.f_code is called.__code__:
            layer = by_module.get(id(frame.f_locals["module"]))
            return None if layer is None else place_of(layer)
    return None


def _overrides(wrapper: StageWrapper, name: str) -> bool:
    return getattr(type(wrapper), name) is not getattr(StageWrapper, name)
