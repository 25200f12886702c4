"""Memory of each worker while it goes through its list: state, activations, workspace, messages.

The schedule's order is walked with the sends and receives that lowering puts between its ops, as the
interpreter runs them: a receive takes a buffer when it is posted, which is free again after the op that needs
it; the buffers that were ever needed at once stay. What is sent to a worker is there
until the next message to it is sent, or the gradient of it has come. What a worker hands to itself is there
until the backward of the stage that takes it.

A profile without the peaks of ops is not that exact: there each worker has an allowance for messages, and
what its ops leave is added up (``allowed``).

The walk needs the order of a worker's actions, not when they happen: the player's times (in units) decide
only how early receives are posted.

Invariant: every byte is in one part. Not walked: skips (``skips_in_flight``), messages of other shapes than
the micro-batch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from counterflow.program.actions import Action, Matching, Receive
from counterflow.program.lowering import messages, unit_times
from counterflow.schedule.ir import Op, Product, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import OpKind, Saved
from counterflow.schedule.placement import Placement
from counterflow.simulation import Piece
from counterflow.simulation.memory import Changes, above_base
from counterflow.simulation.timed_cache import timed

from .stages import StageCosts


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory of a worker at its peak, in bytes.

    Attributes:
        weights: weights, gradients and optimiser state of every copy and version, including casts.
        activations: tensors that forwards save for their backwards.
        buffers: buffers of messages that are received ahead or in flight.
        workspace: additional memory of the largest op while it runs, or of the update.
        gradients: the part of ``weights`` that is gradients.
        optimizer: the part of ``weights`` that is the optimiser's state.
        casts: the part of ``weights`` that is casts to another precision.
        communicators: memory of NCCL, in no tensor.
    """

    weights: float
    activations: float
    buffers: float
    workspace: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    casts: float = 0.0
    communicators: float = 0.0

    @property
    def total(self) -> float:
        """Total, without the cluster's reserve."""
        return self.weights + self.activations + self.workspace + self.buffers + self.communicators

    def parts(self) -> dict[str, float]:
        """Total by part, with a profile that contains the peaks of ops.

        >>> sum(WorkerMemory(10.0, 5.0, 2.0, 1.0, 3.0, 6.0).parts().values())
        18.0
        """
        return {
            "weights": self.weights - self.gradients - self.optimizer - self.casts,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "casts": self.casts,
            "activations": self.activations,
            "workspace": self.workspace,
            "messages": self.buffers,
            "communicators": self.communicators,
        }


def allowed(schedule: Schedule, stages: StageCosts, changes: Changes) -> tuple[WorkerMemory, ...]:
    """Each worker's peak without a walk: what its ops leave, and an allowance for messages.

    Of weights only further versions count.

    Args:
        schedule: the order.
        stages: what its stages cost.
        changes: what its ops change, and weight versions, of which the most is counted.
    """
    first, buffers = timed(schedule).first, message_buffers(schedule.placement, together(schedule), stages)
    peaks = []
    for worker, most in enumerate(above_base(first, changes)):
        live = np.cumsum(changes.versions[first[worker] : first[worker + 1]])
        versions = min(most, float(live.max(initial=0.0)))
        peaks.append(WorkerMemory(versions, most - versions, buffers[worker]))
    return tuple(peaks)


def walked(
    schedule: Schedule,
    stages: StageCosts,
    recompute: Recompute,
    *,
    versions: Sequence[float],
    updating: Sequence[float],
    matching: Matching,
) -> tuple[WorkerMemory, ...]:
    """Each worker's peak; of weights only further versions count.

    Args:
        schedule: the order.
        stages: what its stages cost.
        recompute: what is computed again.
        versions: by op, what weight versions add that are made, or freed, when it has ended.
        updating: by worker, what the gradient norm or the optimiser needs.
        matching: how messages are matched, which tells how early receives are posted.
    """
    graph = timed(schedule).graph
    ends = unit_times(graph)[1]
    bounds = [(0, len(order)) for order in schedule.orders]
    between: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.orders]
    for worker, before, _, action in messages(graph, ends, bounds, matching):
        between[worker][before].append(action)
    peaks = []
    for worker, order in enumerate(schedule.orders):
        walk = _Walk(schedule, worker, stages, recompute)
        updates = set() if schedule.synchronous else _updates(schedule, order)
        for number, op in enumerate(order):
            walk.post(between[worker][number])
            walk.run(op)
            walk.versions += versions[graph.first[worker] + number]
            if number in updates:
                walk.update(updating[worker])
        walk.post(between[worker][len(order)])
        peaks.append(walk.peak(updating[worker]))
    return tuple(peaks)


