"""Actions and ops moved by periods: the same work on a later mini-batch."""

from __future__ import annotations

from dataclasses import replace

from counterflow.schedule.ir import Op

from .actions import Action, Compute, Message, Receive, Send, StartGather, Update, WaitGather


def shifted(action: Action, periods: int, micro_batches: int) -> Action:
    """The same action, some periods of ``micro_batches`` later."""
    if not periods:
        return action
    match action:
        case Compute(op, pair):
            shifted_pair = tuple(shifted_op(paired, periods, micro_batches) for paired in pair)
            return Compute(shifted_op(op, periods, micro_batches), shifted_pair)
        case Update(stage, version, frees):
            return Update(stage, version + periods, tuple(v + periods for v in frees))
        case Send() | Receive():
            return _shifted_message(action, periods, micro_batches)
        case StartGather() | WaitGather():
            return type(action)(*(None if period is None else period + periods for period in action.periods))
        case _:
            return replace(action, period=action.period + periods)


def _shifted_message(message: Message, periods: int, micro_batches: int) -> Message:
    return replace(message, output=shifted_op(message.output, periods, micro_batches))


def shifted_op(op: Op, periods: int, micro_batches: int) -> Op:
    """The same op, some periods of ``micro_batches`` later."""
    moved = tuple(m + periods * micro_batches for m in op.micro_batches)
    return op._replace(micro_batches=moved, version=op.version + periods)
