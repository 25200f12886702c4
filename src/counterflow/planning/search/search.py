"""The search for the best plan: every candidate of the space, by rising bound, until no bound is below the
best.

It is exact over its space: the plans found are the best ones, of all and of every scheme, and equal ones are
ordered by their place in the space. A candidate is pruned by a bound that holds for any cuts
(``any_cuts.py``) or, once its layers are cut, by one for these (``bounds.py`` proves each); one refused for
memory is reported with its bytes. A schedule is built once for all candidates of its group.

Balanced cuts minimise an estimate. So if cuts are free, a candidate that is not pruned before its layers are
cut becomes two, with balanced and with even cuts, unless these are equal.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from operator import attrgetter

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
from .found import Found, Plan, Rejections, TooLarge, nothing_fits
from .node_orders import Runs, node_orders
from .shape import Shape
from .shared_bounds import SharedBounds
from .sketch import Sketches, least_seconds
from .slicings import slicings_of
from .space import Group, Omission, space

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
    """A member of a group: one arrangement, one way to recompute, one ``zero_stage``, every sync mode; if its
    layers are cut, one rule of cuts.
    """

    group: Group
    place: int
    recompute: Recompute
    arrangement: Arrangement
    nodes: Runs
    links: Network
    updates: float
    in_any_cuts: float
    """Minimum seconds of a step, however its layers are cut: no bound is lower."""
    zero_stage: int = 0
    cuts: Cuts = Cutting.BALANCED
    bound: Bounds = field(init=False)

    @property
    def setting(self) -> tuple[Group, Recompute, tuple[Arrangement, Runs], Network]:
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
    """The best plans so far."""

    count: int
    plans: list[Plan] = field(default_factory=list)
    of_schemes: dict[str, Plan] = field(default_factory=dict)

    def add(self, scheme: str, plan: Plan) -> None:
        """Add a plan, unless the same place has one with other cuts that is as good."""
        key = attrgetter("seconds", "place")
        by_place = {each.place: each for each in sorted([plan, *self.plans], key=key, reverse=True)}
        self.plans = sorted(by_place.values(), key=key)[: self.count]
        kept = self.of_schemes.get(scheme)
        if kept is None or key(plan) < key(kept):
            self.of_schemes[scheme] = plan

    def needs(self, scheme: str, bound: float) -> bool:
        """Whether a candidate with this bound may be among the best; it may be as good as its bound."""
        return bound <= self.limit(scheme)

    def limit(self, scheme: str) -> float:
        """The longest step that may still be among the best."""
        kept = self.of_schemes.get(scheme)
        if kept is None or len(self.plans) < self.count:
            return math.inf
        return max(kept.seconds, self.plans[-1].seconds) * _ROUNDING


@contextmanager
def _circles_left() -> Iterator[None]:
    """Disable Python's search for circular garbage in this context.

    Schedules are millions of short-lived small tuples without circles; scanning them repeatedly took a
    quarter of a search.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_circles_left()
def search(
    model: Model,
    profile: Profile,
    cluster: Cluster,
    mini_batch: int,
    constraints: Constraints | None = None,
    *,
    count: int = 10,
    progress: Progress | None = None,
) -> Found:
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
    runs: list[_Search] = []
    whole = Predictor(model, profile, cluster)
    for positions in dict.fromkeys(constraints.tensor_parallel):
        predictor = whole.at(positions)
        wanted = constraints.at(positions, cluster)
        slicings = slicings_of(model, predictor.profile, constraints.slices)
        groups, omitted = space(model, predictor.cluster, mini_batch, wanted, slicings)
        if elsewhere := sorted({*(constraints.depths or ())}.difference(wanted.depths or ())):
            reason = f"does not divide the {predictor.cluster.size} places of {positions} devices"
            omitted += [Omission(f"depth {depth}", reason) for depth in elsewhere]
        if len({*constraints.tensor_parallel}) > 1:
            omitted = [_of_positions(positions, each) for each in omitted]
        omissions += [each for each in omitted if each not in omissions]
        place = runs[-1].total if runs else 0
        runs.append(
            _Search(predictor, mini_batch, constraints, best, tallies, progress=progress, place=place)
        )
        runs[-1].run(groups)
    if not best.plans:
        raise PlanError(nothing_fits(cluster, tallies, omissions))
    in_more_memory = None
    for run in runs:
        limit = (in_more_memory or best.plans[0]).seconds
        in_more_memory = run.in_more_memory(limit) or in_more_memory
    return Found(
        best=tuple(best.plans),
        of_schemes=tuple(sorted(best.of_schemes.values(), key=attrgetter("seconds", "place"))),
        rejections=tuple(tallies.values()),
        omissions=tuple(omissions),
        in_more_memory=in_more_memory,
        mini_batch=mini_batch,
        usable_bytes=cluster.usable_bytes,
    )


