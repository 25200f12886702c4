"""The space of plans: every scheme and its options, depth, width, micro-batch, recomputation, arrangement,
and whether optimiser state is sharded.

Invariant: a candidate is legal: its schedule builds, its micro-batches make up the mini-batch exactly, it
uses all devices of the cluster. Omitted parts of the space, and the reasons, are counted (``Omission``).

Depth is the number of workers of a replica; depth times width is the number of devices. A micro-batch has a
power of two of samples, or a number the user gives, and a replica has at most 4,096 of them. Every scheme
updates once per mini-batch. For a scheme that updates after each micro-batch, the micro-batch is a replica's
whole share; with ``more_updates`` smaller ones are tried too, and the mini-batch is then only the unit of its
step.

A scheme's own record says which options are worth trying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from counterflow.common.parallel_degrees import Degrees
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.cuts import explicit
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.orders.slices import slices_option
from counterflow.schedule.scheme import DEPTH, PERIODS, SLICES, Scheme

from ..cost.sharded_state import several_hold
from ..cost.stages import Cutting, may_cut
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile import Profile
from .constraints import Constraints, value_of
from .shape import Options, WorkloadShape, shape_of

MOST_SAMPLES = 100_000
"""Maximum samples of a mini-batch."""

STALE = "is asynchronous, with old weights: only tried where stale plans are allowed"
"""Reason of an omission; it names no flag, because ``schedule="auto"`` has none."""

COPIES = "several copies of a stage"
"""Plans without which a model is planned if copies of its layers would differ."""

_ONE_POSITION = Degrees()

MOST_MICRO_BATCHES = 4096
"""Maximum micro-batches of a replica that are tried."""


@dataclass(frozen=True, slots=True)
class CandidateGroup:
    """Candidates that share a schedule: they differ in recomputation, sync mode, arrangement, ``zero_stage``.

    Attributes:
        scheme: the scheme's name.
        options: its options, without ``periods``.
        shape: shape of its schedule.
        replicas: W, the number of replicas.
        samples: B, samples of a micro-batch.
        zero_stages: values of ``zero_stage`` to try.
    """

    scheme: str
    options: Options
    shape: WorkloadShape
    replicas: int
    samples: int
    zero_stages: tuple[int, ...] = (0,)

    @property
    def depth(self) -> int:
        """D, workers of a replica."""
        return self.shape.placement.workers

    @property
    def stages(self) -> int:
        """Number of stages into which the model is cut."""
        return self.shape.placement.stages


@dataclass(frozen=True, slots=True)
class Omission:
    """A part of the space without a candidate, and the rule it breaks.

    Attributes:
        what: a scheme, depths of every scheme, or plans with copies of a stage or small micro-batches.
        reason: the rule, with its numbers.
    """

    what: str
    reason: str


def space(
    model: Model,
    cluster: Cluster,
    mini_batch: int,
    constraints: Constraints,
    slicings: Sequence[tuple[int, ...]] = ((1,),),
    *,
    degrees: Degrees = _ONE_POSITION,
) -> tuple[list[CandidateGroup], list[Omission]]:
    """All groups of candidates, and the omitted parts.

    Args:
        model: what is trained.
        cluster: the places of workers.
        mini_batch: samples of an update.
        constraints: constraints on a plan.
        slicings: relative lengths of slices to try; one length: micro-batches are not sliced.
        degrees: degrees of a worker's positions.

    Raises:
        ConfigError: a constraint cannot be met: an unknown scheme, an option that no chosen scheme has, or an
            illegal value of it, cuts that make no stages, a depth that does not divide the devices, a
            mini-batch or micro-batch below 1, a mini-batch above ``MOST_SAMPLES``.
    """
    if constraints.schemes is None:
        schemes = list(registry.SCHEMES.values())
    else:
        schemes = list(dict.fromkeys(map(registry.scheme, constraints.schemes)))
    _refuse_what_nothing_meets(model, mini_batch, constraints, schemes)
    groups: list[CandidateGroup] = []
    depths = _depths(cluster, constraints)
    dp_shard = degrees.dp_shard
    without = dict(_without_candidates(model, cluster, mini_batch, depths, constraints, dp_shard=dp_shard))
    omissions = list(_by_reason(without))
    depths = [depth for depth in depths if depth not in without]
    for scheme in schemes:
        if not (scheme.synchronous or constraints.stale or constraints.schemes):
            omissions.append(Omission(scheme.name, STALE))
            continue
        if not scheme.synchronous and degrees.shards > 1:
            reason = "updates each stage at its own time, but positions of a worker need a synchronous scheme"
            omissions.append(Omission(scheme.name, reason))
            continue
        if not scheme.synchronous and not _zero_stages(model, constraints, flush=False):
            reason = "updates each stage at its own time, but zero_stage = 1 needs a synchronous scheme"
            omissions.append(Omission(scheme.name, reason))
            continue
        if not scheme.synchronous and any(tie.trained for tie in model.ties):
            reason = "updates each stage at its own time, but shared weights need a synchronous scheme"
            omissions.append(Omission(scheme.name, reason))
            continue
        members = [
            sliced
            for depth in depths
            for group in _of_depth(
                scheme, depth, model, cluster.size // depth, (mini_batch // dp_shard, constraints)
            )
            for sliced in _sliced(group, scheme, slicings)
        ]
        if not members and depths:
            reason = _why_none(scheme, depths, model, cluster, (mini_batch // dp_shard, constraints))
            omissions.append(Omission(scheme.name, reason))
        groups += members
    return groups, omissions


def runnable(
    groups: Sequence[CandidateGroup], model: Model, profile: Profile, degrees: Degrees = _ONE_POSITION
) -> tuple[list[CandidateGroup], list[Omission]]:
    """The groups with as few copies of a stage and as large micro-batches as layers need, and the omissions.

    Args:
        groups: groups of candidates.
        model: what is trained.
        profile: costs of its layers.
        degrees: degrees of a worker's positions.
    """
    kinds = [kind for kind in dict.fromkeys(model.layers) if profile.layer(kind).one_copy]
    single = [
        x for x in groups if not (kinds and several_hold(x.shape.placement, x.replicas * degrees.dp_shard))
    ]
    large = [x for x in single if x.samples >= x.shape.parts * profile.min_samples]
    omissions = []
    if len(single) < len(groups):
        omissions.append(Omission(COPIES, _why_one_copy(kinds)))
    if len(large) < len(single):
        reason = f"layers raised an error with less than {plural(profile.min_samples, 'sample')}"
        omissions.append(Omission("smaller micro-batches", reason))
    return large, omissions


def _why_one_copy(kinds: Sequence[str]) -> str:
    return f"training changes buffers or weights of {', '.join(kinds)}, and each copy would change its own"


def _refuse_what_nothing_meets(
    model: Model, mini_batch: int, constraints: Constraints, schemes: Sequence[Scheme]
) -> None:
    if mini_batch < 1:
        raise ConfigError(f"mini_batch={mini_batch}: must be 1 or more")
    if mini_batch > MOST_SAMPLES:
        raise ConfigError(f"mini_batch={mini_batch}: at most {MOST_SAMPLES:,} samples are supported")
    for size in (*(constraints.samples or ()), *constraints.more_samples):
        if size < 1:
            raise ConfigError(f"micro_batch={size}: must be 1 or more samples")
    for name, values in constraints.options:
        _refuse_option(name, values, schemes)
    for stage in constraints.zero_stages:
        if stage not in (0, 1):
            raise ConfigError(f"zero_stage={stage}: must be 0 or 1")
    if not model.barrier and 0 not in constraints.zero_stages:
        raise ConfigError(
            "zero_stage=1: updated weights are sent when a step ends on all workers, which does not happen "
            "with "
            "barrier = false; use only one of them"
        )
    if not isinstance(constraints.cuts, Cutting):
        explicit(constraints.cuts, len(model.layers), len(constraints.cuts) + 1)


def _zero_stages(model: Model, constraints: Constraints, *, flush: bool) -> tuple[int, ...]:
    values = constraints.zero_stages
    if model.shards_state and values == Constraints().zero_stages:
        values = (1,)
    return tuple(sorted({stage for stage in values if not stage or (flush and model.barrier)}))


def _refuse_option(name: str, values: Sequence[OptionValue], schemes: Sequence[Scheme]) -> None:
    of, _, option_name = name.rpartition(".")
    place = f"option={name}"
    accepting = [scheme for scheme in schemes if not of or scheme == registry.scheme(of)]
    if not accepting:
        names = ", ".join(scheme.name for scheme in schemes)
        raise ConfigError(f"{place}: {of} is not among the chosen schemes ({names})")
    if option_name in DEPTH:
        raise ConfigError(f"{place}: the depth has a constraint of its own; give depth={values[0]}")
    if option_name == PERIODS.name:
        raise ConfigError(f"{place}: a plan simulates as many updates as needed; omit it")
    known = [option for scheme in accepting if (option := scheme.option(option_name)) is not None]
    if not known:
        chosen = {o.name: None for scheme in accepting for o in scheme.options if o.name not in _NO_CHOICE}
        who = (
            accepting[0].name
            if len(accepting) == 1
            else f"none of {', '.join(scheme.name for scheme in accepting)}"
        )
        has = (
            f"{who} has no option {option_name!r}"
            if len(accepting) == 1
            else f"{who} has an option {option_name!r}"
        )
        raise ConfigError(f"{place}: {has}; options that can be constrained: {', '.join(chosen)}")
    for value in values:
        try:
            known[0].refuse(value)
        except ConfigError as error:
            rule = str(error).partition(": ")[2]
            raise ConfigError(f"{place}={_shown(value)}: {rule}") from None


_NO_CHOICE = (*DEPTH, PERIODS.name)
"""Options that are constrained by other means, or not at all."""


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
    model: Model,
    cluster: Cluster,
    mini_batch: int,
    depths: list[int],
    constraints: Constraints,
    *,
    dp_shard: int,
) -> Iterator[tuple[int, str]]:
    layers = len(model.layers)
    for depth in depths:
        replicas = cluster.size // depth * dp_shard
        share = mini_batch // replicas
        if depth > layers:
            yield depth, f"more workers than the model's {layers} layers"
        elif mini_batch % replicas:
            reason = f"a mini-batch of {mini_batch} cannot be divided evenly among {replicas} replicas"
            yield depth, reason
        elif not _micro_batch_sizes(share, constraints):
            reason = f"a replica's share of {plural(share, 'sample')} cannot be cut into"
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
    scheme: Scheme, depth: int, model: Model, replicas: int, requirements: tuple[int, Constraints]
) -> Iterator[CandidateGroup]:
    mini_batch, constraints = requirements
    if depth > len(model.layers) or mini_batch % replicas:
        return
    if depth == 1 and not scheme.synchronous:
        return  # there are no bubbles to save with old weights
    share = mini_batch // replicas
    sizes = _micro_batch_sizes(share, constraints)
    if scheme.updates_each_micro_batch and not constraints.more_updates:
        sizes = [share] if constraints.samples is None or share in constraints.samples else []
    for samples in sizes:
        for options in _choices(scheme, depth, share // samples, len(model.layers)):
            if not constraints.allows(scheme, options):
                continue
            try:
                shape = shape_of(scheme, options)
            except ConfigError:
                continue  # the scheme has no such schedule
            if samples < shape.parts:
                continue  # one sample cannot be halved
            if may_cut(model, constraints.cuts, shape.placement.stages):
                several = several_hold(shape.placement, replicas)
                stages = _zero_stages(model, constraints, flush=scheme.synchronous) if several else (0,)
                yield CandidateGroup(scheme.name, options, shape, replicas, samples, stages)


def _sliced(
    group: CandidateGroup, scheme: Scheme, slicings: Sequence[tuple[int, ...]]
) -> Iterator[CandidateGroup]:
    for lengths in slicings:
        if len(lengths) == 1:
            yield group
        elif scheme.option(SLICES) is None and (shape := group.shape.sliced(lengths)) is not None:
            options = (*group.options, (SLICES, slices_option(lengths)))
            yield replace(group, options=options, shape=shape)


def _choices(scheme: Scheme, depth: int, micro_batches: int, layers: int) -> Iterator[Options]:
    base: dict[str, OptionValue] = {scheme.depth: depth}
    if not scheme.updates_each_micro_batch:
        base["micro_batches"] = micro_batches
    for more in scheme.planner(depth, micro_batches, layers):
        yield tuple((base | dict(more)).items())


def _micro_batch_sizes(share: int, constraints: Constraints) -> list[int]:
    sizes = constraints.samples
    if sizes is None:
        powers = [2**i for i in range(share.bit_length())]
        sizes = (*powers, *constraints.more_samples)
    return sorted({size for size in sizes if share % size == 0 and share // size <= MOST_MICRO_BATCHES})


def _why_none(
    scheme: Scheme, depths: list[int], model: Model, cluster: Cluster, requirements: tuple[int, Constraints]
) -> str:
    mini_batch, constraints = requirements
    reasons = []
    for name, values in constraints.of_scheme(scheme).items():
        tried = {
            value_of(scheme, name, options)
            for depth in depths
            for samples in _micro_batch_sizes(mini_batch // (cluster.size // depth), constraints)
            for options in _choices(
                scheme, depth, mini_batch // (cluster.size // depth) // samples, len(model.layers)
            )
        }
        if tried and tried.isdisjoint(values):
            shown = ", ".join(sorted(map(_shown, tried), key=lambda text: (len(text), text)))
            reasons.append(f"with {name} {' or '.join(map(_shown, values))} (tried: {shown})")
    if not isinstance(constraints.cuts, Cutting):
        reasons.append(f"with {len(constraints.cuts) + 1} stages, which the cuts make")
    rule = f"needs {scheme.needs}; " if scheme.needs and not reasons else ""
    if not scheme.synchronous and depths == [1]:
        rule = "uses old weights, but one worker has no bubbles to save; "
    return " ".join([f"{rule}no candidate at {_named(depths)}", *reasons])


def _shown(value: OptionValue | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
