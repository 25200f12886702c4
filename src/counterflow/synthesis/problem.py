"""The problem: the ops to order, as letters and numbers. Plain, frozen data.

Micro-batches of one pipe are alike. Take any schedule, and on each stage assign the k-th forward to
micro-batch k, and the same for each other kind of op, and for each slice if there are slices: no op has to
start later, and memory is the same. So only schedules that run micro-batches in their order on every stage
need to be considered. A worker's order is then a word: it says only *which* stage's forward, backward, …
(of which slice) is next. A word consists of ``Letter``s.

Invariant: a problem contains no order and no times; every op of the workload is the k-th of exactly one
letter. Workloads that it cannot express (doubled forwards, divided backwards, several periods) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from counterflow.errors import ConfigError, DeadlockError
from counterflow.schedule.ir import Op, OpKind, OptionValue, Schedule
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.schedule.workload import Workload
from counterflow.simulation import Costs, simulate

ACTIVATIONS = "activations"
BYTES = "bytes"

Limit = float | Sequence[float]
"""One number for every worker, or one per worker."""

Words = tuple[tuple[int, ...], ...]
"""The numbers of each worker's letters in the order in which it runs them."""


class Objective(StrEnum):
    """The objective that is minimised."""

    MAKESPAN = "makespan"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Need:
    """An input of a letter: its k-th op takes the product of the k-th op of another letter.

    Attributes:
        letter: number of the other letter.
        seconds: travel time of the message.
        link: number of its link; None: no message, because both are on one worker.
    """

    letter: int
    seconds: float = 0.0
    link: int | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """One kind of op of one stage and slice of one pipe. Its k-th op is that of the pipe's k-th micro-batch.

    Attributes:
        kind: kind of its ops.
        pipe: its pipe.
        stage: its stage.
        worker: its worker.
        count: number of its ops: the micro-batches of the pipe.
        seconds: duration of one op.
        needs: inputs of its ops.
        part: its slice.
        parts: number of slices of a micro-batch.
    """

    kind: OpKind
    pipe: int
    stage: int
    worker: int
    count: int
    seconds: float
    needs: tuple[Need, ...]
    part: int = 0
    parts: int = 1

    @property
    def unit(self) -> tuple[int, int, int]:
        """Pipe, stage and slice: what the letters of one forward and its backward have in common."""
        return self.pipe, self.stage, self.part

    @property
    def turn(self) -> int:
        """Place among the letters of its unit: forward, recomputation (``RECOMPUTED``), backward or input
        gradient, weight gradients.
        """
        if self.kind.is_forward:
            return 0
        return 2 + (self.kind.takes is None) if self.kind.makes else RECOMPUTED

    def __str__(self) -> str:
        text = f"{self.kind.value}.{self.stage}" + (f"p{self.pipe}" if self.pipe else "")
        return text if self.parts == 1 else f"{text}:{self.part}/{self.parts}"


