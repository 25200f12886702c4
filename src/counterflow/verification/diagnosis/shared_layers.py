"""Diagnosis of layers on shares of sequences: whether they treat each position for itself.

A layer runs on a share and on its halves. So the diagnosis finds a layer that looks across the sequence, of
which the share is a part: a convolution, attention, a norm over positions; and one that adds a loss which is
no mean over positions, as the balance of each sequence.

It does not find a layer whose halves are all that it looks at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from counterflow.errors import ConfigError

from .comparison import compare_with_parts, distance
from .sequence_parts import Value, are_near, halves_of, join_parts, positions_of
from .tolerances import COARSE, LOSSES

_LOG = logging.getLogger(__name__)


Result = tuple[Value, Mapping[str, Tensor]]
"""Output of a layer, and the losses that it adds, by name."""


class SharedLayer(NamedTuple):
    """A layer that is given shares of sequences.

    Attributes:
        place: the layer in words.
        stage: number of its stage.
        run: result of an input, without effect.
        lower_precision: True if it computes in a lower precision than that of its weights.
    """

    place: str
    stage: int
    run: Callable[[Value], Result]
    lower_precision: bool


class _Undecided(Exception):  # noqa: N818 - an outcome, not an error
    pass


def diagnose_shared_layer(layer: SharedLayer, value: Value, samples: int) -> None:
    """Compare a layer's result of a share with those of its halves.

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

    def run_half(half: Value) -> Result:
        try:
            return layer.run(half)
        except Exception as error:  # it may need more positions than a half has
            raise _Undecided(str(error)) from error

    def fits(expected: Result, halves: Sequence[Result]) -> bool:
        joined = join_parts([output for output, _ in halves], sizes)
        near = joined is not None and are_near(
            expected[0], joined.value, lower_precision=layer.lower_precision
        )
        if near:
            _refuse_terms(layer, expected[1], [terms for _, terms in halves], sizes)
        return near

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


def _refuse_terms(
    layer: SharedLayer,
    expected: Mapping[str, Tensor],
    halves: Sequence[Mapping[str, Tensor]],
    sizes: Sequence[int],
) -> None:
    for name, term in expected.items():
        parts = [terms[name] for terms in halves if name in terms]
        if len(parts) < len(halves):
            raise _Undecided(f"it adds {name!r} for the share and not for its halves")
        mean = sum(size * part.double() for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        limit = COARSE if layer.lower_precision else LOSSES.of(term.dtype)
        if distance(term.double(), mean) > limit:  # type: ignore[arg-type]
            raise ConfigError(
                f"{layer.place} of stage {layer.stage} adds {name!r} to the loss by cf.add_loss, which is no "
                f"mean over positions: of a share of a sequence it is {term:g}, and of its halves {mean:g}; "
                "add a mean of what each token makes by itself, or train without cf.ContextParallel"
            )
