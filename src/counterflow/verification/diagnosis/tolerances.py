"""Relative differences that count as rounding, by purpose and dtype: one table for all comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum differences relative to the largest value.

    Attributes:
        float64: tolerance of float64, which may contain parts computed in float32.
        float32: tolerance of float32.
        lower: tolerance of all other dtypes.
        by_dtype: tolerances of single dtypes that differ from ``lower``.
    """

    float64: float
    float32: float
    lower: float
    by_dtype: Mapping[torch.dtype, float] = field(default_factory=dict)

    def of(self, *dtypes: torch.dtype) -> float:
        """Tolerance of values that depend on all of some dtypes.

        >>> ACTIVATIONS.of(torch.float64, torch.float32)
        0.001
        """
        table = {torch.float64: self.float64, torch.float32: self.float32, **self.by_dtype}
        return max(table.get(dtype, self.lower) for dtype in dtypes)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype of least precision among some; float32 if there are none."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


COARSE = 6e-2
"""Tolerance of a computation in lower precision, of whatever dtype its results are."""

ACTIVATIONS = Tolerance(1e-6, 1e-3, COARSE)
"""Outputs of layers on parts of a batch or a sequence, logits, and gradients of inputs."""

LOSSES = Tolerance(1e-6, 1e-3, 1e-3, {torch.float16: 8e-3, torch.bfloat16: COARSE})
"""Losses of samples."""

LOSSES_OF_SLICES = Tolerance(1e-6, 1e-2, 1e-2)
"""Losses of slices of a sequence, by the dtype of the outputs."""

GRADIENTS = Tolerance(1e-5, 1e-2, COARSE, {torch.float16: inf})
"""Gradients that losses give to outputs, relative to their norm. A loss may compute in a lower precision than
that of its result; gradients that underflow in float16 may be anything."""

MODELS = Tolerance(1e-6, 1e-4, 0.05)
"""Outputs, losses and gradients of a whole model."""

TRAININGS = Tolerance(1e-10, 1e-5, 1e-2)
"""Numbers of a training against one process."""

COMPRESSED_TRAININGS = {"bfloat16": 0.05, "int8": 0.4}
"""Numbers of a few updates in float32, by the form in which gradients are summed."""

WEIGHTS = 1e-9
"""Weights of losses, and other sums of counts."""

SUMS = 1e-14
"""Equal sums of counts that were added in another order."""

SMALL = 1e-2
"""Share of the tolerance, relative to the largest gradient of all, below which a gradient is noise."""

UPDATE_UNITS = 8.0
"""Units in the last place by which updates may differ: some optimisers concatenate all parameters."""

SHARDED_UPDATES = 0.3
"""Part of its largest update by which that of a shard may differ: Muon's five iterations in bfloat16 enlarge
differences of rounding to 0.1; a norm of a shard in place of the weight's makes 0.5 and more."""

OPTIONS = 1e-6
"""Numbers that an optimiser computes among the options of its groups."""

RERUNS_ON_GPU = 1e-2
"""Outputs of a second run on a GPU, whose kernels may add in another order."""

ROW_FACTOR = 8.0
"""Factor of the tolerance of two runs, if one of them has the samples of several units."""


def square_root_tolerance(dtype: torch.dtype, factor: float = 1.0) -> float:
    """Tolerance of two runs of the same function that may round differently: half of the digits.

    Args:
        dtype: dtype of the results; of numbers that do not round it is 0.
        factor: factor of the tolerance.

    >>> square_root_tolerance(torch.float64) < 2e-8
    True
    """
    rounds = dtype.is_floating_point or dtype.is_complex
    return float(factor * torch.finfo(dtype).eps ** 0.5) if rounds else 0.0
