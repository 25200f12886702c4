"""Runs a layer with the states that its ``Carry`` modules are given, and reads what they leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from counterflow.api.carry import NOTHING, Carry
from counterflow.errors import ConfigError

from .named_layer import NamedLayer, place_of


def carries_in(layer: nn.Module) -> list[Carry]:
    """A layer's carried states, each once, in the order of its modules."""
    return [module for module in layer.modules() if isinstance(module, Carry)]


@contextmanager
def carrying(
    layer: NamedLayer, carries: Sequence[Carry], given: Sequence[Any], *, joins: bool = False
) -> Iterator[list[Any]]:
    """Around a run of a layer.

    Args:
        layer: the layer.
        carries: its carried states.
        given: what was left to each; ``NOTHING`` where it is the first run.
        joins: whether states may be put together anew, as no gradient goes back to their parts.

    Yields:
        A list that has, after the run, what each left.

    Raises:
        ConfigError: one left nothing.
    """
    left: list[Any] = []
    try:
        for carry, state in zip(carries, given, strict=True):
            carry.begin(state, joins=joins)
        yield left
        left += [carry.end() for carry in carries]
        if any(state is NOTHING for state in left):
            raise ConfigError(
                f"{place_of(layer)} left nothing in a cf.Carry that it holds; call its leave() in each "
                "forward, with None if the next run needs nothing"
            )
    finally:
        for carry in carries:
            carry.end()
