"""Weight versions of one stage, for asynchronous schemes: which of them are held, and which is in use.

The schedule determines which version an op uses, when a new one is made and which old ones are released then.
Every version held has its own storages, and a parameter shows the one in use. Parameters themselves stay the
same objects, so hooks, gradients and other references to them do not depend on versions.

Invariant: as many versions are held as the schedule needs, and no more. A backward runs while the version
its forward used is shown: what autograd saved of a parameter has the numbers that it had. All versions add
to the same gradients, because the gradients of one period are summed before those of the next begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from counterflow.errors import ScheduleError

from ..dtensors import local
from ..torch_private import preserve_version_counter


class Versions:
    """The versions of a stage's trainable parameters.

    Args:
        stage: the stage's number, for messages.
        parameters: gives the stage's parameters.
        made: called with a new version's tensors.
    """

    def __init__(
        self,
        stage: int,
        parameters: Callable[[], Iterable[nn.Parameter]],
        made: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.stage = stage
        self.made = made
        self._all = parameters
        self._trained: tuple[nn.Parameter, ...] = ()
        self._memory: tuple[Tensor, ...] = ()
        """Memory of the trained parameters; of sharded ones, this rank's part."""
        self._held: dict[int, list[Tensor]] = {}
        self._shown: list[Tensor] = []
        self.shown = 0
        """The number of the version in use."""
        self.peak = 0
        """The most versions that were held at once."""

    @property
    def held(self) -> tuple[int, ...]:
        """The versions held, oldest first; none while the pipeline is empty."""
        return tuple(sorted(self._held))

    def begin(self) -> None:
        """The weights are version 0."""
        self._trained = tuple(p for p in self._all() if p.requires_grad)
        self._memory = tuple(map(local, self._trained))
        self._shown = [tensor.data for tensor in self._memory]
        self._held = {0: self._shown}
        self.shown = 0
        self.peak = max(self.peak, 1)

    def end(self) -> None:
        """Keep only the latest version."""
        self.show_latest()
        self._held.clear()

    def show_latest(self) -> None:
        """Show the latest version, which is what everybody but an op wants to see."""
        self.use(max(self._held))

    def use(self, version: int) -> None:
        """Let the stage compute with a version.

        Raises:
            ScheduleError: it is not held.
        """
        found = self._held.get(version)
        if found is None:
            held = ", ".join(map(str, self.held))
            raise ScheduleError(f"version {version} of stage {self.stage} is not there, only {held}")
        self.shown = version
        if found is not self._shown:
            self._show(found)

    def make(self, version: int, frees: Sequence[int]) -> None:
        """Show a new version, equal to the latest one until the optimiser changes it.

        Args:
            version: its number, one more than the latest one's.
            frees: versions that nothing uses from now on. Their storages are used again.
        """
        latest = self._held[version - 1]
        freed = [self._held.pop(v) for v in frees if v in self._held]
        if any(found is latest for found in freed):
            new = latest  # nobody needs the old numbers: they are changed in place
        else:
            new = freed[0] if freed else [torch.empty_like(tensor) for tensor in latest]
            for target, source in zip(new, latest, strict=True):
                target.copy_(source)
        self._held[version] = new
        self.shown = version
        self.peak = max(self.peak, len(self._held))
        if new is not latest and not freed:
            self.made(new)
        if new is not self._shown:
            self._show(new)

    def unseen(self) -> AbstractContextManager[None]:
        """Around an update: autograd may go on with what it saved of the parameters.

        It would refuse, because the parameter at hand was changed in place; but what a backward sees is the
        version that its forward used, which was not.
        """
        changed = {id(tensor): tensor for tensor in (*self._trained, *self._memory)}
        return preserve_version_counter(tuple(changed.values()))  # as FSDP2 does

    def _show(self, tensors: list[Tensor]) -> None:
        for shown, tensor in zip(self._memory, tensors, strict=True):
            shown.data = tensor
        self._shown = tensors
