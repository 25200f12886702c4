"""The problem: what has to be ordered, as letters and numbers. Plain, frozen data.

Micro-batches of one pipe are alike. Take any schedule, and on each stage give the k-th forward to start to
micro-batch k, likewise each other kind of op: no op has to start later, and as much is held. So only
schedules need to be looked at that run micro-batches in their order on every stage. A worker's order is
then a word: it says only *which* stage's forward, backward, … comes next. A ``Letter`` is what a word is
made of.

Invariant: a problem knows no order and no time; every op of the workload is the k-th of exactly one letter.
What it cannot say (doubled forwards, divided backwards, several periods) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from counterflow.errors import ConfigError, DeadlockError
from counterflow.schedule.ir import Op, OpKind, OptionValue, Schedule
from counterflow.schedule.workload import Workload
from counterflow.simulation import Costs, simulate

ACTIVATIONS = "activations"
BYTES = "bytes"

Limit = float | Sequence[float]
"""One number for every worker, or one a worker."""

Words = tuple[tuple[int, ...], ...]
"""By worker, the numbers of the letters in the order in which it runs them."""


class Objective(StrEnum):
    """What is made small."""

    MAKESPAN = "makespan"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Need:
    """What the k-th op of a letter takes: what the k-th of another one makes.

    Attributes:
        letter: the other's number.
        seconds: how long the message travels.
        link: the number of its link; None: no message, both are on one worker.
    """

    letter: int
    seconds: float = 0.0
    link: int | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """One kind of op of one stage of one pipe. Its k-th op is that of the pipe's k-th micro-batch.

    Attributes:
        kind: what is computed.
        pipe: in which pipe.
        stage: of which stage.
        worker: on which worker.
        count: how many ops there are: the micro-batches of the pipe.
        seconds: how long one takes.
        needs: what it takes.
    """

    kind: OpKind
    pipe: int
    stage: int
    worker: int
    count: int
    seconds: float
    needs: tuple[Need, ...]

    def __str__(self) -> str:
        return f"{self.kind.value}.{self.stage}" + (f"p{self.pipe}" if self.pipe else "")


@dataclass(frozen=True, slots=True)
class Store:
    """Something that ops take and free, of which each worker has so much.

    What a worker holds follows from its order alone: an op adds ``at_start`` when it starts and ``at_end``
    (below 0: it frees) when it has ended.

    Attributes:
        name: of what, for messages.
        at_start: by letter.
        at_end: by letter.
        most: by worker; infinite where nothing is limited.
    """

    name: str
    at_start: tuple[float, ...]
    at_end: tuple[float, ...]
    most: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum of gradients, once all ops of some letters are done; on a lane beside its workers' compute.

    Attributes:
        letters: those that make the gradients.
        workers: who sums.
        seconds: how long it takes.
    """

    letters: tuple[int, ...]
    workers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """What has to be ordered, within which limits, and what is made small.

    Attributes:
        workload: what has to be computed.
        costs: what things cost.
        objective: what is made small.
        letters: by worker, then pipe and stage, then kind.
        stores: what is limited.
        sums: of the gradients of stages of which there are several copies.
        tail: seconds after the last op and sum, before a step ends (agreement); 0 for the steady step.
        links: how many links messages use.
        lanes: whether a link carries one message at a time.
        busy: whether a worker is busy while its messages travel.
    """

    workload: Workload
    costs: Costs
    objective: Objective
    letters: tuple[Letter, ...]
    stores: tuple[Store, ...]
    sums: tuple[Summed, ...]
    tail: float
    links: int
    lanes: bool
    busy: bool

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.workload.placement.workers

    @property
    def steady(self) -> bool:
        """Whether the steady step is made small, not the makespan."""
        return self.objective is Objective.STEADY

    @property
    def ops(self) -> int:
        """How many ops there are."""
        return sum(letter.count for letter in self.letters)

    def work(self) -> tuple[float, ...]:
        """Seconds of compute of each worker."""
        found = [0.0] * self.workers
        for letter in self.letters:
            found[letter.worker] += letter.count * letter.seconds
        return tuple(found)

    def of_worker(self, worker: int) -> tuple[int, ...]:
        """The numbers of a worker's letters."""
        return tuple(n for n, letter in enumerate(self.letters) if letter.worker == worker)

    def fits(self, words: Words) -> bool:
        """Whether each worker's word stays within all limits (to the last place but a few)."""
        return all(
            peak <= most * (1 + CLOSE)
            for store in self.stores
            for peak, most in zip(peaks(store, words), store.most, strict=True)
        )

    def words_of(self, schedule: Schedule) -> Words | None:
        """The words of a schedule of this workload; None where its ops are not alike in order.

        Raises:
            ConfigError: it is a schedule of another workload.
        """
        if schedule.workload != self.workload:
            raise ConfigError(f"{schedule}: is a schedule of another workload")
        number = {(x.kind, x.pipe, x.stage): n for n, x in enumerate(self.letters)}
        words = []
        for order in schedule.orders:
            last: dict[int, int] = {}
            word = []
            for op in order:
                letter = number[op.kind, op.pipe, op.stage]
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
        for one in self.workload.passes:
            batches[one.pipe] += one.micro_batches
        for of_pipe in batches:
            of_pipe.sort()
        orders = []
        for word in words:
            done = [0] * len(self.letters)
            order = []
            for number in word:
                x = self.letters[number]
                order.append(Op(x.kind, x.stage, (batches[x.pipe][done[number]],), x.pipe))
                done[number] += 1
            orders.append(tuple(order))
        return Schedule(scheme, tuple(options), self.workload, tuple(orders))


CLOSE = 1e-9
"""Of a limit: so much more is still within it, since sums of floats round."""


def peaks(store: Store, words: Words) -> tuple[float, ...]:
    """The most of a store that each worker takes at once."""
    found = []
    for word in words:
        held = most = 0.0
        for letter in word:
            held += store.at_start[letter]
            most = max(most, held)
            held += store.at_end[letter]
            most = max(most, held)
        found.append(most)
    return tuple(found)


def value_of(problem: Problem, words: Words) -> float:
    """The objective of an order, as the simulator has it; infinite where its workers wait in a circle."""
    try:
        played = simulate(problem.schedule(words), problem.costs)
    except DeadlockError:
        return math.inf
    if not problem.steady:
        return played.makespan
    assert played.steady_step is not None  # the workload is synchronous
    return played.steady_step
