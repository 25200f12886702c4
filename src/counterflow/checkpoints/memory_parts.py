"""The stage to which each part of a worker's state belongs, and stages that contain the same layers.

A copy consists of parts: state that all holders of a stage have, and state that only one of them holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.state_format import LOSS_SCALE, Owners

from .state_tables import AVERAGE, AVERAGED, MODEL, OPTIMIZER, first_names, state_name

Part = tuple[int, ...]
"""A part of a stage: (stage,) is the state that all its holders have, (stage, rank) the state that only this
rank holds.
"""


def parts_of(pipeline: Pipeline, keys: Iterable[str]) -> dict[Part, list[str]]:
    """Keys of local state by the part of a stage to which they belong."""
    first = first_names(pipeline)
    of: dict[str, list[Part]] = {}
    for stage, local_stage in pipeline.stages.items():
        for layer in local_stage.with_weights:
            for name in layer.state():
                full = layer.names[name]
                of.setdefault(first.get(full, full), []).append((stage,))
    for names, _ in pipeline.weights.extra_state.entries():  # all workers have it
        of[first.get(names[0], names[0])] = [(stage,) for stage in pipeline.stages]
    updated = of if pipeline.weights.owners is None else _owned(pipeline, pipeline.weights.owners)
    parts = {OPTIMIZER: updated, AVERAGE: updated, MODEL: of}
    keys_of_part: dict[Part, list[str]] = {
        part: [] for rows in (of, updated) for row in rows.values() for part in row
    }
    keys_of_part |= {(stage,): keys_of_part.get((stage,), []) for stage in pipeline.stages}
    for key in keys:
        entry = state_name(key)
        replicated = entry.kind in {AVERAGED, LOSS_SCALE}
        parts_of_key = [(int(entry.of),)] if replicated else parts.get(entry.kind, {}).get(str(entry.of), ())
        for part in parts_of_key:
            keys_of_part[part].append(key)
    return keys_of_part


def _owned(pipeline: Pipeline, owners: Owners) -> dict[str, list[Part]]:
    """Parts of each tensor that is updated here, by its first name; a tied weight may belong to stages of
    others only.
    """
    owned: dict[str, list[Part]] = {}
    for stage, names in enumerate(pipeline.weights.names):
        for first in dict.fromkeys(first for _, first in names):
            if owners.owned_here(first):
                owned.setdefault(first, []).append((stage, pipeline.transport.rank))
    return owned


def owned_elsewhere(pipeline: Pipeline) -> list[Part]:
    """Parts of this worker's stages that only other ranks have."""
    owners, names = pipeline.weights.owners, pipeline.weights.names
    if owners is None:
        return []
    return [
        (stage, rank)
        for stage in pipeline.stages
        for rank in owners.of(first for _, first in names[stage])
        if rank != pipeline.transport.rank
    ]


def overlapping(stages: Iterable[int], layout: Sequence[int], stored: Sequence[int]) -> list[int]:
    """The stages of another layout that contain layers of these stages.

    >>> overlapping([0, 2], [2, 4], [3])
    [0, 1]

    Args:
        stages: stages of the first layout.
        layout: the layers with which its stages begin, after the first.
        stored: the layers with which the other layout's stages begin, after the first.
    """
    edges, stored_edges = ((0, *cuts, math.inf) for cuts in (layout, stored))
    return sorted(
        {
            stage
            for current in stages
            for stage in range(len(stored) + 1)
            if max(edges[current], stored_edges[stage]) < min(edges[current + 1], stored_edges[stage + 1])
        }
    )