def _updates(schedule: Schedule, order: Sequence[Op]) -> set[int]:
    """Numbers of the ops of a worker after which a stage is updated: the last gradients of each period.

    The memory of each update is taken for that of the worker's largest one.
    """
    last = {
        (op.stage, schedule.period_of(op)): number
        for number, op in enumerate(order)
        if Product.WEIGHT_GRADIENTS in op.kind.makes
    }
    return {*last.values()}


class _Walk:
    """One worker's list, action by action.

    A stage's input is counted separately from what its forward saves: in a receive buffer, or as a
    local product.
    """

    def __init__(self, schedule: Schedule, worker: int, stages: StageCosts, recompute: Recompute) -> None:
        self.placement, self.worker = schedule.placement, worker
        self.workload, self.work = schedule.workload, schedule.workload.work
        self.table, self.outputs = stages.table(recompute), stages.output_bytes
        self.gradients = self.outputs
        """Bytes of the gradients of stages' outputs; after a recomputation of the stage all have one."""
        if recompute is not Recompute.STAGE:
            boundaries = zip(self.outputs[:-1], stages.tensors[1:], strict=True)
            self.gradients = tuple(size - inputs.constant for size, inputs in boundaries)
        self.last = schedule.stages - 1
        self.entering = stages.inputs
        needed = stages.saved_inputs(Recompute.NONE)
        rows = zip(self.table, needed, strict=True)
        self.between = [stage.tensors[Saved.WEIGHT_OPERANDS] - inputs for stage, inputs in rows]
        """Bytes that input gradients save, without inputs."""
        self.kept_gradients = stages.kept_output_gradients
        """Bytes of these that are gradients of stages' outputs."""
        self.counted = stages.saved_inputs(recompute)
        """Bytes of inputs that forwards leave."""
        halves = (op for op in schedule.orders[worker] if op.kind is OpKind.INPUT_GRADIENT)
        self.split = {(op.stage, number) for op in halves for number in op.micro_batches}
        """Stages and micro-batches whose backward is split."""
        holds = self.split and not recompute.recomputes
        self.leaves = stages.leaves if holds else [0.0] * schedule.stages
        """Bytes that forwards leave for the pieces of a split backward."""
        self.saved_outputs = stages.saved_outputs(recompute)
        """Bytes of outputs that forwards leave."""
        self.stash = 0.0
        self.stored: dict[tuple[object, ...], float] = {}
        """Bytes that recomputations, which make no product, saved for backwards that have not run."""
        self.inputs = 0.0
        """Inputs of stages, in receive buffers, while their micro-batches are in flight."""
        self.local = 0.0
        """Bytes of products for other stages of this worker."""
        self.outgoing = 0.0
        """Bytes of a product for another worker that is not sent yet."""
        self.sent: dict[int, tuple[Op, float]] = {}
        """The last message to each worker: its op, and its bytes that are stored nowhere else."""
        self.pool = self.most_pool = 0.0
        self.versions = 0.0
        self.expiring: list[tuple[float, float]] = []
        """Inputs and gradients in buffers that are free for the next receive."""
        self.local_expiring = 0.0
        self.best = (0.0,) * 6

    def post(self, actions: Sequence[Action]) -> None:
        """Sends, and receives that take their buffers."""
        for action in actions:
            if action.skip is not None:  # type: ignore[union-attr]
                continue
            if isinstance(action, Receive):
                self._return_buffers()
                op = action.output
                sizes = self.outputs if op.kind.gives is Product.OUTPUT else self.gradients
                self.pool += sizes[op.boundary] * self.work(op)
                self.most_pool = max(self.most_pool, self.pool)
            else:  # in place of the message before it
                self.sent[action.peer] = action.output, self.outgoing  # type: ignore[union-attr]
                self.outgoing = 0.0

    def _return_buffers(self) -> None:
        for size, of_input in self.expiring:
            self.pool -= size
            self.inputs -= of_input
        self.expiring.clear()

    def _is_local(self, op: Op, stage: int) -> bool:
        return self.placement.worker(op.pipe, stage) == self.worker

    def _input(self, op: Op) -> float:
        return self.outputs[op.stage - 1] * self.work(op) if op.stage else 0.0

    def run(self, op: Op) -> None:
        """An op, from the end of the one before to its own."""
        self._return_buffers()
        self.local -= self.local_expiring
        self.local_expiring = 0.0
        if op.kind.is_forward:
            self._forward(op)
        elif not op.kind.makes:
            self._store(op)
        else:
            self._backward(op)

    def _forward(self, op: Op) -> None:
        stage = op.stage
        work, (before, after) = self.work(op), self._of_state(op)
        at_start, at_end = self._changes(op)
        at_start, at_end = at_start * work + before, at_end * work + after
        leaves = self._leaves(op)
        stays = at_start + at_end + leaves - self.counted[stage] * work
        if stage and not self._is_local(op, stage - 1):
            self.inputs += self._input(op)
        self._record_peak(max(stays, at_start + leaves - self.entering[stage] * work), stays)
        self.stash += stays
        if stage < self.last:
            self._add_product(op, self._unsaved_output(stage) * self.work(op), stage + 1)

    def _leaves(self, op: Op) -> float:
        splits = (op.stage, op.micro_batches[0]) in self.split
        return self.leaves[op.stage] * self.work(op) if splits else 0.0

    def _store(self, op: Op) -> None:
        at_start, at_end = (amount * self.work(op) for amount in self._changes(op))
        stays = at_start + at_end
        self._record_peak(at_start, stays)
        self.stash += stays
        self.stored[op[1:]] = self.stored.get(op[1:], 0.0) + stays

    def _changes(self, op: Op) -> tuple[float, float]:
        return self.table[op.stage].changes(op.kind, recomputed=self.workload.recomputes)

    def _of_state(self, op: Op) -> tuple[float, float]:
        """Bytes of states that an op adds when it starts, and when it has ended; whole micro-batches have
        none.
        """
        if self.workload.slices == 1:
            return 0.0, 0.0
        return self.table[op.stage].state_changes(Piece.of(op, self.worker, self.workload))

    def _unsaved_output(self, stage: int) -> float:
        return max(0.0, self.outputs[stage] - self.saved_outputs[stage])

    def _backward(self, op: Op) -> None:
        stage, first = op.stage, op.kind.takes is not None
        ends = Product.WEIGHT_GRADIENTS in op.kind.makes
        if first and stage < self.last:
            self._free_sent(op)
        gradient = self.gradients[stage] * self.work(op) if stage < self.last else 0.0
        inputs = self.counted[stage]
        saved = self.table[stage].tensors[Saved.ACTIVATIONS] - inputs
        graph = saved * self.work(op) + self._leaves(op)
        of_output = min(self.kept_gradients[stage] * self.work(op), gradient)
        rest = max(0.0, self.between[stage] * self.work(op) - of_output)
        if first:
            graph += self.stored.pop(op[1:], 0.0)
        before, after = self._of_state(op)
        self._record_peak(self._changes(op)[0] * self.work(op) + before, 0.0)
        self.stash += before + after
        self.stash += (0.0 if ends else rest) - (graph if first else rest)
        if ends:
            self._release(op, gradient)
        if first and stage:
            self._add_product(op, self.gradients[stage - 1] * self.work(op), stage - 1)

    def _release(self, op: Op, gradient: float) -> None:
        if op.stage < self.last:
            if self._is_local(op, op.stage + 1):
                self.local_expiring += gradient
            else:
                self.expiring.append((gradient, 0.0))
        if op.stage:
            size = self._input(op)
            if self._is_local(op, op.stage - 1):
                self.local_expiring += self._unsaved_output(op.stage - 1) * self.work(op)
            else:
                self.expiring.append((size, size))

    def _free_sent(self, op: Op) -> None:
        peer = self.placement.worker(op.pipe, op.stage + 1)
        if peer in self.sent:
            maker, _ = self.sent[peer]
            about = maker.kind.is_forward and maker.stage == op.stage
            if about and op.micro_batches[0] in maker.micro_batches:
                del self.sent[peer]

    def _in_flight(self) -> float:
        return self.outgoing + sum(size for _, size in self.sent.values())

    def _add_product(self, op: Op, size: float, stage: int) -> None:
        if self._is_local(op, stage):
            self.local += size
        else:
            self.outgoing = size

    def _record_peak(self, during: float, stays: float) -> None:
        moving = self.local + self._in_flight()
        total = self.stash + during + moving + self.versions
        if total > self.best[0]:
            self.best = total, self.stash + stays, during - stays, moving, self.versions, self.inputs

    def update(self, updating: float) -> None:
        """An update while other micro-batches are in flight."""
        self._record_peak(updating, 0.0)

    def peak(self, updating: float) -> WorkerMemory:
        """The most of all ops, or of the update after them."""
        moving = self._in_flight()
        if updating + moving + self.versions > self.best[0]:
            return WorkerMemory(self.versions, 0.0, self.most_pool + moving, updating)
        _, stash, space, in_flight, versions, inputs = self.best
        return WorkerMemory(versions, stash + inputs, self.most_pool - inputs + in_flight, space)


