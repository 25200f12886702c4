"""Weight versions of one stage, for schemes without a flush: which of them are held, and which is in use.

The schedule says which version an op uses, when a new one is made and which old ones may go then. Here
every version held has storages of its own, so that a backward finds the weights its forward used; the
optimiser's own parameters always show the latest one.

Invariant: as many versions are held as the schedule needs, and no more. All versions add to the same
gradients, because the gradients of one period are summed before those of the next begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterflow.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter's name in its module, and its number among the stage's."""

    module: nn.Module
    name: str
    number: int


class Versions:
    """The versions of a stage's trainable parameters.

    Args:
        stage: the stage's number, for messages.
        modules: its layers.
        made: called with a new version's tensors.
    """

    def __init__(
        self, stage: int, modules: Sequence[nn.Module], made: Callable[[Sequence[Tensor]], None]
    ) -> None:
        self.stage = stage
        self.made = made
        numbers: dict[int, int] = {}
        self.masters: list[nn.Parameter] = []
        """The optimiser's: they are the latest version's tensors under another name."""
        self._places: list[_Place] = []
        for module in (child for layer in modules for child in layer.modules()):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self.masters)
                    self.masters.append(parameter)
                self._places.append(_Place(module, name, numbers[id(parameter)]))
        self._held: dict[int, list[nn.Parameter]] = {}
        self._used: list[nn.Parameter] = self.masters
        self.peak = 0
        """The most versions that were held at once."""

    @property
    def held(self) -> tuple[int, ...]:
        """The versions held, oldest first; none while the pipeline is empty and the masters are in use."""
        return tuple(sorted(self._held))

    def begin(self) -> None:
        """The weights are version 0."""
        self._held = {0: [self._of(master.data, master) for master in self.masters]}
        self.peak = max(self.peak, 1)

    def end(self) -> None:
        """Keep only the latest version, and compute with the optimiser's parameters again."""
        self._swap(self.masters)
        self._held.clear()

    def use(self, version: int) -> None:
        """Let the stage compute with a version.

        Raises:
            ScheduleError: it is not held.
        """
        found = self._held.get(version)
        if found is None:
            held = ", ".join(map(str, self.held))
            raise ScheduleError(f"version {version} of stage {self.stage} is not there, only {held}")
        if found is not self._used:
            self._swap(found)

    def make(self, version: int, frees: Sequence[int]) -> None:
        """Let the masters be a new version, equal to the latest one until the optimiser changes them.

        Args:
            version: its number, one more than the latest one's.
            frees: versions that nothing uses from now on. Their storages are used again.
        """
        latest = self._held[version - 1]
        freed = [self._held.pop(v) for v in frees if v in self._held]
        if any(found is latest for found in freed):
            new = latest  # nobody needs the old numbers: they are changed in place
        else:
            new = freed[0] if freed else [self._of(torch.empty_like(m), m) for m in self.masters]
            with torch.no_grad():
                for target, source in zip(new, latest, strict=True):
                    target.copy_(source)
        self._held[version] = new
        self.peak = max(self.peak, len(self._held))
        if new is not latest:
            if not freed:
                self.made(new)
            for master, tensor in zip(self.masters, new, strict=True):
                master.data = tensor.data

    def _of(self, data: Tensor, master: nn.Parameter) -> nn.Parameter:
        """A version's parameter; it adds to the master's gradient."""
        parameter = nn.Parameter(data)
        parameter.grad = master.grad
        return parameter

    def _swap(self, parameters: list[nn.Parameter]) -> None:
        # As torch.func.functional_call does for one call, and without Module.__setattr__ for each of many.
        for place in self._places:
            place.module._parameters[place.name] = parameters[place.number]  # noqa: SLF001
        self._used = parameters
