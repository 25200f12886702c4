"""Times of the actions of a program: its lists are played unchanged, with all waits.

A schedule's simulation plays the same ops and messages without making the lists, and lets sums and gathers
follow them (``timed_schedule.py``). Invariant: for a program that was lowered for the same costs, both find
the same times bit for bit.
"""

from __future__ import annotations

import numpy as np

from counterflow.errors import ConfigError, DeadlockError
from counterflow.program.action_lists import ActionLists, action_lists, circle
from counterflow.program.actions import Compute, Program, StartSync, Summed
from counterflow.program.lists import played, spread
from counterflow.program.player import Floats, Lasting, Times

from .costs import Costs
from .op_costs import per_stage
from .timed_schedule import Played, Ready, TimedSchedule


def play_program(model: TimedSchedule, program: Program, costs: Costs) -> tuple[Played, float]:
    """Times of ops, messages and sums, and the time at which the last worker ends its list.

    Args:
        model: model of the program's schedule.
        program: one action list per worker.
        costs: seconds; a gather takes ``agreement``.

    Raises:
        DeadlockError: the workers wait for each other in a circle.
        ConfigError: the sums share ways (``sync_crossings``), or ops are on other lanes than compute, which
            only schedules can be simulated with.
    """
    if model.lane_lists is not None:
        raise ConfigError("ops on lanes of their own can be simulated for a schedule only, not for a program")
    if costs.sync_crossings is not None:
        raise ConfigError(
            "sync_crossings: sums that share ways can be simulated for a schedule only, not for a program"
        )
    lists = action_lists(program, model.graph, one_at_a_time=True)
    seconds = model.seconds(costs)
    played = _Player(model, lists, costs).play(seconds)
    if costs.sync_slowdown and len(played[0].syncs):
        overlaps = model.sync_overlaps(played[0])
        if overlaps.any():
            return _Player(model, lists, costs).play(seconds + costs.sync_slowdown * overlaps)
    return played


class _Player:
    def __init__(self, model: TimedSchedule, lists: ActionLists, costs: Costs) -> None:
        self.model, self.lists, self.costs = model, lists, costs
        place = {op: node for node, op in enumerate(model.ops)}
        workers, first = len(lists.program.actions), lists.lists.first
        self.op = np.full(first[-1], -1, dtype=np.int64)
        """The op that each node computes; -1: none."""
        for worker, actions in enumerate(lists.program.actions):
            for node in range(first[worker], first[worker + 1]):
                action = actions[lists.actions[node]]
                if isinstance(action, Compute):
                    self.op[node] = place[action.op]
        messages, skips = model.messages, model.schedule.workload.skips
        columns = (messages.makers, messages.skips, messages.receivers)
        number = {key: at for at, key in enumerate(zip(*(row.tolist() for row in columns), strict=True))}
        self.message = np.full(len(lists.events), -1, dtype=np.int64)
        """The message between workers that each event is; -1: none."""
        for at, (what, about, _) in enumerate(lists.events):
            if what == "sent" and isinstance(about, tuple):
                op, skip = about
                key = place[op], -1 if skip is None else skips.index(skip), int(lists.lists.receivers[at])
                self.message[at] = number[key]
        self.sums = int(first[workers])

    def play(self, seconds: Floats) -> tuple[Played, float]:
        """Play with these seconds of each op."""
        ready = self.model.ready_ops(self.costs, seconds)
        times = played(self.lists.lists, self._lasting(ready))
        if times.stuck(self.lists.lists):
            why = circle(self.lists.program, self.model.graph, rendezvous=False)
            raise DeadlockError(why or "workers wait for each other's sums")
        return self._read(times, ready), float(times.clocks.max(initial=0.0))

    def _lasting(self, ready: Ready) -> Lasting:
        seconds = np.zeros(len(self.op))
        seconds[self.sums :] = [self._sum_seconds(start) for start in self.lists.starts]
        return spread(ready.lasting, self.lists.lists, self.op, self.message, seconds)

    def _sum_seconds(self, start: object) -> float:
        costs, stages = self.costs, self.model.schedule.stages
        if not isinstance(start, StartSync):
            return costs.agreement
        if start.what is Summed.TIED:
            return dict(costs.ties).get((start.stage, *start.tied), 0.0)
        lasts = costs.statistics if start.what is Summed.STATISTICS else costs.sync
        return per_stage(start.what.value, lasts, stages)[start.stage]

    def _read(self, times: Times, ready: Ready) -> Played:
        ops, model = self.op >= 0, self.model
        start, end = np.zeros(len(model.ops)), np.zeros(len(model.ops))
        start[self.op[ops]], end[self.op[ops]] = times.start[ops], times.end[ops]
        syncs = []
        if model.synced(self.costs):
            syncs = [
                (float(what.period), float(what.stage), times.start[node], times.end[node])
                for node, what in enumerate(self.lists.starts, self.sums)
                if isinstance(what, StartSync) and what.what is Summed.GRADIENTS
            ]
        arrived, sent = np.zeros(len(ready.travel)), np.zeros(len(ready.travel))
        which = self.message >= 0
        sent[self.message[which]] = times.sent[which]
        if not ready.links:
            sent = end[model.messages.sent_after] + ready.waited
        arrived = sent + ready.travel
        return Played(start, end, end + ready.lasting.busy, np.array(syncs).reshape(-1, 4), sent, arrived)