def together(schedule: Schedule) -> float:
    """The most micro-batches that a forward sends at once; of slices the longest one's share."""
    lengths = schedule.workload.lengths
    return max(len(batch.micro_batches) for batch in schedule.workload.passes) * max(lengths) / sum(lengths)


def message_buffers(placement: Placement, together: float, stages: StageCosts) -> tuple[float, ...]:
    """Bytes of each worker's largest message, once to send and once to receive.

    Args:
        placement: which worker holds which stage.
        together: the most micro-batches that a forward sends at once.
        stages: the stages' costs.
    """
    largest, sizes = [0.0] * placement.workers, stages.output_bytes
    for boundary, sender, receiver in _boundaries(placement):
        size = sizes[boundary]
        largest[sender] = max(largest[sender], size)
        largest[receiver] = max(largest[receiver], size)
    return tuple([2 * together * size for size in largest])


@lru_cache(maxsize=256)
def _boundaries(placement: Placement) -> list[tuple[int, int, int]]:
    """Stage and the two workers of each message from a stage to the next, once each over all pipes."""
    boundaries = {
        (stage, min(both), max(both)): None
        for holders in placement.pipes_stages
        for stage, both in enumerate(pairwise(holders))
        if both[0] != both[1]
    }
    return list(boundaries)


def skips_in_flight(schedule: Schedule, stages: StageCosts) -> list[float]:
    """Bytes that each worker keeps of skips until their users take them, and receives of one.

    A sender is at most as many forwards ahead of a user as there are stages between them.
    """
    in_flight = [0.0] * schedule.workers
    for holders in schedule.placement.pipes_stages if stages.skips else ():
        for link, size in stages.skips:
            sender, user = holders[link.source], holders[link.target]
            if sender != user:
                ahead = 1 if link.once else min(link.target - link.source, schedule.micro_batches)
                in_flight[sender] += size * together(schedule) * ahead
                in_flight[user] += size * together(schedule)
    return in_flight


def counted_twice(placement: Placement, stages: StageCosts) -> list[float]:
    """Bytes of each worker that several of its stages have, of which there is one copy."""
    duplicates = [0.0] * placement.workers
    for tie in stages.ties:
        for worker in range(placement.workers):
            shared = len({s for _, s in placement.stages_on(worker)} & {*tie.stages})
            duplicates[worker] += max(0, shared - 1) * tie.copy_bytes
    return duplicates
