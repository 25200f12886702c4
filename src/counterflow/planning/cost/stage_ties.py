"""Weights that layers of several stages share."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..inputs.model import Model


@dataclass(frozen=True, slots=True)
class StageTie:
    """Weights that several stages share; a worker holds one copy of them.

    Attributes:
        stages: the stages, ascending.
        trained_bytes: bytes of the trained ones.
        gradient_bytes: bytes of their gradients.
        copy_bytes: bytes of all, with gradients and optimiser state.
    """

    stages: tuple[int, ...]
    trained_bytes: float
    gradient_bytes: float
    copy_bytes: float


def stage_ties(
    model: Model, cuts: Sequence[int]
) -> tuple[tuple[StageTie, ...], list[tuple[float, float, float]]]:
    """Weights that several stages share, and for each stage the bytes that several of its layers share,
    without one copy.

    The bytes are those of all weights, of the trained ones, and of their gradients.
    """
    ties: dict[tuple[int, ...], tuple[float, float, float]] = {}
    within = [(0.0, 0.0, 0.0)] * (len(cuts) + 1)
    for tie in model.ties:
        on = [bisect_right(cuts, layer) for layer in tie.layers]
        trained, gradient = tie.size_bytes if tie.trained else 0.0, tie.gradient_bytes
        for stage, layers in Counter(on).items():
            more = ((layers - 1) * size for size in (tie.size_bytes, trained, gradient))
            all_bytes, trained_bytes, gradient_bytes = (
                amount + added for amount, added in zip(within[stage], more, strict=True)
            )
            within[stage] = all_bytes, trained_bytes, gradient_bytes
        if len(stages := tuple(sorted({*on}))) > 1:
            summed, gradients, total = ties.get(stages, (0.0, 0.0, 0.0))
            total += tie.size_bytes + gradient + trained * model.optimizer_states
            ties[stages] = summed + trained, gradients + gradient, total
    return tuple(StageTie(stages, *row) for stages, row in sorted(ties.items())), within
