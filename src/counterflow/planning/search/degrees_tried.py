"""The degrees of a worker's positions that a search tries: those of the constraints, or those that fit.

Invariant: without experts in the profile, and without constraints, a worker is one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from counterflow.common.parallel_degrees import Degrees, borrowed_positions
from counterflow.errors import ConfigError

from ..cost.degrees import expert_degrees, places
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile import Profile
from .constraints import Constraints


def degrees_tried(
    model: Model, profile: Profile, cluster: Cluster, constraints: Constraints
) -> list[Degrees]:
    """Degrees to try, in the order of the search, without those that no constraint names and that do not fit.

    Args:
        model: what is trained.
        profile: costs of its layers; its experts are divided.
        cluster: the devices.
        constraints: constraints on a plan.

    Raises:
        ConfigError: degrees that constraints name do not fit each other.
    """
    layers = map(profile.layer, dict.fromkeys(model.layers))
    counts = {layer.experts.count for layer in layers if layer.experts is not None}
    experts = constraints.experts
    if experts is None:
        experts = tuple(expert_degrees(math.gcd(*counts))) if counts else (1,)
    tried: dict[Degrees, None] = {}
    for tensor, context, expert in product(constraints.tensor_parallel, constraints.contexts, experts):
        _require_positive(tensor_parallel=tensor, contexts=context, experts=expert)
        least = borrowed_positions(expert, cp=context, tp=tensor).dp_shard
        for shards in constraints.shards or (least,):
            if shards < 1:
                raise ConfigError(f"shards={shards}: must be 1 or more")
            if constraints.shards is not None and shards * context * tensor % expert:
                continue
            degrees = Degrees(shards, context, tensor, expert)
            if constraints.experts is not None or expert == 1 or _fits(degrees, model, cluster, constraints):
                tried[degrees] = None
    if not tried:
        raise ConfigError(
            f"experts={', '.join(map(str, experts))}: must divide shards · contexts · tensor parallelism; "
            "give such shards, or "
            "omit them"
        )
    return [*tried]


def _require_positive(**degrees: int) -> None:
    for name, degree in degrees.items():
        if degree < 1:
            raise ConfigError(f"{name}={degree}: must be 1 or more")


def _fits(degrees: Degrees, model: Model, cluster: Cluster, constraints: Constraints) -> bool:
    slices = constraints.slices is None or 1 in constraints.slices
    if model.shards_state or model.ties or model.gradient_share < 1:
        return False
    if 0 not in constraints.zero_stages or not slices:
        return False
    try:
        places(cluster, degrees)
    except ConfigError:
        return False
    return True


def words(degrees: Degrees) -> Iterator[str]:
    """Degrees above 1, for people."""
    if degrees.tp > 1:
        yield f"tensor parallelism over {degrees.tp}"
    if degrees.cp > 1:
        yield f"contexts over {degrees.cp}"
    if degrees.ep > 1:
        yield f"experts over {degrees.ep}"
    if degrees.shards > 1:
        yield f"weights sharded over {degrees.shards}"