@dataclass(frozen=True, slots=True)
class Store:
    """A resource that ops take and free, with a limit for each worker.

    The amount that a worker holds follows from its order alone: an op adds ``at_start`` when it starts and
    ``at_end`` (negative: it frees) when it has ended.

    Attributes:
        name: name of the resource, for messages.
        at_start: amount by letter.
        at_end: amount by letter.
        most: maximum by worker; infinite without a limit.
    """

    name: str
    at_start: tuple[float, ...]
    at_end: tuple[float, ...]
    most: tuple[float, ...]

    def allowed(self, worker: int) -> float:
        """The maximum of a worker, and what orders may exceed it by because sums of floats round.

        Bounds subtract from this, and not from ``most``: a difference is smaller, and so would be its share.
        """
        return self.most[worker] * (1 + CLOSE)


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A sum of gradients after all ops of some letters; on a lane in parallel with its workers' compute.

    Attributes:
        letters: letters that make the gradients.
        workers: workers that take part.
        seconds: duration of the sum.
    """

    letters: tuple[int, ...]
    workers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """The ops to order, the limits, and the objective.

    Attributes:
        workload: the workload.
        costs: costs of ops, messages and syncs.
        objective: the objective that is minimised.
        letters: by worker, then pipe and stage, then kind.
        stores: resources with limits.
        sums: sums of gradients of stages with several copies.
        tail: seconds after the last op and sum, before a step ends (agreement); 0 for the steady step.
        links: number of links that messages use.
        lanes: whether a link carries one message at a time.
        busy: whether a worker is busy while its messages travel.
    """

    workload: Workload
    costs: Costs
    objective: Objective
    letters: tuple[Letter, ...]
    stores: tuple[Store, ...]
    sums: tuple[GradientSum, ...]
    tail: float
    links: int
    lanes: bool
    busy: bool

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.workload.placement.workers

    @property
    def steady(self) -> bool:
        """Flag: whether the steady step is minimised instead of the makespan."""
        return self.objective is Objective.STEADY

    @property
    def ops(self) -> int:
        """Number of ops."""
        return sum(letter.count for letter in self.letters)

    def work(self) -> tuple[float, ...]:
        """Seconds of compute of each worker."""
        seconds = [0.0] * self.workers
        for letter in self.letters:
            seconds[letter.worker] += letter.count * letter.seconds
        return tuple(seconds)

    def of_worker(self, worker: int) -> tuple[int, ...]:
        """The numbers of a worker's letters."""
        return tuple(n for n, letter in enumerate(self.letters) if letter.worker == worker)

    def fits(self, words: Words) -> bool:
        """Check that each worker's word keeps all limits (except for rounding)."""
        return all(
            peak <= store.allowed(worker)
            for store in self.stores
            for worker, peak in enumerate(peaks(store, words))
        )

    def words_of(self, schedule: Schedule) -> Words | None:
        """The words of a schedule of this workload; None if its ops are not in the same order on all stages.

        If the workload has recomputations and the schedule has none, each is just before its backward.

        Raises:
            ConfigError: the schedule has another workload.
        """
        if self.workload.recomputes:
            schedule = with_recomputations(schedule)
        if schedule.workload != self.workload:
            raise ConfigError(f"{schedule}: has another workload; give a schedule of this one")
        number = {(x.kind, *x.unit): n for n, x in enumerate(self.letters)}
        words = []
        for order in schedule.orders:
            last: dict[int, int] = {}
            word = []
            for op in order:
                letter = number[op.kind, op.pipe, op.stage, op.part]
                if op.micro_batches[0] < last.get(letter, -1):
                    return None
                last[letter] = op.micro_batches[0]
                word.append(letter)
            words.append(tuple(word))
        return tuple(words)

    def schedule(
        self, words: Words, scheme: str = "synthesized", options: Iterable[tuple[str, OptionValue]] = ()
    ) -> Schedule:
        """The schedule whose workers run these words."""
        batches: list[list[int]] = [[] for _ in range(self.workload.placement.pipes)]
        for micro_batch_pass in self.workload.passes:
            batches[micro_batch_pass.pipe] += micro_batch_pass.micro_batches
        for of_pipe in batches:
            of_pipe.sort()
        orders = []
        for word in words:
            done = [0] * len(self.letters)
            order = []
            for number in word:
                x = self.letters[number]
                batch = batches[x.pipe][done[number]]
                order.append(Op(x.kind, x.stage, (batch,), x.pipe, x.part, x.parts))
                done[number] += 1
            orders.append(tuple(order))
        return Schedule(scheme, tuple(options), self.workload, tuple(orders))


RECOMPUTED = 1
"""The turn of a recomputation."""

CLOSE = 1e-9
"""Share by which a limit may be exceeded, because sums of floats round."""


def peaks(store: Store, words: Words) -> tuple[float, ...]:
    """Maximum of a store that each worker takes at once."""
    maxima = []
    for word in words:
        memory = most = 0.0
        for letter in word:
            memory += store.at_start[letter]
            most = max(most, memory)
            memory += store.at_end[letter]
            most = max(most, memory)
        maxima.append(most)
    return tuple(maxima)


def value_of(problem: Problem, words: Words) -> float:
    """The objective of an order, as the simulator computes it; infinite if its workers wait in a circle."""
    try:
        played = simulate(problem.schedule(words), problem.costs)
    except DeadlockError:
        return math.inf
    if not problem.steady:
        return played.makespan
    assert played.steady_step is not None  # the workload is synchronous
    return played.steady_step
