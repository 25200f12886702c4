"""Updates that wait for the loss alone, for steps without a barrier: each worker tells its part early.

What can tell of the loss are the workers with the last stage; they tell it right after their last forward of
it, all others when they begin. A worker ends its ops of a period only after the loss of each of its
micro-batches is made, because their backwards come from there. So whoever comes to the agreement waits for
no op of another worker, but for what already had to happen; and yet no weight changes before the loss of the
whole mini-batch is known.

Invariant: nothing but the agreement changes its place in who waits for whom.

Steps follow each other without a barrier as the same lists one after another. That is safe because each of
them ends if it runs alone: a play in which all workers end one step before any begins the next is a play of
the whole, and whether a play gets stuck does not depend on how long things take (``play.py``). No worker is
more than one step ahead of another: to end a step it needs each other worker's work of it.
"""

from __future__ import annotations

from dataclasses import replace

from .actions import Action, Agree, Compute, Program, TellLoss


def with_early_loss(program: Program) -> Program:
    """The same program with updates that wait for no norm.

    >>> from counterflow.schedule.program.lowering import lower
    >>> from counterflow.schedule.schemes import dapple
    >>> program = lower(dapple(stages=2, micro_batches=1), norm=False)
    >>> print(*program.actions[1], sep="; ")
    ReceiveActivation F0.0 from worker 0; Forward F0.1; TellLoss of period 0; Backward B0.1; \
SendGradient B0.1 to worker 0; Agree on loss of period 0; Update stage 1 to version 1
    """
    last = program.schedule.stages - 1
    lists: list[tuple[Action, ...]] = []
    for actions in program.actions:
        row = [replace(a, norm=False) if isinstance(a, Agree) else a for a in actions]
        made = [
            index
            for index, action in enumerate(actions)
            if isinstance(action, Compute) and action.op.kind.makes_output and action.op.stage == last
        ]
        row.insert(made[-1] + 1 if made else 0, TellLoss(0))
        lists.append(tuple(row))
    return replace(program, actions=tuple(lists))
