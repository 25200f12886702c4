"""Costs of a model's layers from those of its groups, as if all layers had been measured together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from torch import nn

from counterflow.runtime.workers.world import current_transport

from .layer_groups import LayerGroup
from .layer_times import AtLengths, AtSize
from .optimizer_trial import updates_together
from .subject_pipeline import Subject


def joined_sizes(
    groups: Sequence[LayerGroup], results: Sequence[AtSize], layers: Sequence[nn.Module], subject: Subject
) -> AtSize:
    """Costs of all layers at a size.

    Args:
        groups: the groups.
        results: costs of each group's subject.
        layers: layers of all groups.
        subject: the subject of the measurement.
    """
    if len(groups) == 1:
        return results[0]
    weights = [_trained(layers[group.start : group.stop]) for group in groups]
    trained = [sum(weight.nbytes for weight in of_group) for of_group in weights]
    counts = [group.stop - group.start for group in groups]
    update = replace(
        results[0].update,
        layers=tuple(n for group, x in zip(groups, results, strict=True) for n in group.of(x.update.layers)),
        together=updates_together(subject.optimizer, current_transport().device),
        states=_mean([result.update.states for result in results], trained),
        norm_bytes_per_byte=max(result.update.norm_bytes_per_byte for result in results),
        norm_peak_bytes=_norm_peak(
            [sum(weight.numel() for weight in of_group) for of_group in weights],
            [result.update.norm_peak_bytes for result in results],
        ),
    )
    return AtSize(
        results[0].size,
        tuple(cost for group, x in zip(groups, results, strict=True) for cost in group.of(x.costs)),
        _mean([result.overhead_seconds for result in results], counts),
        _mean([result.update_seconds_per_byte for result in results], trained),
        update,
        tuple(map(sum, zip(*(result.by_worker for result in results), strict=True))),
        fmean(result.waiting for result in results),
    )


def joined_lengths(groups: Sequence[LayerGroup], results: Sequence[AtLengths | None]) -> AtLengths | None:
    """Costs of all layers at shorter sequences; None: a group has none."""
    known = [result for result in results if result is not None]
    if len(known) < len(groups):
        return None
    parts = [*zip(groups, known, strict=True)]
    seconds = tuple(
        tuple(time for group, result in parts for time in group.of(result.seconds[number]))
        for number in range(len(known[0].lengths))
    )
    state_bytes = tuple(size for group, result in parts for size in group.of(result.state_bytes))
    return replace(known[0], seconds=seconds, state_bytes=state_bytes)


def _norm_peak(elements: Sequence[int], peaks: Sequence[int]) -> int:
    """Memory of the norm of all gradients: of pieces of float64, each a group's unless that is too large."""
    rests = [peak - _FLOAT64 * count for count, peak in zip(elements, peaks, strict=True) if count]
    return max(peaks) if min(rests, default=-1) < 0 else _FLOAT64 * sum(elements) + max(rests)


_FLOAT64 = 8
"""Bytes of a number in which norms are computed."""


def _trained(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    weights = {id(x): x for layer in layers for x in layer.parameters() if x.requires_grad}
    return [*weights.values()]


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / max(1, sum(weights))
