"""Dependencies of each op: the previous op of its worker, and the op whose product it takes.

The one description of dependencies that the checker, the lowering and the simulator share. A forward of stage
s takes the output of stage s − 1 of the same micro-batches; an op that makes an input gradient takes that of
stage s + 1 of the same micro-batch and part. What an op needs from its own stage (a backward its forward,
weight gradients their input gradient) depends on one worker's order alone, so it is a rule of the checker and
not an edge. The value of a skip connection is made before that of the adjacent stage, so it is a message but
not an edge. The player (``program/player.py``) computes when ops run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count, product
from typing import Any

from counterflow.common.plurals import plural
from counterflow.errors import ScheduleError

from .ir import Op, OpKind, Product, Schedule
from .workload import SkipLink

_TAKES = {kind: (kind.takes, -kind.takes.goes) if kind.takes else (None, 0) for kind in OpKind}
"""The product that an op takes from another stage, and how many stages further on that product is made."""

_Unit = tuple[tuple[int, ...], int, int, int]
"""Micro-batches, pipe, part, parts: what flows from stage to stage."""


def outside(schedule: Schedule, op: Op) -> ScheduleError:
    """The error for an op whose stage or pipe does not exist."""
    return ScheduleError(
        f"{schedule}: {op} belongs to none of its {plural(schedule.pipes, 'pipe')} of "
        f"{plural(schedule.stages, 'stage')}; "
        "run the checker"
    )


class Nodes:
    """The ops of any schedule, right or wrong, as numbered nodes: worker by worker in order.

    Attributes:
        schedule: whose ops they are.
        ops: of each node.
        first: each worker's first node, and one past the last of all.
        worker: of each node.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops: list[Op] = [*chain.from_iterable(schedule.orders)]
        self.first: list[int] = [0]
        self.worker: list[int] = []
        for worker, order in enumerate(schedule.orders):
            self.first.append(self.first[-1] + len(order))
            self.worker += [worker] * len(order)

    @cached_property
    def columns(self) -> tuple[Any, ...]:
        """The fields of ``Op``, each of all ops."""
        return tuple(zip(*self.ops, strict=True)) or ((),) * len(Op._fields)


