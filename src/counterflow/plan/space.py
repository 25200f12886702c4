"""The space of plans: every scheme and its options, depth, width, micro-batch, recomputation, arrangement.

Invariant: a candidate is legal: its schedule builds, its micro-batches make up the mini-batch exactly, it
uses all devices of the cluster. What of the space is left out, and why, is counted (``Omission``).

Depth is the number of workers of a replica; depth times width is the number of devices. A micro-batch has a
power of two of samples, or a number the user gives, and a replica has at most 4,096 of them. Every scheme
updates once a mini-batch. Of one that updates after each micro-batch that is a replica's whole share; with
``more_updates`` smaller ones are tried too, and the mini-batch is then only what its step is counted for.

Which options are worth trying a scheme's own record says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.scheme import Scheme

from .bounds import Options, Shape, shape_of
from .cluster import Cluster
from .device_placement import Arrangement
from .model import Model
from .stages import Cuts, Cutting, may_cut

MOST_SAMPLES = 100_000
"""The largest mini-batch that is planned."""

MOST_MICRO_BATCHES = 4096
"""The most micro-batches of a replica that are tried."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a plan has to be; None leaves it open.

    Attributes:
        schemes: only these.
        synchronous: only schemes that flush, so that no work uses old weights.
        depths: only these numbers of workers.
        samples: only these micro-batches, in samples; they need not be powers of two.
        more_samples: these besides the powers of two.
        recompute: only these.
        sync: only these.
        arrangements: only these.
        cuts: how layers are cut.
        options: (name, values) pairs: a scheme that has an option of that name takes only these values of it.
        more_updates: of schemes that update after each micro-batch, also several updates in a mini-batch.
    """

    schemes: tuple[str, ...] | None = None
    synchronous: bool = False
    depths: tuple[int, ...] | None = None
    samples: tuple[int, ...] | None = None
    more_samples: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    sync: tuple[Sync, ...] = tuple(Sync)
    arrangements: tuple[Arrangement, ...] = tuple(Arrangement)
    cuts: Cuts = Cutting.BALANCED
    options: tuple[tuple[str, tuple[OptionValue, ...]], ...] = ()
    more_updates: bool = False

    def allows(self, options: Options) -> bool:
        """Whether these options of a scheme have only wanted values.

        >>> wanted = Constraints(options=(("pairs", (1,)), ("groups", (1, 2))))
        >>> wanted.allows((("stages", 8), ("pairs", 1))), wanted.allows((("stages", 8), ("pairs", 2)))
        (True, False)
        """
        wanted = dict(self.options)
        return all(value in wanted[name] for name, value in options if name in wanted)


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates that share a schedule: they differ in recomputation, sync mode and arrangement.

    Attributes:
        scheme: the scheme's name.
        options: its options, without ``periods``.
        shape: of its schedule.
        replicas: W.
        samples: B, samples of a micro-batch.
    """

    scheme: str
    options: Options
    shape: Shape
    replicas: int
    samples: int

    @property
    def depth(self) -> int:
        """D, workers of a replica."""
        return self.shape.placement.workers

    @property
    def stages(self) -> int:
        """Stages the model is cut into."""
        return self.shape.placement.stages


@dataclass(frozen=True, slots=True)
class Omission:
    """A part of the space with no candidate in it, and the rule it breaks.

    Attributes:
        what: a scheme, or depths of every scheme.
        reason: the rule, with its numbers.
    """

    what: str
    reason: str


