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
from .search.search import search
from .search.search_result import Plan
from .search.slicings import NUMBERS, unknown_cost
from .task import PlanningTask

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
    "kept_output_gradient_bytes",
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
        unsliced: the best plan without slices.
        sliced: the best plan with slices.
    """

    positions: int
    unsliced: Plan | None
    sliced: Plan | None

    @property
    def slices_win(self) -> bool:
        """True if the plan with slices is faster, or the only one that fits."""
        if self.sliced is None:
            return False
        return self.unsliced is None or self.sliced.seconds < self.unsliced.seconds

    @property
    def faster(self) -> float | None:
        """Speed of the plan with slices in that of the plan without; None: one of them does not fit."""
        if self.unsliced is None or self.sliced is None:
            return None
        return self.unsliced.seconds / self.sliced.seconds


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
    seconds_factor = fixed + (1.0 - fixed - layer.attention_share) * times + attention
    scaled: dict[str, Any] = {
        name: tuple(seconds_factor * value for value in getattr(layer, name)) for name in _SECONDS
    }
    scaled |= {name: tuple(times * value for value in getattr(layer, name)) for name in _BYTES}
    experts, contexts = layer.experts, layer.contexts
    return replace(
        layer,
        **scaled,
        experts=experts and replace(experts, sent_bytes=times * experts.sent_bytes),
        contexts=contexts and replace(contexts, gathered_bytes=times * contexts.gathered_bytes),
        output_bytes=times * layer.output_bytes,
        state_bytes=times * layer.state_bytes,
        attention_share=attention / seconds_factor,
        fixed_share=fixed / seconds_factor,
    )


def _model_of_length(model: Model, times: float) -> Model:
    skips = tuple(replace(skip, size_bytes=times * skip.size_bytes) for skip in model.skips)
    return replace(model, input_bytes=times * model.input_bytes, skips=skips)


def plans_by_length(
    task: PlanningTask,
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
    numbers = tuple(n for n in constraints.slices or NUMBERS if n > 1)
    if not numbers:
        raise ConfigError("slices=1: to compare slices by length, give 2 or more too, or omit it")
    plans = []
    for number, factor in enumerate(times):
        model, profile = _model_of_length(task.model, factor), of_length(task.profile, factor)
        if progress is not None:
            progress(number, len(times), f"{profile.positions:,} positions")

        def best(*slices: int, model: Model = model, profile: Profile = profile) -> Plan | None:
            requirements = replace(constraints, slices=slices)
            try:
                return search(model, profile, task.cluster, task.mini_batch, requirements, count=1).best[0]
            except PlanError:
                return None

        fitting = tuple(n for n in numbers if n <= profile.positions)
        plans.append(AtLength(profile.positions, best(1), best(*fitting) if fitting else None))
    return tuple(plans)


def slices_win_from(lengths: Sequence[AtLength]) -> AtLength | None:
    """The shortest length at which slices win, there and at all longer ones; None: at none."""
    first = None
    for length in reversed(lengths):
        if not length.slices_win:
            break
        first = length
    return first
