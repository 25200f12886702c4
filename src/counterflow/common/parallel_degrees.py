"""Degrees of parallelism beside replicas and pipeline: one record for configs, plans and meshes.

A worker of a schedule is dp_shard · cp · tp ranks, its positions, counted in this order, the last one
fastest. The experts of a layer are divided over some of them, so a degree of experts adds no ranks. Names are
torchtitan's; its ``dp_replicate`` and ``pp`` are the pipeline's replicas and workers.

A new degree is a field of ``Degrees``, a row of ``DEGREES``, and a key where users give it: in the table
``[mesh]`` of a config and in the constraints of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from counterflow.errors import ConfigError


class DegreeNames(NamedTuple):
    """Names of a degree where it is not called as in the mesh.

    Attributes:
        letter: in tables of plans.
        plan_key: in plan files.
    """

    letter: str
    plan_key: str


DEGREES = {
    "dp_shard": DegreeNames("S", "dp_shard"),
    "cp": DegreeNames("C", "context_parallel"),
    "tp": DegreeNames("T", "tensor_parallel"),
    "ep": DegreeNames("E", "expert_parallel"),
}
"""Names of each degree, in the order of tables."""


class BorrowedPositions(NamedTuple):
    """Positions of each degree that experts are divided over; their product is the degree of experts.

    Attributes:
        dp_shard: positions with samples of their own.
        cp: positions that share sequences.
        tp: positions of tensor parallelism.
    """

    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism of a worker.

    Attributes:
        dp_shard: positions with samples of their own. They and those of ``cp`` shard weights.
        cp: positions that share each sequence.
        tp: positions of tensor parallelism, which share the work of each layer.
        ep: positions among which the experts of a layer are divided: a divisor of ``dp_shard * cp * tp``.

    Raises:
        ConfigError: a degree is below 1, or ``ep`` does not divide the positions.

    >>> Degrees(tp=2, ep=4)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: ep = 4: must divide dp_shard * cp * tp = 2
    >>> Degrees(2, 2, 2, 4).positions, Degrees(4, 2, 1, 2).expert_shards, Degrees(2, 2, 2, 2).expert_shards
    (8, 4, 4)
    """

    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        refuse_degrees({name: getattr(self, name) for name in DEGREES})

    @property
    def positions(self) -> int:
        """P, number of ranks that hold a stage together."""
        return self.shards * self.tp

    @property
    def shards(self) -> int:
        """Positions over which weights are sharded."""
        return self.dp_shard * self.cp

    @property
    def borrowed(self) -> BorrowedPositions:
        """Positions over which experts are divided: of ``tp`` first, which are closest, then of ``cp``.

        >>> Degrees(2, 2, 2, 8).borrowed, Degrees(3, 2, 2, 3).borrowed.dp_shard
        (BorrowedPositions(dp_shard=2, cp=2, tp=2), 3)
        """
        return borrowed_positions(self.ep, cp=self.cp, tp=self.tp)

    @property
    def expert_shards(self) -> int:
        """Positions over which the weights of the same experts are sharded."""
        return self.shards * self.borrowed.tp // self.ep


def refuse_degrees(degrees: Mapping[str, int], prefix: str = "") -> None:
    """Refuse degrees that no mesh can have.

    Args:
        degrees: all degrees by name.
        prefix: text before each name in errors.

    Raises:
        ConfigError: a degree is below 1, or that of experts does not divide the positions.
    """
    for name, degree in degrees.items():
        if degree < 1:
            raise ConfigError(f"{prefix}{name} = {degree}: must be 1 or more")
    of_positions = [name for name in degrees if name != "ep"]
    positions = math.prod(degrees[name] for name in of_positions)
    if positions % degrees["ep"]:
        product = " * ".join(f"{prefix}{name}" for name in of_positions)
        raise ConfigError(f"{prefix}ep = {degrees['ep']}: must divide {product} = {positions}")


def above_one(degrees: Degrees) -> dict[str, int]:
    """Degrees above 1, by name."""
    return {name: degree for name in DEGREES if (degree := getattr(degrees, name)) > 1}


def by_letter(degrees: Degrees) -> dict[str, int]:
    """All degrees by their letters in tables of plans."""
    return {names.letter: getattr(degrees, name) for name, names in DEGREES.items()}


def text_of(degrees: Degrees) -> str:
    """Degrees as messages on plans name them.

    >>> text_of(Degrees(tp=2)), text_of(Degrees(cp=2, tp=2))
    ('tensor_parallel=2', 'cp 2, tp 2')
    """
    if degrees.shards == degrees.ep == 1:
        return f"{DEGREES['tp'].plan_key}={degrees.tp}"
    return ", ".join(f"{name} {degree}" for name, degree in above_one(degrees).items())


def borrowed_positions(ep: int, *, cp: int, tp: int) -> BorrowedPositions:
    """Positions that experts borrow, and the least ``dp_shard`` for a degree of experts.

    >>> borrowed_positions(8, cp=2, tp=2)
    BorrowedPositions(dp_shard=2, cp=2, tp=2)
    """
    tensors = math.gcd(ep, tp)
    contexts = math.gcd(ep // tensors, cp)
    return BorrowedPositions(ep // tensors // contexts, contexts, tensors)
