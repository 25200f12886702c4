"""Diagnosis of recomputations: whether a second run on the same input gives the output of the first.

The output of a first run is saved, or its norms, and compared with that of the recomputation. Only one run a
step is compared, the first time its whole output. So the diagnosis finds a layer that depends on more than
its input, weights, buffers and torch's random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from counterflow.common.doubling import is_doubling
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError

from .comparison import norm_distance
from .tolerances import RERUNS_ON_GPU, square_root_tolerance


class FirstOutput:
    """Output of a first run.

    Args:
        tensors: tensors of the output.
        exact: True to compare copies; False: norms, which take no memory.
    """

    def __init__(self, tensors: Iterable[Tensor], *, exact: bool) -> None:
        self._exact = exact
        self._contents = list(map(_copy if exact else _norm, tensors))

    def compare(self, output: Sequence[Tensor], place: str) -> None:
        """Compare with the output of the second run, within rounding.

        Args:
            output: tensors of that output.
            place: the stage or layer in words.

        Raises:
            ConfigError: the outputs differ.
        """
        if len(output) != len(self._contents):
            raise rerun_error(place)
        values = output if self._exact else list(map(_norm, output))
        for got, expected in zip(values, self._contents, strict=True):
            numeric = expected.is_floating_point() or expected.is_complex()
            if not numeric or got.shape != expected.shape or is_dtensor(got):
                continue
            limit = max(square_root_tolerance(expected.dtype), RERUNS_ON_GPU if expected.is_cuda else 0.0)
            if norm_distance(expected, got) > limit:  # False if a value is not finite
                raise rerun_error(place)


class RerunDiagnosis:
    """Choice of the first runs of a stage or layer that are compared.

    On a GPU, where a comparison waits for the device, these are in fewer and fewer steps.

    Args:
        device: device of the outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type != "cpu"
        self._last: int | None = None

    def first_output(self, tensors: Iterable[Tensor], step: int) -> FirstOutput | None:
        """Save the output of a first run; None: the run is not compared."""
        last = self._last
        if last == step:
            return None
        self._last = step
        if last is not None and self._waits and not is_doubling(step):
            return None
        return FirstOutput(tensors, exact=last is None)


def rerun_error(place: str) -> ConfigError:
    """Error of a second run whose output is not that of the first."""
    return ConfigError(
        f"{place} gives other values when it is computed again for its backward; what it does may depend on "
        "its input, weights, buffers and torch's random numbers only, or take recompute='none'"
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _norm(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    numeric = (tensor.is_floating_point() or tensor.is_complex()) and not is_dtensor(tensor)
    return tensor.norm() if numeric else torch.zeros(())
