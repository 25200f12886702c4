"""The mini-batch of one step as a worker sees it: its part of the samples, the losses, known shapes.

What it does not do: decide who gets which samples; ``batches.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..messages.values import Shapes, Unit
from ..stages.randomness import SampleRows
from .feed import Feed
from .loss_check import LossCheck
from .losses import Losses
from .position_check import PositionCheck
from .samples import Dims
from .slicing import SequenceDims
from .told import Told

Key = tuple[int, Unit]
"""A stage and what runs through it (a micro-batch runs on one pipe only)."""


class RowsOf(dict[Unit, SampleRows]):
    """By unit its samples in terms of the whole mini-batch; found as they are asked for.

    Args:
        first: number of this replica's first micro-batch among those of all replicas.
        samples: by micro-batch.
        slices: of each.
        lengths: by micro-batch the positions of its sequence; none where they are not known.
    """

    def __init__(
        self, first: int, samples: Sequence[int], slices: int = 1, lengths: Sequence[int] = ()
    ) -> None:
        self.first, self.samples, self.slices, self.lengths = first, samples, slices, lengths

    def __missing__(self, unit: Unit) -> SampleRows:
        samples = self.samples[unit.micro_batch]
        if self.slices > 1:  # parts are slices of all its samples
            number, whole = self.first + unit.micro_batch, 0
            if self.lengths:
                whole = self.lengths[unit.micro_batch]
            positions = unit.rows(whole)
            count = positions.stop - positions.start
            found = self[unit] = SampleRows(number, samples, 0, samples, *unit[1:3], count, whole)
            return found
        rows = unit.rows(samples)
        found = self[unit] = SampleRows(self.first + unit.micro_batch, samples, rows.start, rows.stop)
        return found


rows_of = lru_cache(maxsize=64)(RowsOf)
"""That of a mini-batch like one before."""


@dataclass(slots=True)
class Batch:
    """The replica's mini-batch of one step.

    Attributes:
        step: the step's number.
        inputs: by micro-batch, on the device; None on a worker without the first stage.
        targets: likewise; None on a worker without the last stage.
        samples: by micro-batch.
        total: samples of the mini-batch of all replicas.
        rows: of each unit.
        training: whether gradients are wanted.
        input_dims: which dimensions of the inputs the samples are.
        target_dims: likewise of the targets.
        known: the shapes of what travels, by stage and unit, if they were seen before.
        told: what this worker tells of the call with the loss, where nothing was agreed upon before.
        compare: looks at what all told of it.
        learnt: where the shapes of what travels are noted.
        kept: whether what is learnt is known of later ones.
        await_total: waits for what the others were given, before anything they see; gives ``total``.
        divisor: what losses are divided by as they enter the mini-batch's; None: by its samples.
        checks: see whether its loss is a mean over samples, and over positions; none: nobody asks.
        losses: of its micro-batches, as they come.
        outputs: of the last stage by unit, if they are wanted.
        has_loss: whether losses are wanted.
        compared: whether the copies of stages are compared as it leaves them.
        sequence: along which dimensions it is cut in slices; None: it is not.
    """

    step: int
    inputs: Feed | None
    targets: Feed | None
    samples: Sequence[int]
    total: int
    rows: RowsOf
    training: bool
    input_dims: Dims
    target_dims: Dims
    known: Shapes | None
    told: Told
    compare: Callable[[Sequence[Told]], object]
    learnt: Shapes = field(default_factory=dict)
    kept: bool = False
    await_total: Callable[[], int] | None = None
    divisor: float | None = None
    checks: list[LossCheck | PositionCheck] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    outputs: dict[Unit, Any] | None = None
    has_loss: bool = True
    compared: bool = False
    sequence: SequenceDims | None = None

    @property
    def feeds(self) -> list[Feed]:
        """The inputs and the targets, where there are any."""
        return [feed for feed in (self.inputs, self.targets) if feed is not None]