def _of_positions(positions: int, omission: Omission) -> Omission:
    """An omission for one of several numbers of positions."""
    if "--stale" in omission.reason:  # for any number
        return omission
    of = "without tensor parallelism" if positions == 1 else f"with tensor parallelism over {positions}"
    return replace(omission, what=f"{of}, {omission.what}")


class _Search:
    """The candidates of one number of positions; the best plans are those of all numbers so far."""

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

    def run(self, groups: list[Group]) -> None:
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
                left = [one for one in members if self.best.needs(scheme, one.in_any_cuts)]
                self.tallies[scheme].slower += len(members) - len(left)
                self.decided += len(members) - len(left)
                cut = [each for one in left for each in self._cut(one)]
                self.tallies[scheme].candidates += len(cut) - len(left)
                self.total += len(cut) - len(left)
                if cut:
                    cut.sort(key=attrgetter("seconds", "place"))
                    heappush(waiting, (cut[0].seconds, cut[0].place, True, cut))
            self.progress(self.decided, self.total, scheme)

    def _cut(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """The candidate with the cuts of each rule and their bound; once if rules make the same cuts."""
        group, model, known = candidate.group, self.predictor.model, set[tuple[int, ...]]()
        for rule in self.rules:
            if may_cut(model, rule, group.stages):
                cuts = self.bounds.stages(group, rule, candidate.recompute, candidate.links).cuts
                if cuts not in known:
                    known.add(cuts)
                    cut = replace(candidate, cuts=rule)
                    cut.bound = self.bounds.of(*candidate.setting, cuts=rule, zero_stage=candidate.zero_stage)
                    yield cut

    def _by_work(self, groups: list[Group]) -> list[tuple[float, int, bool, list[_Candidate]]]:
        """A heap of the candidates of every group, with the lower bound of any and whether it comes from
        ``bounds``.
        """
        waiting = []
        place = self.total
        for number, group in enumerate(groups):
            members = list(self._members(group, place))
            waiting.append((min(one.in_any_cuts for one in members), place, False, members))
            place += len(members)
            self.tallies.setdefault(group.scheme, Rejections(group.scheme)).candidates += len(members)
            if number % 100 == 0:
                self.progress(0, len(groups), "bounds")
        self.total = place
        heapify(waiting)
        return waiting

    def _members(self, group: Group, place: int) -> Iterator[_Candidate]:
        shape = group.shape
        updates = self.mini_batch / (group.replicas * group.samples * sum(shape.passes))
        for arrangement, nodes, links in self._networks(shape, group.replicas):
            where = arrangement, nodes
            for recompute in self.constraints.recompute:
                seconds = updates * self.bounds.in_any_cuts(group, recompute, where, links)
                for zero_stage in group.zero_stages:
                    yield _Candidate(group, place, recompute, *where, links, updates, seconds, zero_stage)
                    place += 1

    def _networks(self, shape: Shape, replicas: int) -> list[tuple[Arrangement, Runs, Network]]:
        """The arrangements and orders of nodes that differ in the costs of workers, messages and sums."""
        key = (shape.placement, replicas)
        if key not in self.networks:
            found: dict[object, tuple[Arrangement, Runs, Network]] = {}
            arrangements = self.constraints.arrangements
            if self._alike(shape, replicas):
                arrangements = arrangements[:1]
            for arrangement, nodes in product(arrangements, self.orders):
                links = self.predictor.network(shape.placement, replicas, arrangement, nodes=nodes)
                # Skip connections depend on the cuts, so their links may differ although others do not.
                same = (arrangement, nodes) if self.predictor.model.skips else links
                found.setdefault(same, (arrangement, nodes, links))
            self.networks[key] = list(found.values())
        return self.networks[key]

    def _alike(self, shape: Shape, replicas: int) -> bool:
        """Whether all arrangements are equal: every device is a node, or all are on one, and no way out is
        shared.
        """
        predictor = self.predictor
        cluster = predictor.cluster
        if predictor.model.skips or cluster.kinds or 1 < cluster.devices < cluster.size:
            return False
        links = predictor.network(shape.placement, replicas, self.constraints.arrangements[0], nodes=())
        return not any(links.crossed)

    def _decide(self, members: list[_Candidate]) -> list[_Candidate]:
        """Prune, refuse or simulate each; those that memory refuses are given back.

        What is too slow is not asked for its memory, which takes longer to walk than its ops to play.
        """
        refused = []
        usable = (self.predictor.cluster.usable_bytes,) * members[0].group.depth
        played: dict[tuple[Cuts, Recompute, Arrangement, Runs], tuple[Play, Play | None]] = {}
        """Simulations by candidates that differ only in ``zero_stage``, and their fastest sync mode."""
        sketches = Sketches()
        for candidate in members:
            where = candidate.arrangement, candidate.nodes
            alike = candidate.cuts, candidate.recompute, *where
            scheme = candidate.group.scheme
            tally = self.tallies[scheme]
            if candidate.bound.too_many_bytes > 0:
                found = TooLarge(
                    scheme,
                    self._configuration(candidate),
                    candidate.bound.least_bytes,
                    candidate.bound.fullest,
                    (candidate.links.usable_bytes or usable)[candidate.bound.fullest],
                )
                tally.refuse(found)
                refused.append(candidate)
            elif not self.best.needs(scheme, candidate.seconds) or self._halves_take_longer(candidate):
                tally.slower += 1
            else:
                known, quickest = played.get(alike, (None, None))
                if known is not None:
                    play = known.with_zero_stage(candidate.zero_stage)
                else:
                    play = self.predictor.play(self._configuration(candidate), self.mini_batch)
                played[alike] = play, quickest
                limit = self.best.limit(scheme)
                times = candidate.recompute, *where
                if quickest is None and not self.best.needs(
                    scheme, sketches.least_seconds(play, limit, times)
                ):
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
                    played[alike] = play, plan.play
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
            self.predictor.tensor_parallel,
            candidate.nodes,
            candidate.zero_stage,
        )

    def _quickest(self, play: Play, place: int) -> Plan:
        """The candidate in the fastest sync mode; the first of equal ones."""
        plays = [play]
        if play.network.copies > 1 and play.schedule.synchronous:
            plays += [play.with_sync(sync) for sync in self.sync[1:]]
        quickest = min(plays, key=attrgetter("seconds"))
        return Plan(quickest.seconds, place, quickest)

    def in_more_memory(self, limit: float) -> Plan | None:
        """The best candidate refused for memory whose step is below ``limit``; candidates are tried by rising
        bound.
        """
        found: Plan | None = None
        for candidate in sorted(self.refused, key=lambda c: (c.seconds_in_any_memory, c.place)):
            if candidate.seconds_in_any_memory >= limit:
                break
            self.progress(self.total, self.total, "more memory")
            play = self.predictor.play(self._configuration(candidate), self.mini_batch)
            if least_seconds(play, limit * _ROUNDING) >= limit * _ROUNDING:
                continue
            plan = self._quickest(play, candidate.place)
            if plan.seconds < limit:
                limit, found = plan.seconds, plan
        return found


def _too_large(scheme: str, play: Play) -> TooLarge:
    needed, usable = [worker.total for worker in play.memory], play.usable_bytes
    fullest = max(range(len(needed)), key=lambda worker: needed[worker] - usable[worker])
    return TooLarge(scheme, play.configuration, needed[fullest], fullest, usable[fullest])
