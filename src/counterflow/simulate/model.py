"""A schedule made ready to be timed: numbered nodes, what they wait for, and where costs go in.

Kept for the last few schedules, so that trying many costs only fills in numbers.
Nodes are the schedule's ops and, for an asynchronous schedule whose syncs take time,
one node for each gradient sync that later ops wait for.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from counterflow.errors import ConfigError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import OpKind, Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.residency import version_lives
from counterflow.schedule.sync import (
    GradientSync,
    by_last_backward,
    first_users,
    gradient_syncs,
    needs_sync,
    plan_syncs,
)

from .costs import Costs, PerLink, per_stage
from .kernel import Floats, Ints, longest_paths
from .memory import stage_bytes

KEPT_MODELS = 8
"""Models kept, so that trying many costs on a few schedules builds each of them once."""

_models: list[Model] = []


class Model:
    """A schedule's dependencies as arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.graph = OpGraph(schedule)
        self.topological: Ints = np.array(self.graph.topological, dtype=np.int64)
        ops = self.graph.ops
        self.worker: Ints = np.array(self.graph.worker, dtype=np.int64)
        self.stage: Ints = np.array([op.stage for op in ops], dtype=np.int64)
        rows = {kind: row for row, kind in enumerate(OpKind)}
        self.kind: Ints = np.array([rows[op.kind] for op in ops], dtype=np.int64)
        """Of each op its row in tables that have one a kind, in the order of ``OpKind``."""
        self.work: Floats = np.array([op.work for op in ops])
        self._add_edges()

    def _add_edges(self) -> None:
        """Edges by node: from the op before it on its worker, then from the op whose output it takes."""
        count = len(self.worker)
        nodes = np.arange(count)
        ordered = np.ones(count, dtype=bool)
        ordered[np.array(self.graph.first[:-1])[np.diff(self.graph.first) > 0]] = False
        source = np.array([-1 if s is None else s for s in self.graph.source], dtype=np.int64)
        fed = source >= 0
        degree = ordered.astype(np.int64) + fed
        self.first: Ints = np.concatenate(([0], np.cumsum(degree)))
        self.sources: Ints = np.empty(self.first[-1], dtype=np.int64)
        order_edge = self.first[:-1][ordered]
        self.sources[order_edge] = nodes[ordered] - 1
        data_edge = self.first[1:][fed] - 1
        self.sources[data_edge] = source[fed]
        crosses = self.worker[source[fed]] != self.worker[fed]
        self.message_edges: Ints = data_edge[crosses]
        """Edges along which a message travels, with the worker that sends and the one that receives."""
        self.senders: Ints = self.worker[source[fed][crosses]]
        self.receivers: Ints = self.worker[fed][crosses]
        sent = source[fed][crosses]
        # Either its stage's output is sent, or the gradient of the output of the stage before.
        gradient = np.array([kind.makes_input_gradient for kind in OpKind])
        self.sent_output: Ints = self.stage[sent] - gradient[self.kind[sent]]
        self.sent_work: Floats = self.work[sent]
        # Where a worker is busy with its messages, the op after the sending one waits for them.
        sending = np.full(count, -1, dtype=np.int64)
        sending[source[fed][crosses]] = np.arange(crosses.sum())
        before = np.where(ordered, nodes - 1, 0)
        after_send = ordered & (sending[before] >= 0)
        self.busy_edges: Ints = self.first[:-1][after_send]
        self.busy_messages: Ints = sending[before[after_send]]

    def seconds(self, costs: Costs) -> Floats:
        """How long each op lasts."""
        stages = self.schedule.stages
        table = np.array([*costs.op_cost(stages), *costs.split_cost(stages)])
        seconds: Floats = table[self.kind, self.stage] * self.work
        if costs.doubled_forward is not None or costs.half_backward is not None:
            for row, (work, shared) in enumerate(zip((2.0, 0.5), costs.shared_op_cost(stages), strict=True)):
                is_shared = (self.kind == row) & (self.work == work)
                seconds = np.where(is_shared, np.array(shared)[self.stage], seconds)
        if costs.halved_forward is not None:
            table = np.array(per_stage("halved_forward", costs.halved_forward, self.schedule.stages))
            seconds = np.where(self._halved, table[self.stage], seconds)
        if costs.op_seconds:
            names = {str(op): node for node, op in enumerate(self.graph.ops)}
            for name, value in costs.op_seconds.items():
                if name not in names:
                    raise ConfigError(f"op_seconds: {self.schedule} has no op {name!r}")
                seconds[names[name]] = value
        return seconds

    @cached_property
    def _halved(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which ops are forwards of one micro-batch whose backwards are halves."""
        ops = self.graph.ops
        halved = {op.micro_batches for op in ops if op.parts > 1}
        return np.array([op.kind.makes_output and op.micro_batches in halved for op in ops], dtype=bool)

    def message_seconds(self, costs: Costs) -> Floats:
        """How long each message travels, in the order of ``message_edges``."""
        seconds = self._by_message("p2p", costs.p2p)
        if costs.p2p_per_byte == 0.0:
            return seconds
        sizes = np.array(per_stage("message_bytes", costs.message_bytes, self.schedule.stages))
        sent = sizes[self.sent_output] * self.sent_work
        return seconds + self._by_message("p2p_per_byte", costs.p2p_per_byte) * sent

    def _by_message(self, name: str, value: PerLink) -> Floats:
        """A cost of links for each message."""
        if isinstance(value, (int, float)):
            return np.full(len(self.message_edges), float(value))
        links = np.array(value, dtype=np.float64)
        if links.shape != (self.schedule.workers,) * 2:
            raise ConfigError(
                f"{name}: a table of shape {links.shape} for {self.schedule.workers} workers; "
                "give one number, or one row of numbers a worker"
            )
        return links[self.senders, self.receivers]

    def delays(self, costs: Costs) -> Floats:
        """What passes on each edge between the end of one op and the earliest start of the other."""
        delay = np.zeros(len(self.sources))
        if costs.p2p != 0.0 or costs.p2p_per_byte != 0.0:
            travel = self.message_seconds(costs)
            delay[self.message_edges] = travel
            if not costs.overlap:
                delay[self.busy_edges] = travel[self.busy_messages]
        return delay

    def peak_bytes(self, costs: Costs) -> tuple[float, ...]:
        """Each worker's largest memory, as ``memory_use`` finds it, from the order of its ops alone.

        A worker runs one op at a time, so what it holds during each follows from the ops before it.
        """
        assert costs.memory is not None
        parts = stage_bytes(costs.memory, Recompute(costs.recompute), self.schedule.stages)
        changes = np.array([[parts.changes(kind, s) for s in range(len(parts.stash))] for kind in OpKind])
        begins, ends = (changes[self.kind, self.stage] * self.work[:, None]).T
        peaks = []
        for worker in range(self.schedule.workers):
            first, stop = self.graph.first[worker : worker + 2]
            base = sum(parts.fixed[stage] for _, stage in self.schedule.placement.held(worker))
            if self.schedule.synchronous:  # one version throughout
                base += sum(parts.weights[stage] for _, stage in self.schedule.placement.held(worker))
                change = ends[first:stop]
            else:
                change = ends[first:stop].copy()
                for stage, version, born, dies in version_lives(self.schedule, worker):
                    if version and born >= 0:
                        change[born] += parts.weights[stage]
                    elif version == 0:
                        base += parts.weights[stage]
                    if dies is not None and dies >= 0:
                        change[dies] -= parts.weights[stage]
            after = np.cumsum(begins[first:stop] + change)
            during = after - change
            peaks.append(base + max(0.0, float(during.max()), float(after[-1])) if len(after) else base)
        return tuple(peaks)

    def synced(self, costs: Costs) -> bool:
        """Whether these costs make any gradient sync take time."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        return any(lasts) and needs_sync(self.schedule, costs.replicas)

    def play(self, costs: Costs) -> tuple[Floats, Floats, Floats]:
        """Start and end of each op, then (period, stage, start, end) rows of the syncs that take time."""
        seconds, delay = self.seconds(costs), self.delays(costs)
        start, end, syncs = self._play(costs, seconds, delay)
        if costs.sync_slowdown and len(syncs):
            seconds = seconds + costs.sync_slowdown * self._beside_syncs(start, end, syncs)
            start, end, syncs = self._play(costs, seconds, delay)
        return start, end, syncs

    def _play(self, costs: Costs, seconds: Floats, delay: Floats) -> tuple[Floats, Floats, Floats]:
        if not self.synced(costs):
            start, end = longest_paths(self.topological, self.first, self.sources, delay, seconds)
            return start, end, np.empty((0, 4))
        if self.schedule.synchronous:
            start, end = longest_paths(self.topological, self.first, self.sources, delay, seconds)
            return start, end, self._syncs_after(costs, start, end)
        return self._play_with_syncs(costs, seconds, delay)

    def _beside_syncs(self, start: Floats, end: Floats, syncs: Floats) -> Floats:
        """For how long each op runs beside a gradient sync of its worker."""
        beside = np.zeros(len(start))
        first = self.graph.first
        for _, stage, begins, ends in syncs.tolist():
            for worker in {w for _, w in self.schedule.placement.copies(int(stage))}:
                nodes = slice(first[worker], first[worker + 1])
                both = np.minimum(end[nodes], ends) - np.maximum(start[nodes], begins)
                beside[nodes] += np.maximum(both, 0.0)
        return beside

    def _syncs_after(self, costs: Costs, start: Floats, end: Floats) -> Floats:
        """Syncs on the lane beside each worker's compute; nothing waits for them but the update."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        mode = Sync(costs.sync_mode)
        planned = plan_syncs(self.graph, mode, start.tolist(), end.tolist(), self._gradient_syncs)
        lane = [0.0] * self.schedule.workers
        rows = []
        for item in planned:
            stage, workers = item.sync.stage, item.sync.workers
            at = max(item.ready, *(lane[w] for w in workers))
            for w in workers:
                lane[w] = at + lasts[stage]
            rows.append((float(item.sync.period), float(stage), at, at + lasts[stage]))
        return np.array(rows).reshape(-1, 4)

    @cached_property
    def _gradient_syncs(self) -> tuple[GradientSync, ...]:
        return gradient_syncs(self.schedule)

    def _play_with_syncs(self, costs: Costs, seconds: Floats, delay: Floats) -> tuple[Floats, Floats, Floats]:
        """Asynchronous: ops that use new weights, or fill the gradients anew, wait for the sync."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        ops, first = len(seconds), self.graph.first
        users = first_users(self.schedule)
        lane: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        added: list[list[int]] = []
        ordered = by_last_backward(self.schedule)
        for sync in ordered:
            node = ops + len(added)
            sources = [first[worker] + last for worker, last in sync.last if last is not None]
            sources += [lane[worker] for worker in sync.workers if worker in lane]
            added.append(sources)
            for worker in sync.workers:
                lane[worker] = node
                user = users.get((worker, sync.stage, sync.period))
                if user is not None:
                    waiting.setdefault(first[worker] + user, []).append(node)
        edges, sources_of, delays = self._with_nodes(delay, waiting, added)
        all_seconds = np.concatenate((seconds, [lasts[s.stage] for s in ordered]))
        order = _topological(edges, sources_of)
        start, end = longest_paths(order, edges, sources_of, delays, all_seconds)
        rows = [
            (float(s.period), float(s.stage), start[ops + i], end[ops + i]) for i, s in enumerate(ordered)
        ]
        return start[:ops], end[:ops], np.array(rows).reshape(-1, 4)

    def _with_nodes(
        self, delay: Floats, extra: dict[int, list[int]], added: list[list[int]]
    ) -> tuple[Ints, Ints, Floats]:
        """The edges with more sources for some ops (``extra``) and nodes appended (``added``)."""
        sources: list[int] = []
        delays: list[float] = []
        first = [0]
        old_first, old_sources, old_delay = self.first.tolist(), self.sources.tolist(), delay.tolist()
        for node in range(len(self.worker)):
            span = slice(old_first[node], old_first[node + 1])
            more = extra.get(node, [])
            sources += old_sources[span] + more
            delays += old_delay[span] + [0.0] * len(more)
            first.append(len(sources))
        for waits in added:
            sources += waits
            delays += [0.0] * len(waits)
            first.append(len(sources))
        return np.array(first), np.array(sources, dtype=np.int64), np.array(delays)


def _topological(first: Ints, sources: Ints) -> Ints:
    """Nodes in an order in which sources go first."""
    count = len(first) - 1
    targets: list[list[int]] = [[] for _ in range(count)]
    missing = np.diff(first).tolist()
    bounds, feeds = first.tolist(), sources.tolist()
    for node in range(count):
        for source in feeds[bounds[node] : bounds[node + 1]]:
            targets[source].append(node)
    ready = [node for node in range(count) if not missing[node]]
    order: list[int] = []
    while ready:
        node = ready.pop()
        order.append(node)
        for target in targets[node]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    assert len(order) == count  # waiting for an update of earlier ops closes no circle
    return np.array(order, dtype=np.int64)


def model_of(schedule: Schedule) -> Model:
    """The schedule's model; those of the last few schedules are kept."""
    for place, kept in enumerate(_models):
        if kept.schedule is schedule:
            _models.append(_models.pop(place))
            return kept
    model = Model(schedule)
    _models.append(model)
    del _models[:-KEPT_MODELS]
    return model
