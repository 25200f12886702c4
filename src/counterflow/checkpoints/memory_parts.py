"""Which part of a worker's state belongs to which stage, and which stages hold the same layers.

A copy counts by its parts: what all holders of a stage have, and what one of them alone keeps of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from counterflow.runtime.parameters.sharded_updates import Owners
from counterflow.runtime.pipeline import Pipeline

from .state import AVERAGE, AVERAGED, MODEL, OPTIMIZER, first_names, kept_of

Part = tuple[int, ...]
"""Of a stage: (stage,) is what all its holders have, (stage, rank) what that rank alone keeps of it."""


def parts_of(pipeline: Pipeline, keys: Iterable[str]) -> dict[Part, list[str]]:
    """By part of stages those keys of state at hand that belong to it."""
    first = first_names(pipeline)
    of: dict[str, list[Part]] = {}
    for stage, copy in pipeline.stages.items():
        for layer in copy.with_weights:
            for name in layer.state():
                full = layer.names[name]
                of.setdefault(first.get(full, full), []).append((stage,))
    for names, _ in pipeline.weights.unlisted.entries():  # all workers have it
        of[first.get(names[0], names[0])] = [(stage,) for stage in pipeline.stages]
    updated = of if pipeline.weights.owners is None else _owned(pipeline, pipeline.weights.owners)
    parts = {OPTIMIZER: updated, AVERAGE: updated, MODEL: of}
    found: dict[Part, list[str]] = {part: [] for its in (of, updated) for row in its.values() for part in row}
    found |= {(stage,): found.get((stage,), []) for stage in pipeline.stages}
    for key in keys:
        kept = kept_of(key)
        own = [(int(kept.of),)] if kept.kind == AVERAGED else parts.get(kept.kind, {}).get(str(kept.of), ())
        for part in own:
            found[part].append(key)
    return found


def _owned(pipeline: Pipeline, owners: Owners) -> dict[str, list[Part]]:
    """By first name of what is updated here, its parts: of a tied weight also for stages of others alone."""
    found: dict[str, list[Part]] = {}
    for stage, names in enumerate(pipeline.weights.names):
        for first in dict.fromkeys(first for _, first in names):
            if owners.mine(first):
                found.setdefault(first, []).append((stage, pipeline.transport.rank))
    return found


def owned_elsewhere(pipeline: Pipeline) -> list[Part]:
    """The parts of this worker's stages that other ranks alone have."""
    owners, names = pipeline.weights.owners, pipeline.weights.names
    if owners is None:
        return []
    return [
        (stage, rank)
        for stage in pipeline.stages
        for rank in owners.of(first for _, first in names[stage])
        if rank != pipeline.transport.rank
    ]


def overlapping(stages: Iterable[int], layout: Sequence[int], other: Sequence[int]) -> list[int]:
    """The stages of another layout that have layers of these.

    >>> overlapping([0, 2], [2, 4], [3])
    [0, 1]

    Args:
        stages: of the first layout.
        layout: the layers with which its stages begin, after the first.
        other: those of the other one.
    """
    ours, theirs = ((0, *cuts, math.inf) for cuts in (layout, other))
    return sorted(
        {
            stage
            for mine in stages
            for stage in range(len(other) + 1)
            if max(ours[mine], theirs[stage]) < min(ours[mine + 1], theirs[stage + 1])
        }
    )
