"""The schedule: which op runs on which worker, in which order. Plain, frozen data.

Invariant: a ``Schedule`` is only a workload and one order per worker, without time, rank or device. It need
not be correct: the checker (``program/checker.py``) decides that, so edited files can be inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from counterflow.common.plurals import plural

from .op import Op, OpKind, Product
from .placement import Placement
from .workload import SkipLink, Workload

__all__ = ["Op", "OpKind", "OptionValue", "Product", "Schedule", "SkipLink", "Workload"]

OptionValue = bool | int | str


@dataclass(frozen=True, slots=True)
class Schedule:
    """A workload and one order per worker.

    A synchronous schedule is one period that ends in a flush, an asynchronous schedule has several periods
    and no flush between them. ``steady`` gives, for an asynchronous schedule, each worker's slice
    ``order[start:stop]`` that consists of whole periods after the warm-up and before the drain.

    ``pairs`` gives, for each worker, slices ``order[start:stop]`` of ops of two stages that run at once,
    those of each stage in their order: the all-to-all of one beside the compute of the other
    (``program/pairs.py``). No op of a pair needs one of the other stage. Empty: one op after another.
    """

    scheme: str
    options: tuple[tuple[str, OptionValue], ...]
    workload: Workload
    orders: tuple[tuple[Op, ...], ...]
    steady: tuple[tuple[int, int], ...] | None = None
    pairs: tuple[tuple[tuple[int, int], ...], ...] = ()

    _repr_html_: ClassVar[Callable[[Schedule], str]]
    """Representation in a notebook; ``drawing``, which imports this module, defines it."""

    @property
    def placement(self) -> Placement:
        """Workers of all stages of all pipes."""
        return self.workload.placement

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one period (one update of every stage)."""
        return self.workload.micro_batches

    @property
    def periods(self) -> int:
        """Number of updates of every stage."""
        return self.workload.periods

    @property
    def synchronous(self) -> bool:
        """True if a flush ends the only period."""
        return self.workload.synchronous

    @property
    def workers(self) -> int:
        """Number of workers of one pipeline group."""
        return self.workload.placement.workers

    @property
    def stages(self) -> int:
        """Number of stages the model is cut into."""
        return self.workload.placement.stages

    @property
    def pipes(self) -> int:
        """Number of passes through all the stages, each along a placement of its own."""
        return self.workload.placement.pipes

    @property
    def total_micro_batches(self) -> int:
        """Micro-batches of all periods together."""
        return self.workload.total_micro_batches

    def period_of(self, op: Op) -> int:
        """The period to whose gradients ``op`` adds, or whose samples it reads."""
        return op.micro_batches[0] // self.workload.micro_batches

    def with_skips(self, skips: Iterable[SkipLink]) -> Schedule:
        """The same orders for a model with skip connections."""
        return replace(self, workload=replace(self.workload, skips=tuple(sorted(skips))))

    def ops(self) -> Iterator[Op]:
        """Every op, worker by worker in its order."""
        for order in self.orders:
            yield from order

    def __repr__(self) -> str:
        """One line; the orders are in ``orders``."""
        return f"<Schedule {self}: {plural(self.workers, 'worker')}, {sum(map(len, self.orders)):,} ops>"

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.scheme}({shown})"
