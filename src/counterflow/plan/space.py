"""The space of plans: every scheme and its options, depth, width, micro-batch, recomputation, arrangement.

Invariant: a candidate is legal: its schedule builds, its micro-batches make up the mini-batch exactly, it
uses all devices of the cluster. What of the space is left out, and why, is counted (``Omission``).

Depth is the number of workers of a replica; depth times width is the number of devices. A micro-batch has a
power of two of samples, or a number the user gives. Every scheme updates once a mini-batch. PipeDream updates
after each micro-batch, so its micro-batch is a replica's whole share; with ``more_updates`` smaller ones are
tried too, and the mini-batch is then only what its step is counted for.

Options that count are tried at every value where few matter, and then in steps: parts of the model on a
worker (groups, chunks, waves) up to 8, then 2^i and 3·2^i; mixpipe's K and Γ at every value up to depth 16,
then K in eighths of the depth and Γ none or all that is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.schemes.chimera import Concat

from .cluster import Cluster
from .model import Model
from .placement import Arrangement
from .stages import Cuts, Cutting, may_cut

Options = tuple[tuple[str, OptionValue], ...]


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
        more_updates: also pipedream with more than one update in a mini-batch.
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
        depth: D, workers of a replica.
        stages: stages the model is cut into.
        replicas: W.
        samples: B, samples of a micro-batch.
    """

    scheme: str
    options: Options
    depth: int
    stages: int
    replicas: int
    samples: int


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
            devices, a mini-batch or micro-batch below 1.
    """
    if mini_batch < 1:
        raise ConfigError(f"mini_batch={mini_batch}: must be 1 or more")
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
            for group in _of_depth(
                scheme.name, depth, model, cluster.size // depth, (mini_batch, constraints)
            )
        ]
        if not found and depths:
            omissions.append(Omission(scheme.name, _why_none(scheme.name, depths)))
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
            sizes = ", ".join(map(str, constraints.samples or ()))
            yield depth, f"a replica's share of {share} samples cannot be cut into micro-batches of {sizes}"


def _by_reason(without: dict[int, str]) -> Iterator[Omission]:
    for reason in dict.fromkeys(without.values()):
        yield Omission(_named([depth for depth, why in without.items() if why == reason]), reason)


def _named(depths: list[int]) -> str:
    return f"depth{'s' if len(depths) > 1 else ''} {', '.join(map(str, depths))}"


def _of_depth(
    scheme: str, depth: int, model: Model, replicas: int, wanted: tuple[int, Constraints]
) -> Iterator[Group]:
    mini_batch, constraints = wanted
    if depth > len(model.layers) or mini_batch % replicas:
        return
    share = mini_batch // replicas
    sizes = _samples(share, constraints)
    if scheme == "pipedream" and not constraints.more_updates:
        sizes = [share] if constraints.samples is None or share in constraints.samples else []
    for samples in sizes:
        for options, stages in _CHOICES[scheme](depth, share // samples, len(model.layers)):
            if ("concat", Concat.BACKWARD_HALVING.value) in options and samples < 2:
                continue  # half of one sample is none
            if not (constraints.allows(options) and may_cut(model, constraints.cuts, stages)):
                continue
            yield Group(scheme, options, depth, stages, replicas, samples)


def _samples(share: int, constraints: Constraints) -> list[int]:
    """The micro-batches that a replica's share of the mini-batch can be cut into."""
    sizes = constraints.samples
    if sizes is None:
        powers = [2**i for i in range(share.bit_length())]
        sizes = (*powers, *constraints.more_samples)
    return sorted({size for size in sizes if share % size == 0})


Choice = tuple[Options, int]
"""Options of a scheme, and the stages that the model is then cut into."""


