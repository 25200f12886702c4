"""Early reports of losses, for steps without a barrier whose updates wait for no norm.

The workers with the last stage report the loss one op after their last forward of that stage, if that op
waits for no message, so a device has something to run while its host reads the loss. All others report after
their first op, when the rest of the period before can be read while the device has work. A worker ends its
ops of a period only after the loss of each of its micro-batches is computed, because its backwards start from
the losses. So a worker that waits for the gather waits for no further op of another worker, and still no
weight changes before the loss of the whole mini-batch is known.

Invariant: only the gather changes its place among the waits.

Steps follow each other without a barrier as the same lists one after another. That is safe because each of
them ends if it runs alone: playing each step to its end on all workers before the next begins is one way to
play the whole, and whether a play gets stuck does not depend on how long things take (``action_lists.py``).
No worker is more than one step ahead of another: to end a step it needs each other worker's work of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from counterflow.schedule.ir import Op, Product

from .actions import Action, Compute, Program, Send, StartGather


def with_early_loss(program: Program) -> Program:
    """The same program, with its gather started as soon as the loss is known.

    >>> from counterflow.program.lowering import Ends, lower
    >>> from counterflow.schedule.schemes import dapple
    >>> program = lower(dapple(stages=2, micro_batches=1), ends=Ends(barrier=False))
    >>> print(*program.actions[1], sep="; ")
    ReceiveActivation F0.0 from worker 0; Forward F0.1; Backward B0.1; SendGradient B0.1 to worker 0; \
StartGather loss of period 0, norm and copies of period -1; \
WaitGather loss of period 0, norm and copies of period -1; DropNonFinite of period 0; \
Update stage 1 to version 1
    """
    last = program.schedule.stages - 1
    lists: list[tuple[Action, ...]] = []
    for actions in program.actions:
        row = list(actions)
        start = next(index for index, action in enumerate(row) if isinstance(action, StartGather))
        row.insert(_when_reported(row, last), row.pop(start))
        lists.append(tuple(row))
    return replace(program, actions=tuple(lists))


def _when_reported(actions: Sequence[Action], last: int) -> int:
    ops = [(index, action.op) for index, action in enumerate(actions) if isinstance(action, Compute)]
    losses = [at for at, (_, op) in enumerate(ops) if op.kind.gives is Product.OUTPUT and op.stage == last]
    at = losses[-1] if losses else 0
    if not ops:
        return 0
    if losses and at + 1 < len(ops):
        after = ops[at + 1][1]
        at += after.stage == last or after.kind.takes is None  # the inputs of these exist
    while at + 1 < len(ops) and _continues_pair(actions, ops[at + 1][1]):
        at += 1
    end = ops[at][0] + 1
    while isinstance(actions[end], Send):
        end += 1
    return end


def _continues_pair(actions: Sequence[Action], op: Op) -> bool:
    return any(isinstance(action, Compute) and op in action.pair[1:] for action in actions)
