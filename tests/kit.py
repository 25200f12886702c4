"""What tests of training have in common: optimizers, small models, batches, a loss, threads as workers."""

from __future__ import annotations

import operator
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.runtime.workers.launch import launch

F64 = torch.float64


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Mean over samples of each one's mean."""
    return ((output - target) ** 2).flatten(1).mean(dim=1).mean()


def linears(count: int, width: int = 4, dtype: torch.dtype = F64) -> list[nn.Module]:
    """Linear layers with the same numbers each time."""
    torch.manual_seed(0)
    return [nn.Linear(width, width, dtype=dtype) for _ in range(count)]


def batch(seed: int = 0, samples: int = 8, width: int = 4, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    """Inputs and targets: ``[samples, width]``."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, width, generator=generator, dtype=dtype) for _ in range(2))
    return x, y


def run(
    work: Callable[..., Any],
    *args: object,
    workers: int = 2,
    transport: Any = "strict-local",
    timeout_seconds: float = 60,
) -> list[Any]:
    """Results of a function on threads whose sends wait for their receives."""
    return launch(work, *args, workers=workers, transport=transport, timeout_seconds=timeout_seconds)


class FileFunction:
    """A function of a file, which other processes find by the path.

    Args:
        file: the file.
        name: name of the function.
    """

    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name

    def __reduce__(self) -> Any:
        return operator.getitem, (_FileNames(self._file), self._name)

    def __call__(self) -> Any:
        """Call it here; as it is read from a pickle, it is the function itself."""
        return runpy.run_path(str(self._file))[self._name]()


class _FileNames:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return runpy.run_path, (str(self._file),)
