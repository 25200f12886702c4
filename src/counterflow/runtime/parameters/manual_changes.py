"""Weights, buffers and options of optimisers that the user changes between steps while mini-batches are in
flight.

Invariant: between two steps of an asynchronous scheme nothing changes what mini-batches in flight go on with.
By then some stages have been updated and others have not: no weights are those after the last step, and a
learning rate would be one of other mini-batches on each stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from counterflow.common.doubling import is_doubling
from counterflow.common.tensors.dtensors import local
from counterflow.common.trees import version_of
from counterflow.errors import ConfigError

from ..stages.stage import LocalStage
from .digest import digest
from .replica_digests import tensors_of
from .weights import Weights

_FIRST_STEPS = 4
"""Steps after which contents are noted too, as torch does not count changes through ``.data``; then steps 4,
8, 16, ..."""


_NO_EFFECT = "initial_lr"
"""Option of a group that only schedulers read, and which they add when they are made."""

_NO_GROUP: Mapping[str, Any] = {}

_TensorMark = tuple[int, int, int, bool]
"""Identity of a tensor, its number of changes, its address, and ``requires_grad``."""

_PLAIN = (float, int, bool, str, type(None))


class ManualChanges:
    """A worker's watch between steps.

    Args:
        weights: the worker's weights.
        watches: whether steps leave mini-batches in flight; False: nothing is watched.
    """

    def __init__(self, weights: Weights, *, watches: bool) -> None:
        self._weights, self._device = weights, weights.transport.device
        self._stages = weights.stages if watches else {}
        self._noted: dict[int, list[tuple[Tensor, _TensorMark]]] = {}
        self._options: dict[int, list[Mapping[str, Any]]] = {}
        self._values: list[dict[str, Any]] = []
        """Values of the noted options, whose identities no others get while they live."""
        self._contents: dict[int, Tensor] = {}

    def note(self, step: int) -> None:
        """Note all tensors and options at the end of a step, of which they are the last change."""
        if not self._stages:
            return
        tensors = {stage: tensors_of(local_stage) for stage, local_stage in self._stages.items()}
        self._noted = {stage: [(t, _tensor_mark(t)) for t in of_stage] for stage, of_stage in tensors.items()}
        optimizers = self._weights.optimizers
        self._options = {stage: _options_of(optimizer) for stage, optimizer in optimizers.items()}
        self._values = [dict(group) for optimizer in optimizers.values() for group in optimizer.param_groups]
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
            now, then = [_tensor_mark(t) for t in tensors], [mark for _, mark in noted]
            contents = self._contents.get(stage)
            if now == then and (contents is None or bool(digest(tensors, self._device) == contents)):
                continue
            for gradients in self._weights.placement.all_gradients():
                gradients.refuse_unfrozen()  # which a flush does not help
            pairs = zip(tensors, now, then, strict=False)
            changed = next(((t, mark, old) for t, mark, old in pairs if mark != old), None)
            raise _refusal(_tensor_text(local_stage, changed))
        if self._noted:
            self._check_options()

    def _check_options(self) -> None:
        for stage, optimizer in self._weights.optimizers.items():
            pairs = zip_longest(_options_of(optimizer), self._options[stage], fillvalue=_NO_GROUP)
            for number, (now, then) in enumerate(pairs):
                if now == then:
                    continue
                names = (n for n in (*then, *now) if (n in now, now.get(n)) != (n in then, then.get(n)))
                raise _refusal(f"{next(names)!r} of group {number} of the optimizer of stage {stage}")


def _tensor_mark(tensor: Tensor) -> _TensorMark:
    version = tensor._version  # noqa: SLF001 - documented as it
    return id(tensor), version, local(tensor).data_ptr(), tensor.requires_grad


def _options_of(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    return [
        {
            name: value if type(value) in _PLAIN else [*map(id, value)] if name == "params" else _mark(value)
            for name, value in group.items()
            if name != _NO_EFFECT
        }
        for group in optimizer.param_groups
    ]


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):  # the device is not read
        return id(value), version_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(_mark, value))
    return value if type(value) in _PLAIN else id(value)


def _tensor_text(local_stage: LocalStage, changed: tuple[Tensor, _TensorMark, _TensorMark] | None) -> str:
    tensor, now, then = changed or (None, None, None)
    names = (
        f"{name!r} of layer {layer.index} ({type(layer.module).__name__})"
        for layer in local_stage.with_weights
        for name, candidate in (*layer.module.named_parameters(), *layer.module.named_buffers())
        if candidate is tensor
    )
    text = next(names, f"a weight or buffer of stage {local_stage.stage}")
    frozen = now is not None and then is not None and now[:-1] == then[:-1]
    return f"requires_grad of {text}" if frozen else text


def _refusal(subject: str) -> ConfigError:
    return ConfigError(
        f"{subject} was changed between steps while mini-batches are in flight, which need it as it was, and "
        "whose updates only some stages have made; call flush() before the change"
    )
