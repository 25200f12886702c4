"""Diagnosis of layers on shares of sequences: whether they treat each position for itself.

A layer runs on a share and on its halves. So the diagnosis finds a layer that looks across the sequence, of
which the share is a part: a convolution, attention, a norm over positions.

It does not find a layer whose halves are all that it looks at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from counterflow.errors import ConfigError

from .comparison import compare_with_parts
from .sequence_parts import Value, are_near, halves_of, join_parts, positions_of

_LOG = logging.getLogger(__name__)


class SharedLayer(NamedTuple):
    """A layer that is given shares of sequences.

    Attributes:
        place: the layer in words.
        stage: number of its stage.
        run: output of an input, without effect.
        lower_precision: True if it computes in a lower precision than that of its weights.
    """

    place: str
    stage: int
    run: Callable[[Value], Value]
    lower_precision: bool


class _Undecided(Exception):  # noqa: N818 - an outcome, not an error
    pass


def diagnose_shared_layer(layer: SharedLayer, value: Value, samples: int) -> None:
    """Compare a layer's output of a share with those of its halves.

    Args:
        layer: the layer.
        value: input of the layer on a share.
        samples: number of samples.

    Raises:
        ConfigError: they differ.
    """
    positions = positions_of(value, samples)
    if positions is None or positions.length == 1:
        return
    sizes = positions.length // 2, positions.length - positions.length // 2

    def run_half(half: Value) -> Value:
        try:
            return layer.run(half)
        except Exception as error:  # it may need more positions than a half has
            raise _Undecided(str(error)) from error

    def fits(expected: Value, halves: Sequence[Value]) -> bool:
        joined = join_parts(halves, sizes)
        return joined is not None and are_near(expected, joined.value, lower_precision=layer.lower_precision)

    halves = [partial(run_half, half) for half in halves_of(value, positions)]
    try:
        if compare_with_parts(partial(layer.run, value), halves, list, fits):
            return
    except _Undecided as outcome:
        _LOG.warning("%s was not checked on shares of sequences: %s", layer.place, outcome)
        return
    raise ConfigError(
        f"{layer.place} of stage {layer.stage} computes something else of a share of a sequence than of its "
        "halves, so it looks across the sequence; let its attention be cf.attend with a cf.Carry, or train "
        "without cf.ContextParallel"
    )
