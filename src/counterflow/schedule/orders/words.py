"""Orders written in words such as F0, I1, B0, W: a kind of op and which of the worker's two stages.

Schemes share it whose sources describe a worker's order in this way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from counterflow.schedule.ir import Op, OpKind
from counterflow.schedule.op import B, I, W

_COUNTED_WITH = {I: B}


def ops_of(words: Iterable[str], op: Callable[[OpKind, int, int], Op]) -> Iterator[Op]:
    """The ops of an order that is written in words.

    The first F0 is the forward of the first micro-batch on the worker's stage 0, the next F0 that of the
    second. Backwards are numbered in the same way, whole (B0) or split (I0). W0 computes the weight gradients
    of the oldest input gradient of stage 0 that waits for them, W those of the oldest of all.

    Args:
        words: the order.
        op: function that makes an op of its kind, the index of the worker's stage, and the micro-batch.

    >>> words = "F0 F1 F1 I1 I1 W F0 B0".split()
    >>> print(*ops_of(words, lambda kind, stage, m: Op(kind, 7 + stage, (m,))))
    F0.7 F0.8 F1.8 I0.8 I1.8 W0.8 F1.7 B0.7
    """
    begun: Counter[tuple[OpKind, str]] = Counter()
    waiting: list[tuple[str, int]] = []
    for word in words:
        kind, stage = OpKind(word[0]), word[1:]
        if kind is W:
            oldest = next(op_waiting for op_waiting in waiting if stage in ("", op_waiting[0]))
            waiting.remove(oldest)
            yield op(kind, int(oldest[0]), oldest[1])
            continue
        counted = _COUNTED_WITH.get(kind, kind), stage
        if kind is I:
            waiting.append((stage, begun[counted]))
        yield op(kind, int(stage), begun[counted])
        begun[counted] += 1
