"""Norms of a worker's gradients: global and by stage, on the gradients' device until the host reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import isfinite, nan

import torch
from torch import Tensor

from counterflow.common.tensors import devices

from ..mini_batch.losses import added
from .gradients import GradientGroup


class SquaredNorms:
    """Sum of squares of each group's gradients, in transfer to the host.

    Args:
        groups: groups of gradients.
    """

    def __init__(self, groups: Iterable[GradientGroup]) -> None:
        norms = [group.norms() for group in groups]
        self._pieces = [len(of_group) for of_group in norms]
        norms_of_all = [norm for of_group in norms for norm in of_group]
        self._norms = (
            None
            if not norms_of_all
            else norms_of_all[0]
            if len(norms_of_all) == 1
            else torch.stack(norms_of_all)
        )
        """Norms of all pieces (of one: a single number), on their device; None: there are no pieces."""
        self._later = None if self._norms is None else devices.HostCopy(self._norms)

    def not_finite(self) -> Tensor | None:
        """True if the square of a piece's norm is not finite, on their device; None: there are no pieces."""
        return None if self._norms is None else ~(self._norms**2).isfinite().all()

    def read(self) -> list[float]:
        """The sums; a device's host waits once, until it has come to them."""
        numbers = [] if self._later is None else self._later.read()
        values = iter([norm * norm for norm in (numbers if isinstance(numbers, list) else [numbers])])
        return [added(islice(values, pieces)) for pieces in self._pieces]


class OwnNorm:
    """A worker's part of the global gradient norm, and whether all its gradients are finite.

    Args:
        groups: groups of all its gradients.
        verifications: checks of their sums whose results are read with the norm.
    """

    def __init__(
        self, groups: Sequence[GradientGroup], verifications: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._groups, self._verifications = groups, verifications
        self._squares = SquaredNorms(groups)

    def drop(self) -> None:
        """Set all gradients to zero if one is not finite, where they are; the host goes on."""
        dead = self._squares.not_finite()
        if dead is not None:
            for gradients in self._groups:
                gradients.drop(dead)

    def read(self) -> tuple[float, int | None]:
        """The squared norm that is counted here; the first stage with a gradient that is not finite."""
        squares = list(zip(self._squares.read(), self._groups, strict=True))
        for verify in self._verifications:
            verify()
        odd = [gradients.stage for square, gradients in squares if not isfinite(square)]
        return sum(square for square, gradients in squares if gradients.counted), min(odd, default=None)


class StageNorm:
    """A worker's part of the norm of a stage's gradients, and whether they are finite.

    Args:
        stage: number of the stage.
        counted: squared norm counted on this worker, on the gradients' device.
        alive: whether all gradients of the stage so far were finite, on the gradients' device.
    """

    def __init__(self, stage: int, counted: Tensor, alive: Tensor) -> None:
        self._stage, self._later = stage, devices.HostCopy(torch.stack([counted, alive.double()]))

    def read(self) -> tuple[float, int | None]:
        """The squared norm that is counted here; the stage, if a gradient was not finite."""
        counted, alive = self._later.read()
        return (counted, None) if alive else (nan, self._stage)


def squared_norms(groups: Sequence[GradientGroup], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums of squares of gradients, where they are: of all, and of what this worker counts."""
    all_norms, counted = [], []
    for group in groups:
        norms = group.norms()
        all_norms += norms
        if group.counted:
            counted += norms
    total = (
        (torch.stack(all_norms) ** 2).sum()
        if all_norms
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    if len(counted) == len(all_norms):
        return total, total
    return total, (torch.stack(counted) ** 2).sum() if counted else torch.zeros_like(total)


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor of gradients with a global norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
