"""What counts in a mini-batch, known from its targets before the first backward.

Gradients are divided by it, so that they are as large as in one process wherever a hook sees them. What came
of the losses themselves corrects it at the end of the step, if it was not that.

Invariant: all workers divide by the same, or all by the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import later
from ..transport import Gathering
from .counted import Means

Targets = Callable[[], Sequence[Any] | None]
"""Those of the replica's micro-batches that have samples; None on workers without the last stage."""


@dataclass(frozen=True, slots=True)
class Others:
    """Workers that give losses, too.

    Attributes:
        start: begins to tell all of them a number.
        read: what was told, by rank.
        alike: by replica the ranks that are given the same samples.
        late: whether this worker tells only when it has made a loss, if it does not know its rule yet.
        host_targets: the targets where they were given: to count them holds up no device.
    """

    start: Callable[[float], Gathering]
    read: Callable[[Gathering], Sequence[float]]
    alike: Sequence[Sequence[int]]
    late: bool
    host_targets: Targets


class Expected:
    """Of one mini-batch.

    Args:
        means: knows the rule, once a loss was made; None on workers without the last stage.
        targets: of this worker.
        total: samples, instead of which it is divided.
        others: whom it is agreed on with; None: this worker alone gives losses.
    """

    def __init__(self, means: Means | None, targets: Targets, total: int, others: Others | None) -> None:
        self._means, self._targets, self._total, self._others = means, targets, total, others
        self._telling: Gathering | None = None
        self._known = False
        self._divisor: Tensor | float | None = None
        if others is not None and (not others.late or (means is not None and means.has_rule)):
            self.tell()

    def divisor(self) -> Tensor | float | None:
        """What gradients are divided by; None: the samples. Called after a unit's loss was made."""
        if not self._known:
            self.settle()
            if self._others is None:
                self._divisor = self._own()
        return self._divisor

    def settle(self) -> None:
        """Hear what the others told, whether it is needed or not."""
        if self._others is None or self._known:
            return
        self.tell()
        assert self._telling is not None
        told, self._known = self._others.read(self._telling), True
        counts = [max(told[rank] for rank in ranks) for ranks in self._others.alike]
        if min(counts) > 0:
            self._divisor = math.fsum(counts)

    def tell(self) -> None:
        """Begin to tell the others, if that was not done: before anything else is told to all."""
        others = self._others
        if others is None or self._telling is not None:
            return
        count = None if self._means is None else self._means.count(others.host_targets())
        if count is None and self._means is not None:
            count = self._means.count(self._targets())
        value = 0.0 if count is None else float(count)
        self._telling = others.start(value if math.isfinite(value) else 0.0)

    def _own(self) -> Tensor | float | None:
        self._known = True
        count = None if self._means is None else self._means.count(self._targets())
        if isinstance(count, Tensor) and later.holds_host(count.device):
            return torch.where(count > 0, count, float(self._total))  # read later, to hold up nothing
        return None if count is None or not float(count) > 0 else float(count)
