"""Plans at other lengths of the sequence: from which length slices win, and by what.

A layer's seconds at another length follow from its shares: what is fixed stays, what is in proportion grows
with the length, attention with its square. Bytes of activations and messages grow with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from counterflow.errors import ConfigError, PlanError

from .inputs.model import Model
from .inputs.profile import LayerProfile, Profile
from .search.constraints import Constraints
from .search.found import Plan
from .search.search import search
from .search.slicings import TRIED, unknown_cost
from .task import Task

TIMES = (0.25, 0.5, 1, 2, 4, 8, 16)
"""Lengths that are planned, in the profile's own."""

_SECONDS = (
    "forward_seconds",
    "backward_seconds",
    "input_gradient_seconds",
    "weight_gradients_seconds",
)
_BYTES = (
    "saved_bytes",
    "kept_bytes",
    "kept_input_bytes",
    "kept_output_bytes",
    "kept_gradient_bytes",
    "kept_anyway_bytes",
    "held_input_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "input_gradient_peak_bytes",
    "weight_gradients_peak_bytes",
)


@dataclass(frozen=True, slots=True)
class AtLength:
    """The best plans at one length; None where none fits.

    Attributes:
        positions: positions of a sample's sequence.
        whole: the best plan without slices.
        sliced: the best plan with slices.
    """

    positions: int
    whole: Plan | None
    sliced: Plan | None

    @property
    def slices_win(self) -> bool:
        """Whether the plan with slices is faster, or the only one that fits."""
        if self.sliced is None:
            return False
        return self.whole is None or self.sliced.seconds < self.whole.seconds

    @property
    def faster(self) -> float | None:
        """How many times as fast the plan with slices is; None: one of them does not fit."""
        if self.whole is None or self.sliced is None:
            return None
        return self.whole.seconds / self.sliced.seconds


def of_length(profile: Profile, times: float) -> Profile:
    """The profile of sequences of another length, a multiple of its own.

    >>> layer = LayerProfile((1.0,), (1.0,), (2.0,), (8.0,), 4.0, 6.0, attention_share=0.5)
    >>> longer = of_length(Profile("p", "m", "d", {"block": layer}, positions=64), 2).layers["block"]
    >>> longer.forward_seconds, longer.saved_bytes, longer.attention_share  # 0.5 · 2 and 0.5 · 4
    ((3.0,), (16.0,), 0.6666666666666666)
    """
    layers = {kind: _of_length(layer, times) for kind, layer in profile.layers.items()}
    return replace(profile, layers=layers, positions=round(times * profile.positions))


def _of_length(layer: LayerProfile, times: float) -> LayerProfile:
    fixed, attention = layer.fixed_share, layer.attention_share * times**2
    whole = fixed + (1.0 - fixed - layer.attention_share) * times + attention
    scaled: dict[str, Any] = {
        name: tuple(whole * value for value in getattr(layer, name)) for name in _SECONDS
    }
    scaled |= {name: tuple(times * value for value in getattr(layer, name)) for name in _BYTES}
    return replace(
        layer,
        **scaled,
        output_bytes=times * layer.output_bytes,
        state_bytes=times * layer.state_bytes,
        attention_share=attention / whole,
        fixed_share=fixed / whole,
    )


def _model_of_length(model: Model, times: float) -> Model:
    skips = tuple(replace(skip, size_bytes=times * skip.size_bytes) for skip in model.skips)
    return replace(model, input_bytes=times * model.input_bytes, skips=skips)


def plans_by_length(
    task: Task,
    constraints: Constraints,
    *,
    times: Sequence[float] = TIMES,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[AtLength, ...]:
    """The best plans with and without slices at several lengths of the sequence.

    Args:
        task: what is planned; its mini-batch has as many samples at every length.
        constraints: constraints on a plan; of its ``slices`` those above 1 are tried.
        times: the lengths, in the profile's ``positions``.
        progress: called with the lengths done, their number, and the current one.

    Raises:
        ConfigError: the profile does not know what slices cost.
    """
    if not task.profile.positions:
        raise ConfigError(unknown_cost(task.profile))
    numbers = tuple(n for n in constraints.slices or TRIED if n > 1)
    if not numbers:
        raise ConfigError("slices=1: to compare slices by length, give 2 or more too, or leave it out")
    found = []
    for number, each in enumerate(times):
        model, profile = _model_of_length(task.model, each), of_length(task.profile, each)
        if progress is not None:
            progress(number, len(times), f"{profile.positions:,} positions")

        def best(*slices: int, model: Model = model, profile: Profile = profile) -> Plan | None:
            wanted = replace(constraints, slices=slices)
            try:
                return search(model, profile, task.cluster, task.mini_batch, wanted, count=1).best[0]
            except PlanError:
                return None

        fitting = tuple(n for n in numbers if n <= profile.positions)
        found.append(AtLength(profile.positions, best(1), best(*fitting) if fitting else None))
    return tuple(found)


def slices_win_from(lengths: Sequence[AtLength]) -> AtLength | None:
    """The shortest length at which slices win, there and at all longer ones; None: at none."""
    first = None
    for each in reversed(lengths):
        if not each.slices_win:
            break
        first = each
    return first
