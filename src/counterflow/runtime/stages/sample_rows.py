"""Samples, and positions of their sequence, on which a stage runs."""

from __future__ import annotations

from typing import NamedTuple


class SampleRows(NamedTuple):
    """Samples ``start`` to ``stop`` of the ``samples`` of micro-batch ``micro_batch`` of all replicas.

    Of their sequence it is slice ``slice`` of ``slices``, with ``positions`` of the ``sequence_length``
    positions; both are 0 on a worker without the mini-batch.
    """

    micro_batch: int
    samples: int
    start: int
    stop: int
    slice: int = 0
    slices: int = 1
    positions: int = 0
    sequence_length: int = 0

    def uncut(self) -> SampleRows:
        """Return the rows of the sequence of which this is the first slice."""
        return self._replace(slice=0, slices=1)