def _gpipe(depth: int, micro_batches: int, layers: int) -> Iterator[Choice]:
    for groups in _counts(1, layers // depth):
        yield (*_stages(depth, micro_batches), ("groups", groups)), depth * groups


def _interleaved(depth: int, micro_batches: int, layers: int) -> Iterator[Choice]:
    # With one chunk it is dapple, and one worker has nothing to interleave.
    for chunks in _counts(2, layers // depth) if depth > 1 else ():
        yield (*_workers(depth, micro_batches), ("chunks", chunks)), depth * chunks


def _hanayo(depth: int, micro_batches: int, layers: int) -> Iterator[Choice]:
    for waves in _counts(1, layers // (2 * depth)):
        yield (*_workers(depth, micro_batches), ("waves", waves)), 2 * depth * waves


def _wpipe(depth: int, micro_batches: int, layers: int) -> Iterator[Choice]:
    if micro_batches >= depth and 2 * depth <= layers:
        yield _workers(depth, micro_batches), 2 * depth


def _pipedream(depth: int, _micro_batches: int, _layers: int) -> Iterator[Choice]:
    yield (("stages", depth),), depth


def _pipedream_2bw(depth: int, micro_batches: int, _layers: int) -> Iterator[Choice]:
    if micro_batches >= depth:
        yield _stages(depth, micro_batches), depth


def _dapple(depth: int, micro_batches: int, _layers: int) -> Iterator[Choice]:
    yield _stages(depth, micro_batches), depth


def _gems(depth: int, micro_batches: int, _layers: int) -> Iterator[Choice]:
    if depth % 2 == 0:
        yield _stages(depth, micro_batches), depth


def _chimera(depth: int, micro_batches: int, _layers: int) -> Iterator[Choice]:
    if depth % 2:
        return
    # The ways to go on differ from direct only where something follows the first unit.
    ways = Concat if micro_batches > depth else (Concat.DIRECT,)
    for pairs in (f for f in range(1, depth // 2 + 1) if (depth // 2) % f == 0):
        for way in ways:
            yield (*_stages(depth, micro_batches), ("pairs", pairs), ("concat", way.value)), depth


def _mixpipe(depth: int, micro_batches: int, _layers: int) -> Iterator[Choice]:
    if depth % 2:
        return
    base = _stages(depth, micro_batches)
    fine = depth <= _FINE_DEPTH
    eighths = sorted({2 * round(i * depth / 16) for i in range(1, 9)})
    for injected in range(2, depth + 1, 2) if fine else eighths:
        most = (depth - injected) // 2
        for early in range(most + 1) if fine else sorted({0, most}):
            yield (*base, ("injected", injected), ("early_forwards", early)), depth
    if micro_batches > depth:
        yield (*base, ("injected", "max"), ("early_forwards", 0)), depth


_FINE_DEPTH = 16
"""Up to this depth every K and Γ of mixpipe is tried."""

_FINE_COUNT = 8


def _counts(least: int, most: int) -> Iterator[int]:
    """Every number up to 8, then 2^i and 3·2^i."""
    for count in range(least, most + 1):
        odd = count >> ((count & -count).bit_length() - 1)
        if count <= _FINE_COUNT or odd in (1, 3):
            yield count


def _stages(depth: int, micro_batches: int) -> Options:
    return (("stages", depth), ("micro_batches", micro_batches))


def _workers(depth: int, micro_batches: int) -> Options:
    return (("workers", depth), ("micro_batches", micro_batches))


_CHOICES: dict[str, Callable[[int, int, int], Iterator[Choice]]] = {
    "gpipe": _gpipe,
    "dapple": _dapple,
    "interleaved": _interleaved,
    "gems": _gems,
    "chimera": _chimera,
    "mixpipe": _mixpipe,
    "hanayo": _hanayo,
    "pipedream": _pipedream,
    "pipedream-2bw": _pipedream_2bw,
    "wpipe": _wpipe,
}
"""Every legal choice of a scheme's options for so many workers, micro-batches and layers of the model."""


def _why_none(scheme: str, depths: list[int]) -> str:
    """What a scheme needs, where it has no candidate at any depth."""
    needs = {
        "gems": "an even depth",
        "chimera": "an even depth",
        "mixpipe": "an even depth",
        "interleaved": "two layers or more for each of two workers or more",
        "hanayo": "two layers or more for each worker",
        "wpipe": "two layers for each worker, and as many micro-batches as workers",
        "pipedream": "a micro-batch of a replica's whole share, or more updates",
        "pipedream-2bw": "as many micro-batches as workers",
    }
    rule = f"needs {needs[scheme]}; " if scheme in needs else ""
    return f"{rule}no candidate at {_named(depths)}"
