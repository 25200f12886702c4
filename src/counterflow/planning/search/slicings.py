"""The slices of a sequence that a search tries: some numbers of them, equally long and equally fast."""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.errors import ConfigError
from counterflow.simulation.slice_lengths import balanced_slices

from ..cost.slice_costs import SliceCost
from ..inputs.model import Model
from ..inputs.profile import Profile

WHOLE = (1,)
"""Lengths of a sequence that is not cut."""

TRIED = (1, 2, 4, 8)
"""Numbers of slices that are tried."""


def unknown_cost(profile: Profile) -> str:
    """Why a profile without ``positions`` is of no use for slices, and what to do; for errors."""
    return (
        f"profile {profile.name} has no positions, so it does not know what slices cost; measure it with "
        "counterflow profile, or give positions and each layer's attention_share"
    )


def slicings_of(model: Model, profile: Profile, numbers: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Relative lengths of slices: for each number equal ones, and those that take equally long.

    Args:
        model: what is trained.
        profile: costs of its layers; without ``positions`` it does not know what slices cost.
        numbers: numbers of slices; None: ``TRIED``.

    Raises:
        ConfigError: a number is below 1, or slices are asked for that the profile does not know, or of which
            a sequence has too few positions.
    """
    known = profile.positions
    if numbers is None:
        numbers = [n for n in TRIED if n <= known] if known and model.execution.slices else WHOLE
    found: dict[tuple[int, ...], None] = {}
    cost = SliceCost.of([profile.layer(kind) for kind in model.layers], 1.0)
    for n in numbers:
        if n < 1:
            raise ConfigError(f"slices={n}: must be 1 or more")
        if n > 1 and not known:
            raise ConfigError(f"slices={n}: {unknown_cost(profile)}")
        if n > max(known, 1):
            raise ConfigError(f"slices={n}: a sequence has {known} positions; give fewer slices")
        found[(1,) * n] = None
        if n > 1 and cost.attention:
            multiple = 1 << max(0, (known // (16 * n)).bit_length() - 1)
            found[
                balanced_slices(known, n, attention=cost.attention, fixed=cost.fixed, multiple=multiple)
            ] = None
    return tuple(found)
