"""What each op waits for: the op before it on its worker and the op whose product it takes.

The one description of dependencies that the checker, the lowering and the simulator share. A forward of
stage s takes the output of stage s − 1 of the same micro-batches; what makes an input gradient takes that
of stage s + 1 of the same micro-batch and part. What an op needs of its own stage (a backward its forward,
weight gradients their input gradient) is a matter of one worker's order, hence a rule of the checker and
no edge here. What comes by a skip is made before what comes from the stage before (or after): it is no edge
either, but a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from counterflow.errors import DeadlockError, ScheduleError

from .ir import Op, OpKind, Product, Schedule
from .workload import SkipLink

_MAKES = {kind: tuple(product.value for product in kind.makes) for kind in OpKind}
_TAKES = {kind: (kind.takes.value, -kind.takes.goes) if kind.takes else ("", 0) for kind in OpKind}
"""What an op takes of another stage: the product, and how many stages further on it is made."""


def outside(schedule: Schedule, op: Op) -> ScheduleError:
    """The error for an op of a stage or pipe that there is none of."""
    return ScheduleError(
        f"{schedule}: {op} is of none of its {schedule.pipes} pipes of {schedule.stages} stages; "
        "run the checker"
    )


class OpGraph:
    """The ops of a schedule as numbered nodes with their inputs.

    Nodes are numbered worker by worker in order: ``first[w]`` is worker w's first node and
    ``first[w + 1]`` one past its last. ``source[n]`` is the node whose output node n takes, or None;
    it may sit on the same worker (then no message is sent).

    Raises:
        ScheduleError: an op is of no stage or pipe, its input is computed nowhere, or it is there twice.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops: list[Op] = list(schedule.ops())
        self.first: list[int] = [0]
        self.worker: list[int] = []
        for worker, order in enumerate(schedule.orders):
            self.first.append(self.first[-1] + len(order))
            self.worker += [worker] * len(order)
        self._makers = self._made()
        self.source: list[int | None] = self._sources()

    def _made(self) -> dict[tuple[str, int, int, tuple[int, ...], int, int], int]:
        """By product, its node."""
        makers: dict[tuple[str, int, int, tuple[int, ...], int, int], int] = {}
        stages, pipes = range(self.schedule.stages), range(self.schedule.pipes)
        for node, op in enumerate(self.ops):
            kind, stage, batches, pipe, part, parts, _ = op
            if stage not in stages or pipe not in pipes:
                raise outside(self.schedule, op)
            for product in _MAKES[kind]:
                key = product, pipe, stage, batches, part, parts
                if makers.setdefault(key, node) != node:
                    raise ScheduleError(
                        f"{self.schedule}: the {product} of {op} is made twice; run the checker"
                    )
        return makers

    def _sources(self) -> list[int | None]:
        sources: list[int | None] = []
        stages = range(self.schedule.stages)
        for node, (kind, stage, batches, pipe, part, parts, _) in enumerate(self.ops):
            product, step = _TAKES[kind]
            source: int | None = None
            if step and stage + step in stages:
                source = self._makers.get((product, pipe, stage + step, batches, part, parts))
                if source is None:
                    raise self._no_input(node, stage + step)
            sources.append(source)
        return sources

    def _no_input(self, node: int, stage: int) -> ScheduleError:
        takes = self.ops[node].kind.takes
        maker = next(kind for kind in OpKind if takes in kind.makes)
        return ScheduleError(
            f"{self.place(node)} has no input: no {maker.word} of stage {stage} on the same micro-batches "
            "is in any order"
        )

    @cached_property
    def needs(self) -> list[list[int]]:
        """By node the nodes whose products it takes: of the stage before or after, and of its own."""
        outputs: dict[tuple[int, int, int], int] = {}
        for node, op in enumerate(self.ops):
            if op.kind.whole:
                outputs.update(((op.pipe, op.stage, m), node) for m in op.micro_batches)
        needs: list[list[int]] = []
        for (kind, stage, batches, pipe, part, parts, _), source in zip(self.ops, self.source, strict=True):
            taken = [] if source is None else [source]
            if kind.first is Product.OUTPUT:
                taken.append(outputs[pipe, stage, batches[0]])
            elif kind.first is not None:
                taken.append(self._makers[kind.first.value, pipe, stage, batches, part, parts])
            needs.append(taken)
        return needs

    def place(self, node: int) -> str:
        """Where a node stands, for messages: ``worker 2, op 5: B1.3``."""
        worker = self.worker[node]
        return f"worker {worker}, op {node - self.first[worker]}: {self.ops[node]}"

    @cached_property
    def messages(self) -> list[tuple[int, int, SkipLink | None]]:
        """The (producer, consumer) nodes that sit on different workers, by consumer, then those of skips."""
        chain: list[tuple[int, int, SkipLink | None]] = [
            (source, node, None)
            for node, source in enumerate(self.source)
            if source is not None and self.worker[source] != self.worker[node]
        ]
        skips = self.schedule.workload.skips
        return chain + [message for skip in skips for message in self._skipping(skip)]

    def _skipping(self, skip: SkipLink) -> Iterator[tuple[int, int, SkipLink]]:
        """The (producer, consumer) nodes of a skip that sit on different workers."""
        placement = self.schedule.placement
        apart = [
            placement.worker(pipe, skip.source) != placement.worker(pipe, skip.target)
            for pipe in range(placement.pipes)
        ]
        if skip.once:
            yield from self._first_of(skip, apart)
            return
        for node, op in enumerate(self.ops):
            takes = op.kind.takes
            if takes is None or not apart[op.pipe]:
                continue
            before, after = (skip.source, skip.target)[:: takes.goes]
            if op.stage != after:
                continue
            source = self._makers.get((takes.value, op.pipe, before, op.micro_batches, op.part, op.parts))
            if source is None:
                raise self._no_input(node, before)
            yield source, node, skip

    def _first_of(self, skip: SkipLink, apart: Sequence[bool]) -> Iterator[tuple[int, int, SkipLink]]:
        """The same where it is made once: from the first forward of a pipe and period to the first."""
        first: dict[tuple[int, int, int], int] = {}
        for node, op in enumerate(self.ops):
            if op.kind.whole and op.stage in (skip.source, skip.target) and apart[op.pipe]:
                first.setdefault((op.pipe, self.schedule.period_of(op), op.stage), node)
        for (pipe, period, stage), node in first.items():
            if stage == skip.target:
                yield first[pipe, period, skip.source], node, skip

    @cached_property
    def _progress(self) -> tuple[list[int], list[int]]:
        """Run every worker as far as it gets: the nodes done in order, and each worker's next node."""
        done = bytearray(len(self.ops))
        topological: list[int] = []
        head = self.first[:-1].copy()
        waiting: dict[int, list[int]] = {}
        runnable = list(range(len(head)))[::-1]
        while runnable:
            worker = runnable.pop()
            node, stop = head[worker], self.first[worker + 1]
            while node < stop:
                source = self.source[node]
                if source is not None and not done[source]:
                    waiting.setdefault(source, []).append(worker)
                    break
                done[node] = 1
                topological.append(node)
                if node in waiting:
                    runnable += waiting.pop(node)
                node += 1
            head[worker] = node
        return topological, head

    @property
    def topological(self) -> list[int]:
        """All nodes, each after what it waits for.

        Raises:
            DeadlockError: workers wait for each other in a circle.
        """
        order, _ = self._progress
        if len(order) != len(self.ops):
            raise DeadlockError(self.describe_cycle())
        return order

    @property
    def deadlocked(self) -> bool:
        """Whether some op can never start."""
        return len(self._progress[0]) != len(self.ops)

    def cycle(self) -> list[tuple[int, int]]:
        """A circle of (node that waits, node it waits for), each on the next one's worker; [] if none."""
        _, head = self._progress
        stuck = [w for w, node in enumerate(head) if node < self.first[w + 1]]
        if not stuck:
            return []
        path: list[int] = []
        worker = stuck[0]
        while worker not in path:
            path.append(worker)
            source = self.source[head[worker]]
            assert source is not None  # only a missing input stops a worker
            worker = self.worker[source]
        circle = path[path.index(worker) :]
        waits = []
        for w in circle:
            source = self.source[head[w]]
            assert source is not None
            waits.append((head[w], source))
        return waits

    def describe_cycle(self) -> str:
        """The deadlock as text, one line for each worker in the circle."""
        lines = [
            f"  {self.place(node)} waits for {self.ops[source]} "
            f"(worker {self.worker[source]}, op {source - self.first[self.worker[source]]})"
            for node, source in self.cycle()
        ]
        return "deadlock, the workers wait in a circle:\n" + "\n".join(lines)

    @cached_property
    def ops_before(self) -> list[list[int]]:
        """By node and other worker, how many of that worker's ops have to be over before it can begin.

        What a node's own worker has to do before is told by its place alone and is not counted.
        """
        found: list[list[int]] = [[]] * len(self.ops)
        none = [0] * len(self.schedule.orders)
        begins = set(self.first)
        for node in self.topological:
            mine = none if node in begins else found[node - 1]
            source = self.source[node]
            if source is not None and self.worker[source] != self.worker[node]:
                mine = list(map(max, mine, found[source]))
                maker = self.worker[source]
                mine[maker] = max(mine[maker], source - self.first[maker] + 1)
            found[node] = mine
        return found

    def earliest(self, durations: list[int]) -> tuple[list[int], list[int]]:
        """Start and end of every node when each runs as soon as it can; messages take no time."""
        start, end = [0] * len(self.ops), [0] * len(self.ops)
        begins = set(self.first)
        for node in self.topological:
            at = 0 if node in begins else end[node - 1]
            source = self.source[node]
            if source is not None and end[source] > at:
                at = end[source]
            start[node], end[node] = at, at + durations[node]
        return start, end
