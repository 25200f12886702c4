"""Waits of workers for processor cores that they share: more workers of a node compute than it has cores.

The ops that run on a node progress at one speed, its cores over their number, and at most at full speed: the
scheduler of an operating system gives each runnable thread an equal share in slices of a few milliseconds.
The processor seconds of a message are work of the ops that send and take it, half each. Sums need no core.

Invariant: with a core for each worker, and messages that need none, the ops end when the player says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .costs import Costs
    from .timed_schedule import Ready, TimedSchedule


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Nodes on which workers of a pipeline share cores.

    Attributes:
        node: node of each worker.
        cores: processor cores of each node.
        threads: ``threads[worker][node]``: threads of the node that compute while the worker does, over all
            replicas and positions, which all run the same op at the same time.
        message_seconds: processor seconds of a message, of both of its workers together.
    """

    node: tuple[int, ...]
    cores: tuple[int, ...]
    threads: tuple[tuple[int, ...], ...]
    message_seconds: float = 0.0

    def speeds(self, computing: Sequence[int]) -> list[float]:
        """Speed of each of the workers that compute, as a share of a core.

        >>> SharedCores((0, 0, 0), (2,), ((1,), (1,), (1,))).speeds([0, 1, 2])
        [0.6666666666666666, 0.6666666666666666, 0.6666666666666666]
        """
        threads = [sum(self.threads[worker][node] for worker in computing) for node in range(len(self.cores))]
        return [min(1.0, self.cores[node] / threads[node]) for node in map(self.node.__getitem__, computing)]

    def seconds(self, work: Sequence[float]) -> float:
        """Seconds in which the busiest node's cores do its workers' work if none is ever idle.

        Args:
            work: seconds of each worker's ops.
        """
        rows = zip(self.cores, zip(*self.threads, strict=True), strict=True)
        return max(
            math.fsum(seconds * count for seconds, count in zip(work, threads, strict=True)) / cores
            for cores, threads in rows
        )


def core_wait_seconds(schedule: TimedSchedule, costs: Costs, shared: SharedCores) -> float:
    """Additional seconds until the last op of a synchronous schedule ends, as workers wait for cores.

    Args:
        schedule: the schedule, prepared for timing.
        costs: seconds of its ops and messages on a core that nobody shares.
        shared: the workers' cores.
    """
    ready = schedule.ready_ops(costs, schedule.seconds(costs))
    alone = schedule.played(ready)
    assert alone is not None  # because no limit was given
    return max(0.0, _SharedPlay(ready, shared).seconds() - float(alone.clocks.max(initial=0.0)))


class _SharedPlay:
    """Ops in the order of time.

    Attributes:
        work: by worker that computes, the seconds of a whole core that its op still needs.
        wake: by worker that does nothing, the time at which it continues; infinite: it waits for a message
            that nobody has sent yet.
    """

    def __init__(self, ready: Ready, shared: SharedCores) -> None:
        lists, lasting = ready.lists, ready.lasting
        self.shared = shared
        first, takes, inputs, self._outputs, _ = (array.tolist() for array in lists)
        self._inputs = [inputs[begin:end] for begin, end in pairwise(takes)]
        self._seconds, self._busy, self._late, self._travel, self._lanes = (a.tolist() for a in lasting)
        self._head, self._stop = first[:-1], first[1:]
        self._arrived = [math.inf] * len(self._travel)
        self._free = [0.0] * max(1, ready.lanes)
        self.work: dict[int, float] = {}
        self.wake = dict.fromkeys(range(len(self._head)), 0.0)

    def seconds(self) -> float:
        """Time at which the last worker is done."""
        now = ended = 0.0
        while True:
            self._begin(now)
            computing = [*self.work]
            speeds = self.shared.speeds(computing)
            need = [self.work[w] / speed for w, speed in zip(computing, speeds, strict=True)]
            passed = min((*need, *(wake - now for wake in self.wake.values())), default=math.inf)
            if passed == math.inf:
                return ended
            for worker, speed, seconds in zip(computing, speeds, need, strict=True):
                if seconds > passed:
                    self.work[worker] -= speed * passed
                else:
                    ended = max(ended, self._end(worker, now + passed))
            for worker, wake in self.wake.items():
                if wake - now <= passed:  # exactly then: rounding must not leave a rest of time
                    self.wake[worker] = now + passed
            now += passed

    def _begin(self, now: float) -> None:
        for worker in [worker for worker, wake in self.wake.items() if wake <= now or wake == math.inf]:
            op = self._head[worker]
            if op == self._stop[worker]:
                del self.wake[worker]
                continue
            begin = max((self._arrived[message] for message in self._inputs[op]), default=now)
            if begin > now:
                self.wake[worker] = begin
            else:
                del self.wake[worker]
                outputs = self._outputs[op + 1] - self._outputs[op]
                messages = len(self._inputs[op]) + outputs
                self.work[worker] = self._seconds[op] + self.shared.message_seconds / 2 * messages

    def _end(self, worker: int, now: float) -> float:
        """Send the messages of a worker's op, and return when the worker continues."""
        del self.work[worker]
        op = self._head[worker]
        for message in range(self._outputs[op], self._outputs[op + 1]):
            begin, lane = now + self._late[message], self._lanes[message]
            if lane >= 0:
                begin = max(begin, self._free[lane])
                self._free[lane] = begin + self._travel[message]
            self._arrived[message] = begin + self._travel[message]
        self._head[worker] += 1
        self.wake[worker] = now + self._busy[op]
        return self.wake[worker]
