"""Runs of a layer with carried states: set in its ``Carry`` modules before, read from them after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from counterflow.api.carry import NOTHING, Carry
from counterflow.capture.layer import CapturedLayer
from counterflow.errors import ConfigError

from .named_layer import NamedLayer, place_of


def carries_in(layer: nn.Module) -> list[Carry]:
    """A layer's carried states, each once, in the order of its modules."""
    return [module for module in layer.modules() if isinstance(module, Carry)]


def add_carries(layers: Iterable[nn.Module]) -> None:
    """Let captured layers carry states between slices or tokens; other layers have their own carries.

    Raises:
        ConfigError: the state of a layer is not known.
    """
    for layer in (module for root in layers for module in root.modules()):
        if isinstance(layer, CapturedLayer):
            layer.add_carries()


@contextmanager
def carrying(
    layer: NamedLayer, carries: Sequence[Carry], states: Sequence[Any], *, joins: bool = False
) -> Iterator[list[Any]]:
    """Context of a run of a layer.

    Args:
        layer: the layer.
        carries: its carried states.
        states: state of each carry; ``NOTHING`` in the first run.
        joins: True if states may be concatenated anew, as no gradient is passed back to their parts.

    Yields:
        A list that has, after the run, the state of each carry.

    Raises:
        ConfigError: a carry has no state after the run.
    """
    next_states: list[Any] = []
    try:
        for carry, state in zip(carries, states, strict=True):
            carry.begin(state, joins=joins)
        yield next_states
        next_states += [carry.end() for carry in carries]
        if any(state is NOTHING for state in next_states):
            raise ConfigError(
                f"{place_of(layer)} left nothing in a cf.Carry that it holds; call its leave() in each "
                "forward, with None if the next run needs nothing"
            )
    finally:
        for carry in carries:
            carry.end()
