"""The search for the best plan: every candidate of the space, by rising bound, until no bound is below the
best.

It is exact over its space: the plans found are the best ones, of all and of every scheme, and equal ones are
ordered by their place in the space. A candidate is pruned by a bound that holds for any cuts
(``cut_free_bound.py``) or, once its layers are cut, by one for these (``bounds.py`` proves each). One
refused for memory is reported with its bytes. A schedule is built once for all candidates of its group.

Balanced cuts minimise an estimate. So if cuts are free, a candidate that is not pruned before its layers are
cut becomes several: with balanced cuts, with those before memory moved them, and with even ones, where these
differ.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from operator import attrgetter

from counterflow.common.parallel_degrees import Degrees
from counterflow.errors import PlanError
from counterflow.program.player import load_numba
from counterflow.schedule.modes import Recompute, Sync

from ..cost.device_placement import Arrangement, Network
from ..cost.stages import Cuts, Cutting, may_cut
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile import Profile
from ..play import Play
from ..predict import Predictor
from ..prediction import Configuration
from .bounds import Bounds
from .constraints import Constraints
from .degrees_tried import degrees_tried, words
from .node_orders import Runs, node_orders
from .recut import recut
from .search_result import Plan, Rejections, SearchResult, TooLarge, nothing_fits
from .shape import WorkloadShape
from .shared_bounds import SharedBounds
from .slicings import slicings_of
from .space import STALE, CandidateGroup, Omission, runnable, space
from .sync_free_bound import SyncFreeBounds, sync_free_seconds

Progress = Callable[[int, int, str], None]
"""Called with candidates decided, candidates in total, and the current activity."""

_PREFERRED = (Sync.EAGER_OPT, Sync.EAGER, Sync.END)
"""Sync modes by preference: the first of equally fast ones is taken."""

_MANY = 4000
"""Number of candidates from which the compiled player is loaded before the first."""

_ROUNDING = 1 + 1e-9
"""Factor for rounding: a bound adds the same seconds as a play in another order."""


@dataclass(slots=True)
class _Candidate:
    """A member of a group in every sync mode; if its layers are cut, by one rule."""

    group: CandidateGroup
    place: int
    recompute: Recompute
    arrangement: Arrangement
    nodes: Runs
    links: Network
    updates: float
    cut_free_seconds: float
    """Minimum seconds of a step, however its layers are cut: no bound is lower."""
    zero_stage: int = 0
    cuts: Cuts = Cutting.BALANCED
    bound: Bounds = field(init=False)

    @property
    def setting(self) -> tuple[CandidateGroup, Recompute, tuple[Arrangement, Runs], Network]:
        """Schedule, recomputation, devices and links, on which bounds depend beside cuts."""
        return self.group, self.recompute, (self.arrangement, self.nodes), self.links

    @property
    def seconds(self) -> float:
        return self.bound.seconds * self.updates

    @property
    def seconds_in_any_memory(self) -> float:
        return self.bound.seconds_in_any_memory * self.updates


@dataclass(slots=True)
class _Best:
    count: int
    plans: list[Plan] = field(default_factory=list)
    of_schemes: dict[str, Plan] = field(default_factory=dict)

    def add(self, scheme: str, plan: Plan) -> None:
        """Add a plan, unless the same place has one with other cuts that is as good."""
        key = attrgetter("seconds", "place")
        by_place = {ranked.place: ranked for ranked in sorted([plan, *self.plans], key=key, reverse=True)}
        self.plans = sorted(by_place.values(), key=key)[: self.count]
        best = self.of_schemes.get(scheme)
        if best is None or key(plan) < key(best):
            self.of_schemes[scheme] = plan

    def recut(self, predictors: Mapping[Degrees, Predictor], progress: Callable[[int, int], None]) -> None:
        """Move layers of all plans while these get faster."""
        plans = {id(plan): plan for plan in (*self.plans, *self.of_schemes.values())}
        for number, plan in enumerate(plans.values()):
            progress(number, len(plans))
            play = recut(predictors[plan.play.configuration.degrees], plan.play)
            self.add(play.configuration.scheme, replace(plan, seconds=play.seconds, play=play))

    def needs(self, scheme: str, bound: float) -> bool:
        """True if a candidate with this bound may be among the best; it may be as good as its bound."""
        return bound <= self.limit(scheme)

    def limit(self, scheme: str) -> float:
        """The longest step that may still be among the best."""
        best = self.of_schemes.get(scheme)
        if best is None or len(self.plans) < self.count:
            return math.inf
        return max(best.seconds, self.plans[-1].seconds) * _ROUNDING


@contextmanager
def _without_collector() -> Iterator[None]:
    # Schedules are millions of short-lived small tuples without circles; scanning them repeatedly took a
    # quarter of a search.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collector()
def search(
    model: Model,
    profile: Profile,
    cluster: Cluster,
    mini_batch: int,
    constraints: Constraints | None = None,
    *,
    count: int = 10,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for the best plans.

    Args:
        model: what is trained.
        profile: costs of its layers on a device.
        cluster: the devices and their links.
        mini_batch: samples of one update, over all replicas.
        constraints: constraints on a plan.
        count: number of best plans to find, in addition to the best of every scheme.
        progress: called with the progress.

    Raises:
        ConfigError: a constraint cannot be met.
        PlanError: no candidate fits; the message says what each scheme would need.
    """
    constraints = Constraints() if constraints is None else constraints
    best, tallies, omissions = _Best(count), dict[str, Rejections](), list[Omission]()
    runs: list[_DegreeSearch] = []
    base = Predictor(model, profile, cluster)
    tried = degrees_tried(model, profile, cluster, constraints)
    for degrees in tried:
        predictor = base.at(degrees)
        requirements = constraints.at(degrees, tried, cluster)
        slicings = slicings_of(model, predictor.profile, constraints.slices_at(degrees))
        groups, omitted = space(model, predictor.cluster, mini_batch, requirements, slicings, degrees=degrees)
        groups, further = runnable(groups, model, profile, degrees)
        omitted += further
        if elsewhere := sorted({*(constraints.depths or ())}.difference(requirements.depths or ())):
            reason = f"does not divide the {predictor.cluster.size} places of {degrees.positions} devices"
            omitted += [Omission(f"depth {depth}", reason) for depth in elsewhere]
        if len(tried) > 1:
            omitted = [_of_degrees(degrees, tried, omission) for omission in omitted]
        omissions += [omission for omission in omitted if omission not in omissions]
        place = runs[-1].total if runs else 0
        runs.append(
            _DegreeSearch(predictor, mini_batch, constraints, best, tallies, progress=progress, place=place)
        )
        runs[-1].run(groups)
    if not best.plans:
        raise PlanError(nothing_fits(cluster, tallies, omissions))
    if constraints.recut:
        predictors = {run.predictor.degrees: run.predictor for run in runs}
        best.recut(predictors, lambda done, of: progress(done, of, "moving layers") if progress else None)
    in_more_memory = None
    for run in runs:
        limit = (in_more_memory or best.plans[0]).seconds
        in_more_memory = run.in_more_memory(limit) or in_more_memory
    return SearchResult(
        best=tuple(best.plans),
        of_schemes=tuple(sorted(best.of_schemes.values(), key=attrgetter("seconds", "place"))),
        rejections=tuple(tallies.values()),
        omissions=tuple(omissions),
        in_more_memory=in_more_memory,
        mini_batch=mini_batch,
        usable_bytes=cluster.usable_bytes,
    )


