"""Samples, and positions of their sequence, on which a stage runs."""

from __future__ import annotations

from typing import NamedTuple


class SampleRows(NamedTuple):
    """Samples ``start`` to ``stop`` of the ``samples`` of micro-batch ``micro_batch`` of all replicas.

    Of their sequence it is number ``slice`` of ``slices``, with ``positions`` of the ``whole`` one's; both
    are 0 where this worker is not given the mini-batch.
    """

    micro_batch: int
    samples: int
    start: int
    stop: int
    slice: int = 0
    slices: int = 1
    positions: int = 0
    whole: int = 0

    def uncut(self) -> SampleRows:
        """Return the rows of the sequence of which this is the first slice."""
        return self._replace(slice=0, slices=1)