def space(
    model: Model, cluster: Cluster, mini_batch: int, constraints: Constraints
) -> tuple[list[Group], list[Omission]]:
    """All groups of candidates, and what is left out.

    Raises:
        ConfigError: a constraint that nothing can meet: an unknown scheme, a depth that does not divide the
            devices, a mini-batch or micro-batch below 1, a mini-batch above ``MOST_SAMPLES``.
    """
    if mini_batch < 1:
        raise ConfigError(f"mini_batch={mini_batch}: must be 1 or more")
    if mini_batch > MOST_SAMPLES:
        raise ConfigError(f"mini_batch={mini_batch}: at most {MOST_SAMPLES:,} samples are planned")
    for size in (*(constraints.samples or ()), *constraints.more_samples):
        if size < 1:
            raise ConfigError(f"micro_batch={size}: must be 1 or more samples")
    if constraints.schemes is None:
        schemes = list(registry.SCHEMES.values())
    else:
        schemes = list(dict.fromkeys(map(registry.scheme, constraints.schemes)))
    groups: list[Group] = []
    depths = _depths(cluster, constraints)
    without = dict(_without_candidates(model, cluster, mini_batch, depths, constraints))
    omissions = list(_by_reason(without))
    depths = [depth for depth in depths if depth not in without]
    for scheme in schemes:
        if constraints.synchronous and not scheme.synchronous:
            omissions.append(Omission(scheme.name, "works without a flush, and a synchronous plan is wanted"))
            continue
        found = [
            group
            for depth in depths
            for group in _of_depth(scheme, depth, model, cluster.size // depth, (mini_batch, constraints))
        ]
        if not found and depths:
            omissions.append(Omission(scheme.name, _why_none(scheme, depths)))
        groups += found
    return groups, omissions


def _depths(cluster: Cluster, constraints: Constraints) -> list[int]:
    divisors = [d for d in range(1, cluster.size + 1) if cluster.size % d == 0]
    if constraints.depths is None:
        return divisors
    for depth in constraints.depths:
        if depth not in divisors:
            raise ConfigError(
                f"depth={depth}: must divide the {cluster.size} devices of cluster {cluster.name}; "
                f"legal: {', '.join(map(str, divisors))}"
            )
    return sorted(set(constraints.depths))


def _without_candidates(
    model: Model, cluster: Cluster, mini_batch: int, depths: list[int], constraints: Constraints
) -> Iterator[tuple[int, str]]:
    """Depths at which no scheme has a candidate, and why."""
    layers = len(model.layers)
    for depth in depths:
        replicas = cluster.size // depth
        share = mini_batch // replicas
        if depth > layers:
            yield depth, f"more workers than the model's {layers} layers"
        elif mini_batch % replicas:
            reason = f"a mini-batch of {mini_batch} cannot be shared out evenly among {replicas} replicas"
            yield depth, reason
        elif not _samples(share, constraints):
            reason = f"a replica's share of {share} samples cannot be cut into"
            if constraints.samples is not None:
                sizes = ", ".join(map(str, constraints.samples))
                yield depth, f"{reason} micro-batches of {sizes}"
            else:
                yield depth, f"{reason} {MOST_MICRO_BATCHES:,} or fewer micro-batches of a power of two"


def _by_reason(without: dict[int, str]) -> Iterator[Omission]:
    for reason in dict.fromkeys(without.values()):
        yield Omission(_named([depth for depth, why in without.items() if why == reason]), reason)


def _named(depths: list[int]) -> str:
    return f"depth{'s' if len(depths) > 1 else ''} {', '.join(map(str, depths))}"


def _of_depth(
    scheme: Scheme, depth: int, model: Model, replicas: int, wanted: tuple[int, Constraints]
) -> Iterator[Group]:
    mini_batch, constraints = wanted
    if depth > len(model.layers) or mini_batch % replicas:
        return
    share = mini_batch // replicas
    sizes = _samples(share, constraints)
    if scheme.updates_each_micro_batch and not constraints.more_updates:
        sizes = [share] if constraints.samples is None or share in constraints.samples else []
    for samples in sizes:
        for options in _choices(scheme, depth, share // samples, len(model.layers)):
            if not constraints.allows(options):
                continue
            try:
                shape = shape_of(scheme, options)
            except ConfigError:
                continue  # it has no such schedule
            if samples < shape.parts:
                continue  # half of one sample is none
            if may_cut(model, constraints.cuts, shape.placement.stages):
                yield Group(scheme.name, options, shape, replicas, samples)


def _choices(scheme: Scheme, depth: int, micro_batches: int, layers: int) -> Iterator[Options]:
    """All options of a scheme that are worth trying with so many workers and micro-batches."""
    base: dict[str, OptionValue] = {scheme.depth: depth}
    if not scheme.updates_each_micro_batch:
        base["micro_batches"] = micro_batches
    for more in scheme.planner(depth, micro_batches, layers):
        yield tuple((base | dict(more)).items())


def _samples(share: int, constraints: Constraints) -> list[int]:
    """The micro-batches that a replica's share of the mini-batch can be cut into."""
    sizes = constraints.samples
    if sizes is None:
        powers = [2**i for i in range(share.bit_length())]
        sizes = (*powers, *constraints.more_samples)
    return sorted({size for size in sizes if share % size == 0 and share // size <= MOST_MICRO_BATCHES})


def _why_none(scheme: Scheme, depths: list[int]) -> str:
    """What a scheme needs, where it has no candidate at any depth."""
    rule = f"needs {scheme.needs}; " if scheme.needs else ""
    return f"{rule}no candidate at {_named(depths)}"