def _of_degrees(degrees: Degrees, tried: Collection[Degrees], omission: Omission) -> Omission:
    if omission.reason == STALE:  # for any degrees
        return omission
    of = f"with {', '.join(words(degrees))}"
    if degrees.positions == 1:
        shards = any(of.shards > 1 for of in tried)
        of = "with a device a worker" if shards else "without tensor parallelism"
    return replace(omission, what=f"{of}, {omission.what}")


class _DegreeSearch:
    """Candidates of some degrees; ``best`` has the plans of all degrees so far."""

    def __init__(
        self,
        predictor: Predictor,
        mini_batch: int,
        constraints: Constraints,
        best: _Best,
        tallies: dict[str, Rejections],
        *,
        progress: Progress | None,
        place: int,
    ) -> None:
        self.predictor, self.mini_batch, self.constraints = predictor, mini_batch, constraints
        self.sync = tuple(mode for mode in _PREFERRED if mode in constraints.sync)
        self.best, self.tallies = best, tallies
        self.refused: list[_Candidate] = []
        self.progress = progress or (lambda _done, _of, _what: None)
        self.decided = self.total = place
        self.networks: dict[tuple[object, ...], list[tuple[Arrangement, Runs, Network]]] = {}
        self.orders = node_orders(predictor.cluster)
        self.bounds = SharedBounds(predictor)
        balanced = constraints.cuts is Cutting.BALANCED
        self.rules: tuple[Cuts, ...] = (*Cutting,) if balanced else (constraints.cuts,)

    def run(self, groups: list[CandidateGroup]) -> None:
        waiting = self._by_work(groups)
        if self.total - self.decided > _MANY:
            load_numba()
        while waiting:
            _, _, bounded, members = heappop(waiting)
            scheme = members[0].group.scheme
            if bounded:
                self.refused += self._decide(members)
                self.decided += len(members)
            else:
                needed = [member for member in members if self.best.needs(scheme, member.cut_free_seconds)]
                self.tallies[scheme].slower += len(members) - len(needed)
                self.decided += len(members) - len(needed)
                cut = [candidate for member in needed for candidate in self._cut(member)]
                self.tallies[scheme].candidates += len(cut) - len(needed)
                self.total += len(cut) - len(needed)
                if cut:
                    cut.sort(key=attrgetter("seconds", "place"))
                    heappush(waiting, (cut[0].seconds, cut[0].place, True, cut))
            self.progress(self.decided, self.total, scheme)

    def _cut(self, candidate: _Candidate) -> Iterator[_Candidate]:
        group, model, known = candidate.group, self.predictor.model, set[tuple[int, ...]]()
        for rule in self.rules:
            if may_cut(model, rule, group.stages):
                choices = self.bounds.cuts(group, rule, candidate.recompute, candidate.links)
                for cuts, name in zip(choices, (rule, *choices[1:]), strict=True):
                    if cuts not in known:
                        known.add(cuts)
                        cut, zero_stage = replace(candidate, cuts=name), candidate.zero_stage
                        cut.bound = self.bounds.of(*candidate.setting, cuts=name, zero_stage=zero_stage)
                        yield cut

    def _by_work(self, groups: list[CandidateGroup]) -> list[tuple[float, int, bool, list[_Candidate]]]:
        """A heap of the groups' candidates: their lower bound, and whether it is of their cuts."""
        waiting = []
        place = self.total
        for number, group in enumerate(groups):
            members = list(self._members(group, place))
            waiting.append((min(member.cut_free_seconds for member in members), place, False, members))
            place += len(members)
            self.tallies.setdefault(group.scheme, Rejections(group.scheme)).candidates += len(members)
            if number % 100 == 0:
                self.progress(0, len(groups), "bounds")
        self.total = place
        heapify(waiting)
        return waiting

    def _members(self, group: CandidateGroup, place: int) -> Iterator[_Candidate]:
        shape = group.shape
        samples = group.replicas * self.predictor.degrees.dp_shard * group.samples
        updates = self.mini_batch / (samples * sum(shape.passes))
        for arrangement, nodes, links in self._networks(shape, group.replicas):
            where = arrangement, nodes
            for recompute in self.constraints.recompute:
                seconds = updates * self.bounds.cut_free_seconds(group, recompute, where, links)
                for zero_stage in group.zero_stages:
                    yield _Candidate(group, place, recompute, *where, links, updates, seconds, zero_stage)
                    place += 1

    def _networks(self, shape: WorkloadShape, replicas: int) -> list[tuple[Arrangement, Runs, Network]]:
        key = (shape.placement, replicas)
        if key not in self.networks:
            networks: dict[object, tuple[Arrangement, Runs, Network]] = {}
            arrangements = self.constraints.arrangements
            if self._equal_arrangements(shape, replicas):
                arrangements = arrangements[:1]
            for arrangement, nodes in product(arrangements, self.orders):
                links = self.predictor.network(shape.placement, replicas, arrangement, nodes=nodes)
                # Skip connections depend on the cuts, so their links may differ although others do not.
                same = (arrangement, nodes) if self.predictor.model.skips else links
                networks.setdefault(same, (arrangement, nodes, links))
            self.networks[key] = list(networks.values())
        return self.networks[key]

    def _equal_arrangements(self, shape: WorkloadShape, replicas: int) -> bool:
        predictor = self.predictor
        cluster = predictor.cluster
        if predictor.model.skips or cluster.kinds or 1 < cluster.devices < cluster.size:
            return False
        links = predictor.network(shape.placement, replicas, self.constraints.arrangements[0], nodes=())
        return not any(links.crossed)

    def _decide(self, members: list[_Candidate]) -> list[_Candidate]:
        """Prune, refuse or simulate each member; return those that memory refuses.

        The memory of too slow ones is not computed, because it takes longer than playing their ops.
        """
        refused = []
        usable = (self.predictor.cluster.usable_bytes,) * members[0].group.depth
        played: dict[tuple[Cuts, Recompute, Arrangement, Runs], tuple[Play, Play | None]] = {}
        """Simulations by candidates that differ only in ``zero_stage``, and their fastest sync mode."""
        sync_free = SyncFreeBounds()
        for candidate in members:
            where = candidate.arrangement, candidate.nodes
            simulation_key = candidate.cuts, candidate.recompute, *where
            scheme = candidate.group.scheme
            tally = self.tallies[scheme]
            if candidate.bound.too_many_bytes > 0:
                too_large = TooLarge(
                    scheme,
                    self._configuration(candidate),
                    candidate.bound.least_bytes,
                    candidate.bound.fullest,
                    (candidate.links.usable_bytes or usable)[candidate.bound.fullest],
                )
                tally.refuse(too_large)
                refused.append(candidate)
            elif not self.best.needs(scheme, candidate.seconds) or self._halves_take_longer(candidate):
                tally.slower += 1
                if self.best.needs(scheme, candidate.seconds_in_any_memory):
                    refused.append(candidate)  # its memory alone may make it slower
            else:
                known, quickest = played.get(simulation_key, (None, None))
                if known is not None:
                    play = known.with_zero_stage(candidate.zero_stage)
                else:
                    play = self.predictor.play(self._configuration(candidate), self.mini_batch)
                played[simulation_key] = play, quickest
                limit = self.best.limit(scheme)
                times = candidate.recompute, *where
                if quickest is None and not self.best.needs(scheme, sync_free.seconds(play, limit, times)):
                    tally.slower += 1
                elif not play.fits:
                    tally.refuse(_too_large(scheme, play))
                    refused.append(candidate)
                elif quickest is not None:
                    tally.simulated += 1
                    play = quickest.with_zero_stage(candidate.zero_stage)
                    self.best.add(scheme, Plan(play.seconds, candidate.place, play))
                else:
                    tally.simulated += 1
                    plan = self._quickest(play, candidate.place)
                    played[simulation_key] = play, plan.play
                    self.best.add(scheme, plan)
        return refused

    def _halves_take_longer(self, candidate: _Candidate) -> bool:
        least = self.bounds.of_halves(*candidate.setting, candidate.cuts)
        return not self.best.needs(candidate.group.scheme, least * candidate.updates / _ROUNDING)

    def _configuration(self, candidate: _Candidate) -> Configuration:
        group = candidate.group
        return Configuration(
            group.scheme,
            group.options,
            group.replicas,
            group.samples,
            candidate.recompute,
            self.sync[0],
            candidate.arrangement,
            candidate.cuts,
            self.predictor.degrees,
            candidate.nodes,
            candidate.zero_stage,
        )

    def _quickest(self, play: Play, place: int) -> Plan:
        plays = [play]
        if play.network.copies > 1 and play.schedule.synchronous:
            plays += [play.with_sync(sync) for sync in self.sync[1:]]
        quickest = min(plays, key=attrgetter("seconds"))
        return Plan(quickest.seconds, place, quickest)

    def in_more_memory(self, limit: float) -> Plan | None:
        """The best candidate refused for memory whose step is below ``limit``; candidates are tried by rising
        bound.
        """
        best: Plan | None = None
        for candidate in sorted(self.refused, key=lambda c: (c.seconds_in_any_memory, c.place)):
            if candidate.seconds_in_any_memory >= limit:
                break
            self.progress(self.total, self.total, "more memory")
            play = self.predictor.play(self._configuration(candidate), self.mini_batch)
            if sync_free_seconds(play, limit * _ROUNDING) >= limit * _ROUNDING:
                continue
            plan = self._quickest(play, candidate.place)
            if plan.seconds < limit:
                limit, best = plan.seconds, plan
        return best


def _too_large(scheme: str, play: Play) -> TooLarge:
    needed, usable = [worker.total for worker in play.memory], play.usable_bytes
    fullest = max(range(len(needed)), key=lambda worker: needed[worker] - usable[worker])
    return TooLarge(scheme, play.configuration, needed[fullest], fullest, usable[fullest])
