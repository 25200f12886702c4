"""The slices of a sequence that a search tries: some numbers of them, equally long and equally fast."""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.errors import ConfigError
from counterflow.schedule.op import OpKind
from counterflow.simulation.layer_cost import LayerCost
from counterflow.simulation.slice_lengths import balanced_slices

from ..inputs.model import Model
from ..inputs.profile import Profile

UNCUT = (1,)
"""Lengths of a sequence that is not cut."""

NUMBERS = (1, 2, 4, 8)
"""Numbers of slices that are tried."""


def unknown_cost(profile: Profile) -> str:
    """Text of the error for slices of a profile without ``positions``."""
    return (
        f"profile {profile.name} has no positions, so it does not know what slices cost; measure it with "
        "counterflow profile, or give positions and each layer's attention_share"
    )


def slicings_of(model: Model, profile: Profile, numbers: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Relative lengths of slices: for each number equal ones, and those that take equally long.

    Args:
        model: what is trained.
        profile: costs of its layers; without ``positions`` it does not know what slices cost.
        numbers: numbers of slices; None: ``NUMBERS``.

    Raises:
        ConfigError: a number is below 1, or slices are asked for that the profile does not know, or of which
            a sequence has too few positions.
    """
    positions = profile.positions
    if numbers is None:
        numbers = [n for n in NUMBERS if n <= positions] if positions and model.execution.slices else UNCUT
    slicings: dict[tuple[int, ...], None] = {}
    costs = {kind: profile.layer(kind).cost() for kind in dict.fromkeys(model.layers)}
    cost = LayerCost.fold([costs[kind] for kind in model.layers], 1.0)
    attention = cost.attention.get(OpKind.FORWARD, 0.0)
    for n in numbers:
        if n < 1:
            raise ConfigError(f"slices={n}: must be 1 or more")
        if n > 1 and not positions:
            raise ConfigError(f"slices={n}: {unknown_cost(profile)}")
        if n > max(positions, 1):
            raise ConfigError(f"slices={n}: a sequence has {positions} positions; give fewer slices")
        slicings[(1,) * n] = None
        if n > 1 and attention:
            multiple = 1 << max(0, (positions // (16 * n)).bit_length() - 1)
            slicings[
                balanced_slices(positions, n, attention=attention, fixed=cost.fixed, multiple=multiple)
            ] = None
    return tuple(slicings)
