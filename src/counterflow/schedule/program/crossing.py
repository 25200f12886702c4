"""Messages that cross: two workers send to each other at the same place of their lists.

Both are then sent and received in one go, so that a backend that keeps the messages of two workers in
order does not make one wait for the other. It is safe where one after the other is: the two actions stand
side by side on both workers, so neither worker does anything between them that another could wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from .actions import Action, Exchange, Program, Receive, Send


def with_exchanges(program: Program) -> Program:
    """Every send and receive that cross as one action.

    >>> from counterflow.schedule.program.lowering import lower
    >>> from counterflow.schedule.schemes import interleaved
    >>> program = lower(interleaved(workers=4, micro_batches=4, chunks=2))
    >>> print(*(action for action in program.actions[3] if isinstance(action, Exchange)))
    Exchange: ReceiveActivation F3.6 from worker 2, SendGradient B1.7 to worker 2
    """
    lists: list[tuple[Action, ...]] = []
    for worker, actions in enumerate(program.actions):
        joined = list(actions)
        for index in reversed(_crossing(program.actions, worker)):
            first, second = actions[index : index + 2]
            assert isinstance(first, Send | Receive)
            assert isinstance(second, Send | Receive)
            joined[index : index + 2] = [Exchange(first, second)]
        lists.append(tuple(joined))
    return replace(program, actions=tuple(lists))


def _crossing(lists: Sequence[Sequence[Action]], worker: int) -> list[int]:
    """The places in a worker's list from which on two actions are a send and a receive that cross."""
    places: dict[int, dict[tuple[object, ...], int]] = {}
    found: list[int] = []
    for index, (one, two) in enumerate(pairwise(lists[worker])):
        if not isinstance(one, Send | Receive) or not isinstance(two, Send | Receive):
            continue
        if one.peer != two.peer or isinstance(one, Send) == isinstance(two, Send):
            continue
        if one.peer not in places:
            places[one.peer] = {
                (isinstance(action, Send), action.output, action.skip): place
                for place, action in enumerate(lists[one.peer])
                if isinstance(action, Send | Receive) and action.peer == worker
            }
        theirs = places[one.peer]
        first, second = (
            theirs[not isinstance(action, Send), action.output, action.skip] for action in (one, two)
        )
        if second == first + 1 and (not found or found[-1] < index - 1):
            found.append(index)
    return found