class OpGraph:
    """The ops of a schedule as numbered nodes (``Nodes``) with their inputs.

    ``source[n]`` is the node whose output node n takes, or None; it may sit on the same worker (then no
    message is sent).

    Args:
        schedule: the orders.
        nodes: its ops, if they are numbered already.

    Raises:
        ScheduleError: an op is of no stage or pipe, its input is computed nowhere, or it is there twice.
    """

    def __init__(self, schedule: Schedule, nodes: Nodes | None = None) -> None:
        nodes = Nodes(schedule) if nodes is None else nodes
        self.schedule, self.ops, self.first, self.worker = schedule, nodes.ops, nodes.first, nodes.worker
        self._columns = nodes.columns
        self._of_kind: dict[OpKind, list[int]] = {kind: [] for kind in OpKind}
        for node, kind in enumerate(self._columns[0]):
            self._of_kind[kind].append(node)
        numbers: defaultdict[_Unit, int] = defaultdict(count().__next__)
        units = [*map(numbers.__getitem__, zip(*self._columns[2:6], strict=True))]
        self._units: dict[_Unit, int] = dict(numbers)
        """Their numbers."""
        many = len(numbers)
        self._keys = [stage * many + unit for stage, unit in zip(self._columns[1], units, strict=True)]
        """Number of the stage and unit of each node."""
        self._makers = self._makers_by_product()
        self.source: list[int | None] = self._sources()

    def _units_before(self, stage: int) -> int:
        return stage * len(self._units)

    def _makers_by_product(self) -> dict[Product, dict[int, int]]:
        _, stages, _, pipes, _, _, _ = self._columns
        known = {*product(range(self.schedule.stages), range(self.schedule.pipes))}
        if not known.issuperset(zip(stages, pipes, strict=True)):
            raise outside(self.schedule, next(op for op in self.ops if (op.stage, op.pipe) not in known))
        makers: dict[Product, dict[int, int]] = {}
        by_kinds: dict[tuple[OpKind, ...], Product] = {}
        """The first product that some kinds make, of those kinds that exist here."""
        for result in Product:
            kinds = tuple(kind for kind, nodes in self._of_kind.items() if nodes and result in kind.makes)
            if kinds in by_kinds:  # unless backwards are split, one op makes both gradients
                makers[result] = makers[by_kinds[kinds]]
                continue
            by_kinds[kinds] = result
            nodes = [*chain.from_iterable(map(self._of_kind.__getitem__, kinds))]
            makers[result] = dict(zip(map(self._keys.__getitem__, nodes), nodes, strict=True))
            if len(makers[result]) != len(nodes):
                raise self._twice(result, nodes)
        return makers

    def _twice(self, result: Product, nodes: Iterable[int]) -> ScheduleError:
        first: dict[int, int] = {}
        node = next(node for node in sorted(nodes) if first.setdefault(self._keys[node], node) != node)
        return ScheduleError(
            f"{self.schedule}: the {result.value} of {self.ops[node]} is made twice; run the checker"
        )

    def _sources(self) -> list[int | None]:
        sources: list[int | None] = [None] * len(self.ops)
        stages, keys, last = self._columns[1], self._keys, self.schedule.stages - 1
        for kind, nodes in self._of_kind.items():
            takes, step = _TAKES[kind]
            if takes is None:
                continue
            makers, distance = self._makers[takes], self._units_before(step)
            end = last if step > 0 else 0
            for node in nodes:
                if stages[node] != end:
                    source = makers.get(keys[node] + distance)
                    if source is None:
                        raise self._no_input(node, stages[node] + step)
                    sources[node] = source
        return sources

    def _no_input(self, node: int, stage: int) -> ScheduleError:
        takes = self.ops[node].kind.takes
        maker = next(kind for kind in OpKind if takes in kind.makes)
        return ScheduleError(
            f"{self.place(node)} has no input: no {maker.word} of stage {stage} on the same micro-batches "
            "exists in any order"
        )

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each node, the nodes whose products it takes: from the stage before or after, and from its own
        stage. These are the facts of ``Workload.needs``, by number, for the speed of searches.
        """
        outputs: dict[tuple[int, int, int, int], int] = {}
        sliced = self.schedule.workload.slices > 1
        for node, op in enumerate(self.ops):
            if op.kind.is_forward:
                outputs.update(((op.pipe, op.stage, m, op.part), node) for m in op.micro_batches)
        further = {
            (kind, self._keys[node]): node
            for kind, nodes in self._of_kind.items()
            for node in nodes
            if not kind.makes
        }
        needs: list[list[int]] = []
        for op, source, key in zip(self.ops, self.source, self._keys, strict=True):
            kind, stage, batches, pipe, part, parts, _ = op
            inputs = [] if source is None else [source]
            if before := [further[k, key] for k in kind.after if (k, key) in further]:
                inputs += before
            elif kind.first is Product.OUTPUT:
                inputs.append(outputs[pipe, stage, batches[0], part if sliced else 0])
            elif kind.first is not None:
                inputs.append(self._makers[kind.first][key])
            if sliced and kind.carries and kind.gives and 0 <= part - kind.carries < parts:
                slice_before = self._units[batches, pipe, part - kind.carries, parts]
                inputs.append(self._makers[kind.gives][self._units_before(stage) + slice_before])
            needs.append(inputs)
        return needs

    @cached_property
    def pair_ends(self) -> tuple[list[int], list[int]]:
        """For each node, the first and the last node of its pair; itself if it has none."""
        nodes = [*range(len(self.ops))]
        if not self.schedule.pairs:
            return nodes, nodes
        firsts, lasts = nodes, nodes.copy()
        for first, pairs in zip(self.first, self.schedule.pairs, strict=False):
            for begin, stop in pairs:
                for node in range(first + begin, min(first + stop, len(nodes))):
                    firsts[node], lasts[node] = first + begin, first + stop - 1
        return firsts, lasts

    def place(self, node: int) -> str:
        """Position of a node, for messages: ``worker 2, op 5: B1.3``."""
        worker = self.worker[node]
        return f"worker {worker}, op {node - self.first[worker]}: {self.ops[node]}"

    @cached_property
    def messages(self) -> list[tuple[int, int, SkipLink | None]]:
        """The (producer, consumer) nodes that sit on different workers, by consumer, then those of skips."""
        between: list[tuple[int, int, SkipLink | None]] = [
            (source, node, None)
            for node, source in enumerate(self.source)
            if source is not None and self.worker[source] != self.worker[node]
        ]
        return between + self.by_skips

    @cached_property
    def by_skips(self) -> list[tuple[int, int, SkipLink]]:
        """The same of skips alone, one after another."""
        return [message for skip in self.schedule.workload.skips for message in self._skipping(skip)]

    def _skipping(self, skip: SkipLink) -> Iterator[tuple[int, int, SkipLink]]:
        placement = self.schedule.placement
        crosses = [
            placement.worker(pipe, skip.source) != placement.worker(pipe, skip.target)
            for pipe in range(placement.pipes)
        ]
        if skip.once:
            yield from self._first_of(skip, crosses)
            return
        for node, op in enumerate(self.ops):
            takes = op.kind.takes
            if takes is None or not crosses[op.pipe]:
                continue
            before, after = (skip.source, skip.target)[:: takes.goes]
            if op.stage != after:
                continue
            source = self._makers[takes].get(self._keys[node] + self._units_before(before - after))
            if source is None:
                raise self._no_input(node, before)
            yield source, node, skip

    def _first_of(self, skip: SkipLink, crosses: Sequence[bool]) -> Iterator[tuple[int, int, SkipLink]]:
        """Nodes of a skip whose value is made once: from the first forward of a pipe and period to the first
        one of the target.
        """
        first: dict[tuple[int, int, int], int] = {}
        for node, op in enumerate(self.ops):
            if op.kind.is_forward and op.stage in (skip.source, skip.target) and crosses[op.pipe]:
                first.setdefault((op.pipe, self.schedule.period_of(op), op.stage), node)
        for (pipe, period, stage), node in first.items():
            if stage == skip.target:
                yield first[pipe, period, skip.source], node, skip

    def circle(self, stuck: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
        """A circle of (node that waits, node it waits for), each on the next one's worker.

        Args:
            stuck: for each worker that cannot continue, its next node and the node that this one waits for.
        """
        path: list[int] = []
        worker = min(stuck)
        while worker not in path:
            path.append(worker)
            worker = self.worker[stuck[worker][1]]
        return [stuck[w] for w in path[path.index(worker) :]]

    def describe_circle(self, stuck: Mapping[int, tuple[int, int]]) -> str:
        """The deadlock as text, one line for each worker in the circle; ``stuck`` as for ``circle``."""
        lines = [
            f"  {self.place(node)} waits for {self.ops[source]} "
            f"(worker {self.worker[source]}, op {source - self.first[self.worker[source]]})"
            for node, source in self.circle(stuck)
        ]
        return "deadlock, the workers wait in a circle:\n" + "\n".join(lines)
