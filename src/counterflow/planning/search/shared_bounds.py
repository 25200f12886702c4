"""Bounds of the candidates of a search; what several candidates have in common is computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.schedule.modes import Recompute

from ..cost.device_placement import Arrangement, Network
from ..cost.stages import Cuts, StageCosts
from .bounds import Bounds, Common, common
from .cut_free_bound import CutFreeBound
from .node_orders import Runs
from .order_free_bounds import OrderFreeBounds, order_free_bounds
from .path_bounds import HopCosts
from .shape import WorkloadShape
from .space import CandidateGroup

if TYPE_CHECKING:
    from ..predict import Predictor

_Key = tuple[object, ...]


class SharedBounds:
    """Bounds of candidates that differ in options of which few parts of a bound depend on each.

    Args:
        predictor: predictor of the model on the cluster.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._common: dict[_Key, Common] = {}
        self._order_free: dict[_Key, OrderFreeBounds] = {}
        self._hops: dict[_Key, HopCosts] = {}
        self._cut_free: dict[_Key, CutFreeBound] = {}

    def cut_free_seconds(
        self, group: CandidateGroup, recompute: Recompute, where: tuple[Arrangement, Runs], links: Network
    ) -> float:
        """Minimum seconds of an update of candidates, in any memory, however their layers are cut."""
        shape, predictor = group.shape, self._predictor
        key = group.samples, recompute, max(shape.together) > 1, shape.parts, shape.split, shape.lengths
        if key not in self._cut_free:
            inputs = predictor.model, predictor.profile, group.samples, recompute
            self._cut_free[key] = CutFreeBound.of(shape, *inputs)
        hops = self._hops_of((shape.placement, group.replicas, *where), shape, links)
        return self._cut_free[key].seconds(shape, hops, links, barrier=predictor.model.barrier)

    def of(
        self,
        group: CandidateGroup,
        recompute: Recompute,
        where: tuple[Arrangement, Runs],
        links: Network,
        *,
        cuts: Cuts,
        zero_stage: int,
    ) -> Bounds:
        """The bounds of a candidate.

        Args:
            group: its schedule's shape, replicas and samples.
            recompute: what a backward computes again.
            where: its devices.
            links: costs of its messages and all-reduces there.
            cuts: how its layers are cut.
            zero_stage: 1: optimiser state is sharded.
        """
        shape = group.shape
        key = shape.without_promise, group.replicas, group.samples, where, recompute, cuts
        if key not in self._common:
            predictor = self._predictor
            stages = self.stages(group, cuts, recompute, links)
            place = shape.placement, group.replicas, *where
            sharded = None
            if 1 in group.zero_stages:
                sharded = predictor.sharded_states.state(stages, *place)
            self._common[key] = common(
                shape,
                stages,
                links,
                predictor.cluster,
                recompute,
                update_seconds_per_byte=predictor.profile.update_seconds_per_byte,
                step_overhead_seconds=predictor.profile.step_overhead_seconds,
                sharded=sharded,
                order_free=self._order_free_of(group, stages, recompute, place, links),
            )
        return self._common[key].bounds(shape.most_stashed, zero_stage, shape.most_in_flight)

    def of_halves(
        self,
        group: CandidateGroup,
        recompute: Recompute,
        where: tuple[Arrangement, Runs],
        links: Network,
        cuts: Cuts,
    ) -> float:
        """A bound of an update in any memory that is closer if every backward is halved; otherwise 0.

        Candidates are not ordered by it, but it decides that a schedule need not be built.
        """
        shape, barrier = group.shape, self._predictor.model.barrier
        halved = shape.parts == 2 and shape.all_parts and not shape.split
        if not (halved and shape.synchronous and barrier):
            return 0.0
        stages = self.stages(group, cuts, recompute, links)
        hops = self._hops_of((shape.placement, group.replicas, *where), shape, links)
        bounds = order_free_bounds(shape, stages, links, recompute, hops=hops, halves_alone=True)
        return bounds.seconds(shape.most_stashed, shape.most_in_flight)

    def _order_free_of(
        self, group: CandidateGroup, stages: StageCosts, recompute: Recompute, place: _Key, links: Network
    ) -> OrderFreeBounds:
        shape = group.shape
        key = place, shape.without_promise, stages.samples, stages.cuts, recompute
        if key not in self._order_free:
            self._order_free[key] = order_free_bounds(
                shape,
                stages,
                links,
                recompute,
                barrier=self._predictor.model.barrier,
                hops=self._hops_of(place, shape, links),
            )
        return self._order_free[key]

    def stages(self, group: CandidateGroup, cuts: Cuts, recompute: Recompute, links: Network) -> StageCosts:
        """The costs of a candidate's stages."""
        return self._predictor.stages(cuts, **_of(group), recompute=recompute, on=links)

    def cuts(
        self, group: CandidateGroup, cuts: Cuts, recompute: Recompute, links: Network
    ) -> tuple[tuple[int, ...], ...]:
        """The layers at which a candidate's stages begin, and others to try; see ``Predictor.cuts``."""
        return self._predictor.cuts(cuts, **_of(group), recompute=recompute, on=links)

    def _hops_of(self, place: _Key, shape: WorkloadShape, links: Network) -> HopCosts:
        if place not in self._hops:
            self._hops[place] = HopCosts.of(shape.placement, links)
        return self._hops[place]


def _of(group: CandidateGroup) -> dict[str, Any]:
    shape = group.shape
    return {
        "placement": shape.placement,
        "samples": group.samples,
        "passes": -(-sum(shape.passes) // len(shape.passes)),
        "synchronous": shape.synchronous,
    }
