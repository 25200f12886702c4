"""ZeRO stage 1: of the holders of a parameter one keeps its optimiser state, updates it and sends it on.

Invariant: after ``share`` all holders have what the owner's optimiser made, bit for bit; since all had the
same summed gradient, that is what each optimiser would have made where none is sharded. Gradients and weights
are whole everywhere. It knows nothing of orders: ``share`` is called where no message is in flight.

Source: Rajbhandari et al. 2020, ZeRO, section 5.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.schedule.ir import Schedule
from counterflow.schedule.owners import owners

from ..transport.base import Group, Transport
from .gradients import GradientGroup
from .names import Names
from .replica_digests import broadcast_tensors


def refuse_unsharded(execution: Execution, schedule: Schedule, *, parallelized: bool) -> None:
    """Refuse what optimiser state is not sharded for.

    Args:
        execution: how it is run.
        schedule: what is run.
        parallelized: True if the mesh has further dimensions.

    Raises:
        ConfigError: sharded state does not go with the rest.
    """
    if not execution.zero_stage:
        return
    if not schedule.synchronous:
        raise ConfigError(
            f"zero_stage = 1: {schedule.scheme} updates each stage at its own time, and updated weights are "
            "sent at the end of a step; omit it, or take a synchronous scheme"
        )
    if not execution.barrier:
        raise ConfigError(
            "zero_stage = 1: updated weights are sent when a step ends on all workers, and without a barrier "
            "it does not; omit it or barrier=False"
        )
    if parallelized:
        raise ConfigError(
            "zero_stage = 1 does not go with parallelize: fully_shard shards optimiser state already; use "
            "only one of them"
        )


class Owners:
    """Owners of this worker's parameters; all workers make it together.

    Args:
        gradients: groups of gradients of all of this worker's parameters.
        names: names of the parameters of all stages of the model, in the order that all workers know.
        transport: transport to the other workers.
    """

    def __init__(self, gradients: Sequence[GradientGroup], names: Names, transport: Transport) -> None:
        self._transport, self._gradients = transport, gradients
        rank = transport.rank
        own_parameters = {
            name: (
                parameter.nbytes,
                parameter.requires_grad,
                (rank,) if group_of_gradients.group is None else group_of_gradients.group.ranks,
            )
            for group_of_gradients in gradients
            for name, parameter in group_of_gradients.parameters.items()
        }
        known: dict[str, tuple[int, bool, tuple[int, ...]]] = {}
        for row in cast("list[dict[str, Any]]", transport.gather_objects(own_parameters)):
            known |= row
        order = dict.fromkeys(first for assigned in names for _, first in assigned if first in known)
        by_use = sorted(order, key=lambda name: not known[name][1])  # what is frozen keeps no state
        trained = [name for name in by_use if known[name][1]]
        frozen = [name for name in by_use if not known[name][1]]
        self._owner: dict[str, int] = {}
        for part in (trained, frozen):
            assigned = owners((known[name][0], known[name][2]) for name in part)
            self._owner |= dict(zip(part, assigned, strict=True))
        held_parameters = {
            name: parameter
            for group_of_gradients in gradients
            for name, parameter in group_of_gradients.parameters.items()
        }
        self._groups: dict[tuple[int, ...], Group] = {}
        self._shared: dict[tuple[int, ...], dict[int, list[nn.Parameter]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """Parameters in an order that all workers know, by the ranks that hold them and by owner."""
        for group_of_gradients in gradients:
            if group_of_gradients.group is not None:
                self._groups.setdefault(group_of_gradients.group.ranks, group_of_gradients.group)
        for name in self._owner:
            ranks = known[name][2]
            if name in held_parameters and len(ranks) > 1:
                self._shared[ranks][self._owner[name]].append(held_parameters[name])

    def owned_here(self, name: str) -> bool:
        """True if this worker updates a parameter, by its first name in the model."""
        return self._owner[name] == self._transport.rank

    def of(self, names: Iterable[str]) -> list[int]:
        """The ranks that update some parameters, ascending."""
        return sorted({self._owner[name] for name in names})

    def share(self, changed: Iterable[nn.Parameter] | None = None) -> None:
        """Send what was updated here to the other holders, and take what they updated; all call it.

        Args:
            changed: parameters that are sent, the same on all holders; None: those that have gradients.

        Those who hold the same talk at once; a worker goes through its groups in an order that is the same
        everywhere, so that no two wait for each other.
        """
        self._transport.status.now("sending updated weights to the other copies")
        if changed is None:
            changed = [parameter for group in self._gradients for parameter in group.summed]
        sent = {id(parameter) for parameter in changed}
        for ranks in sorted(self._shared):
            for owner, parameters in sorted(self._shared[ranks].items()):
                tensors = [p for p in parameters if id(p) in sent]
                if tensors:
                    broadcast_tensors(tensors, owner, self._groups[ranks], self._transport)
