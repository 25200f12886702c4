"""Evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules are in evaluation mode; after it each is in the mode that it had."""
    modes_before = [(module, module.training) for module in modules]
    modes = [(child, child.training) for module, _ in modes_before for child in module.modules()]
    try:
        for module, _ in modes_before:
            module.eval()
        yield
    finally:
        for module, mode in modes_before:
            module.train(mode)  # some do more than to note it
        for child, mode in modes:
            child.training = mode
