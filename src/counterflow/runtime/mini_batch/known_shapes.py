"""Shapes of messages as earlier mini-batches showed them, so that none has to describe itself again.

A mini-batch is known by the shapes of its inputs. One of micro-batches that are ready, whose lengths may
differ, is also known if each of its micro-batches is: if one like it was seen before, in any mini-batch.

Invariant: all workers of a replica know and forget the same, as all receive the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from counterflow.schedule.workload import Workload

from ..messages.values import Shapes

_Key = TypeVar("_Key")

_KINDS = 256
"""Maximum number of kinds of mini-batches whose shapes are known at once."""

_MICRO_BATCHES = 4096
"""Maximum number of kinds of micro-batches, by pipe."""


class KnownShapes:
    """The known shapes of one pipeline.

    Args:
        workload: what says through which pipe each micro-batch goes.
    """

    def __init__(self, workload: Workload) -> None:
        self._pipes = {m: op_pass.pipe for op_pass in workload.passes for m in op_pass.micro_batches}
        self._mini_batches: dict[int, Shapes] = {}
        self._micro_batches: dict[tuple[int, int], tuple[Shapes, int]] = {}
        """Shapes of a mini-batch that had such a micro-batch, and its number there, by kind and pipe."""

    def __contains__(self, kind: int) -> bool:
        """True if an earlier mini-batch had this kind."""
        return kind in self._mini_batches

    def of(self, kind: int, signatures: Sequence[int]) -> Shapes | None:
        """The shapes of a mini-batch's messages; None: they are not known yet.

        Args:
            kind: of the mini-batch; 0: nobody knows it.
            signatures: of its micro-batches, if they were ready.
        """
        if not kind:
            return None
        known = self._mini_batches.get(kind)
        if known is None and signatures:
            known = {}
            for number, key in enumerate(self._keys(signatures)):
                seen = self._micro_batches.get(key)
                if seen is None:
                    return None
                shapes, position = seen
                for (of, unit), layout in shapes.items():
                    if unit.micro_batch == position:
                        known[of, unit._replace(micro_batch=number)] = layout
            _keep(self._mini_batches, kind, known, _KINDS)
        return known

    def learn(self, kind: int, signatures: Sequence[int], shapes: Shapes) -> None:
        """Know the shapes of a mini-batch, which may get more until its messages have all arrived."""
        _keep(self._mini_batches, kind, shapes, _KINDS)
        for number, key in enumerate(self._keys(signatures)):
            _keep(self._micro_batches, key, (shapes, number), _MICRO_BATCHES)

    def clear(self) -> None:
        """Know none any more."""
        self._mini_batches.clear()
        self._micro_batches.clear()

    def _keys(self, signatures: Sequence[int]) -> list[tuple[int, int]]:
        return [(kind, self._pipes[number]) for number, kind in enumerate(signatures)]


def _keep(known: dict[_Key, Any], key: _Key, value: object, most: int) -> None:
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
