"""The communication plan of a program: all that is decided about its messages before it runs.

Invariant: a plan is a pure function of the program. The checker proves it without this code
(``rules/plan_rules.py``), and the runtime executes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from counterflow.schedule.graph import OpGraph

from ..actions import Action, Compute, Program
from .link_rounds import Communicators, fewest_rounds, links_of
from .receive_buffers import BufferTable, Lifetime, colour, lifetimes


@dataclass(frozen=True, slots=True)
class CommunicationPlan:
    """Plan of a program's messages.

    Attributes:
        communicators: the communicators of its messages, and the rounds in which they are made.
        buffers: receive buffers of each worker, for messages of equal shapes.
        ahead: for each worker and receive, number of ops that run between its posting and the op that needs
            the message.
    """

    communicators: Communicators
    buffers: tuple[BufferTable, ...]
    ahead: tuple[tuple[int, ...], ...]


def communication_plan(program: Program, graph: OpGraph | None = None) -> CommunicationPlan:
    """The plan of a program.

    Args:
        program: one action list per worker.
        graph: graph of its schedule, if it was made already.

    >>> from counterflow.program.lowering import lower
    >>> from counterflow.schedule.schemes import dapple
    >>> [table.count for table in communication_plan(lower(dapple(stages=4, micro_batches=8))).buffers]
    [2, 5, 4, 2]
    """
    graph = OpGraph(program.schedule) if graph is None else graph
    lives = [lifetimes(program, worker, graph) for worker in range(len(program.actions))]
    return CommunicationPlan(
        fewest_rounds(links_of(program)),
        tuple(map(colour, lives)),
        tuple(_ahead(actions, row) for actions, row in zip(program.actions, lives, strict=True)),
    )


def _ahead(actions: Sequence[Action], lives: Sequence[Lifetime]) -> tuple[int, ...]:
    before = [*accumulate((isinstance(action, Compute) for action in actions), initial=0)]
    return tuple(before[life.needed] - before[life.start] for life in lives)
