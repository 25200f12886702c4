"""Weights and buffers that the user changes between steps while mini-batches are in flight.

Invariant: between two steps of an asynchronous scheme nothing changes what mini-batches in flight go on with.
By then some stages have been updated and others have not: no weights are those after the last step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from counterflow.common.doubling import is_doubling
from counterflow.common.tensors.dtensors import local
from counterflow.errors import ConfigError

from ..stages.stage import LocalStage
from .digest import digest
from .replica_digests import tensors_of

_FIRST_STEPS = 4
"""Steps after which contents are noted too, as torch does not count changes through ``.data``; then steps 4,
8, 16, ..."""


class ManualChanges:
    """A worker's watch between steps.

    Args:
        stages: the stages that are watched.
        device: the worker's device.
    """

    def __init__(self, stages: Mapping[int, LocalStage], device: torch.device) -> None:
        self._stages, self._device = stages, device
        self._noted: dict[int, list[tuple[Tensor, int, int]]] = {}
        self._contents: dict[int, Tensor] = {}

    def note(self, step: int) -> None:
        """Note all tensors at the end of a step."""
        if not self._stages:
            return
        tensors = {stage: tensors_of(local_stage) for stage, local_stage in self._stages.items()}
        self._noted = {
            stage: [(t, t._version, local(t).data_ptr()) for t in of_stage]  # noqa: SLF001 - documented as it
            for stage, of_stage in tensors.items()
        }
        compares = step < _FIRST_STEPS or is_doubling(step)
        self._contents = (
            {s: digest(stage_tensors, self._device) for s, stage_tensors in tensors.items()}
            if compares
            else {}
        )

    def check(self) -> None:
        """Refuse a change since ``note``, if mini-batches are in flight.

        Raises:
            ConfigError: there is one.
        """
        for stage, noted in self._noted.items():
            local_stage = self._stages[stage]
            tensors = tensors_of(local_stage)
            now = [(id(t), t._version, local(t).data_ptr()) for t in tensors]  # noqa: SLF001 - documented as it
            then = [(id(tensor), version, address) for tensor, version, address in noted]
            contents = self._contents.get(stage)
            if now == then and (contents is None or bool(digest(tensors, self._device) == contents)):
                continue
            changed = (t for t, state, old in zip(tensors, now, then, strict=False) if state != old)
            raise ConfigError(_refusal(local_stage, next(changed, None)))


def _refusal(local_stage: LocalStage, tensor: Tensor | None) -> str:
    names = (
        f"{name!r} of layer {layer.index} ({type(layer.module).__name__})"
        for layer in local_stage.with_weights
        for name, candidate in (*layer.module.named_parameters(), *layer.module.named_buffers())
        if candidate is tensor
    )
    return (
        f"{next(names, f'a weight or buffer of stage {local_stage.stage}')} was changed between steps while "
        "mini-batches are in flight, which need it as it was, and whose updates only some stages have made; "
        "call flush() before the change"
    )
