"""Weight versions of one stage, for asynchronous schemes: those that are stored, and the one in use.

The schedule determines which version an op uses, when a new one is made and which old ones are released then.
Every version held has its own storages, and a parameter shows the one in use. Parameters themselves stay the
same objects, so hooks, gradients and other references to them do not depend on versions.

Invariant: as many versions are held as the schedule needs, and no more. A backward runs while the version
its forward used is shown: what autograd saved of a parameter has the numbers that it had. All versions add
to the same gradients, because the gradients of one period are summed before those of the next begin. A
parameter's ``_version`` tells its versions apart, and no two have the same one: autograd finds the one that
it saved, and a layer that keeps what it made of a weight by it makes it anew for another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from counterflow.common.tensors.dtensors import local
from counterflow.common.tensors.torch_private import preserve_version_counter, set_version_counters
from counterflow.errors import ScheduleError


class Versions:
    """The versions of a stage's trainable parameters.

    Args:
        stage: the stage's number, for messages.
        parameters: gives the stage's parameters.
        on_new_version: called with a new version's tensors.
    """

    def __init__(
        self,
        stage: int,
        parameters: Callable[[], Iterable[nn.Parameter]],
        on_new_version: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.stage = stage
        self.on_new_version = on_new_version
        self._all = parameters
        self._trained: tuple[nn.Parameter, ...] = ()
        self._memory: tuple[Tensor, ...] = ()
        """Memory of the trained parameters; of sharded ones, this rank's part."""
        self._counted: tuple[Tensor, ...] = ()
        """Tensors with a version counter: the trained parameters and their memory, each once."""
        self._ids: frozenset[int] = frozenset()
        self._counts: dict[int, int] = {}
        """Value of the parameters' ``_version`` while a version is shown, by version."""
        self._last_count = 0
        self._overwritten: dict[int, nn.Parameter] = {}
        self._tensors: dict[int, list[Tensor]] = {}
        self._shown: list[Tensor] = []
        self.shown = 0
        """Number of the version in use."""
        self.peak = 0
        """Largest number of versions stored at once."""

    @property
    def stored(self) -> tuple[int, ...]:
        """Numbers of the stored versions, oldest first; none while the pipeline is empty."""
        return tuple(sorted(self._tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """Memory of all stored versions."""
        return [tensor for version in self._tensors.values() for tensor in version]

    @property
    def swapped(self) -> frozenset[int]:
        """Identities of the parameters that have versions."""
        return self._ids

    def begin(self) -> None:
        """Make the weights version 0."""
        self._trained = tuple(p for p in self._all() if p.requires_grad)
        self._memory = tuple(map(local, self._trained))
        self._counted = tuple({id(tensor): tensor for tensor in (*self._trained, *self._memory)}.values())
        self._shown = [tensor.data for tensor in self._memory]
        self._tensors = {0: self._shown}
        self._ids = frozenset(map(id, self._trained))
        self._counts.clear()
        self._overwritten.clear()
        self.shown = 0
        self._recount()
        self.peak = max(self.peak, 1)

    def end(self) -> None:
        """Keep only the latest version."""
        self.show_latest()
        self._tensors.clear()
        self._counts.clear()
        self._ids = frozenset()

    def show_latest(self) -> None:
        """Show the latest version, which all code but an op uses."""
        self.use(max(self._tensors))

    def use(self, version: int) -> None:
        """Let the stage compute with a version.

        Raises:
            ScheduleError: it is not held.
        """
        tensors = self._tensors.get(version)
        if tensors is None:
            known = ", ".join(map(str, self.stored))
            raise ScheduleError(f"version {version} of stage {self.stage} is not there, only {known}")
        if version == self.shown:
            return
        self._note_overwritten()
        self.shown = version
        set_version_counters(self._counted, self._counts[version])
        if tensors is not self._shown:
            self._show(tensors)

    def make(self, version: int, frees: Sequence[int]) -> None:
        """Show a new version, equal to the latest one until the optimiser changes it.

        Args:
            version: its number, one more than the latest one's.
            frees: versions that nothing uses from now on. Their storages are used again.
        """
        self._note_overwritten()
        latest = self._tensors[version - 1]
        freed = [self._tensors.pop(v) for v in frees if v in self._tensors]
        if any(tensors is latest for tensors in freed):
            new = latest  # nobody needs the old numbers: they are changed in place
        else:
            new = freed[0] if freed else [torch.empty_like(tensor) for tensor in latest]
            for target, source in zip(new, latest, strict=True):
                target.copy_(source)
        self._tensors[version] = new
        self._counts = {number: count for number, count in self._counts.items() if number in self._tensors}
        self.shown = version
        self._recount()
        self.peak = max(self.peak, len(self._tensors))
        if new is not latest and not freed:
            self.on_new_version(new)
        if new is not self._shown:
            self._show(new)

    def unseen(self) -> AbstractContextManager[None]:
        """Context of an update, which does not count as a change in place of what autograd saved.

        Autograd would refuse its saved parameters. But a backward sees the version that its forward used,
        which the update does not change.
        """
        return preserve_version_counter(self._counted)  # as FSDP2 does

    def note(self) -> None:
        """Note that the weights are in their intended state; changes by hand get a count of their own."""
        self._overwritten.clear()
        count = self._counts.get(self.shown)
        if count is not None and any(tensor._version != count for tensor in self._counted):  # noqa: SLF001 - documented as it
            self._recount()

    def overwritten(self) -> list[nn.Parameter]:
        """Return the parameters of which a version was changed in place since ``note``."""
        self._note_overwritten()
        return list(self._overwritten.values())

    def _note_overwritten(self) -> None:
        count = self._counts.get(self.shown)
        for parameter in self._trained:
            if count is not None and parameter._version != count:  # noqa: SLF001 - documented as it
                self._overwritten[id(parameter)] = parameter

    def _recount(self) -> None:
        now = max((tensor._version for tensor in self._counted), default=0)  # noqa: SLF001 - documented as it
        self._last_count = self._counts[self.shown] = max(self._last_count, now) + 1
        set_version_counters(self._counted, self._last_count)

    def _show(self, tensors: list[Tensor]) -> None:
        for shown, tensor in zip(self._memory, tensors, strict=True):
            shown.data = tensor
        self._shown = tensors
