"""The communication plan of a program: all that is decided about its messages before it runs.

Invariant: a plan is a pure function of the program. The checker proves it without this code
(``rules/plan_rules.py``), and the runtime executes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.schedule.graph import OpGraph

from ..actions import Program
from .buffers import BufferTable, colour, lifetimes


@dataclass(frozen=True, slots=True)
class CommunicationPlan:
    """Plan of a program's messages.

    Attributes:
        buffers: receive buffers of each worker, for messages of equal shapes.
    """

    buffers: tuple[BufferTable, ...]


def communication_plan(program: Program, graph: OpGraph | None = None) -> CommunicationPlan:
    """The plan of a program.

    Args:
        program: one action list per worker.
        graph: graph of its schedule, if it was made already.

    >>> from counterflow.program.lowering import lower
    >>> from counterflow.schedule.schemes import dapple
    >>> [len(table.sizes) for table in communication_plan(lower(dapple(stages=4, micro_batches=8))).buffers]
    [2, 5, 4, 2]
    """
    graph = OpGraph(program.schedule) if graph is None else graph
    workers = range(len(program.actions))
    return CommunicationPlan(tuple(colour(lifetimes(program, worker, graph)) for worker in workers))
