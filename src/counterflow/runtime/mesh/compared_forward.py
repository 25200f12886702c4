"""Forward of a module of which a position has a part, compared with that of the whole.

It is compared in calls 1, 2, 4, 8 and so on. One comparison is not enough: behind a weight that is zero in
the first steps nothing is seen.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import collecting
from counterflow.common.doubling import is_doubling
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import buffers_of
from counterflow.common.tensors.unknown_values import values_unknown
from counterflow.common.trees import dimensional
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.sequence_parts import are_near

from ..stages.attributes import restored_attributes
from ..stages.input_guard import copied

_LOG = logging.getLogger(__name__)

_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, slice, type(None))
"""Arguments that a forward with the same ones leaves as they are."""


class ComparedForward(ABC):
    """Forward of a module, which is compared with that of the module's whole weights.

    Args:
        place: stage and name of the module, in messages.
        module: the module.
    """

    whole_weights: str
    """What the forward is compared with, in messages."""

    error: str
    """What a forward that differs does, and what to do about it."""

    def __init__(self, place: str, module: nn.Module) -> None:
        self._place, self._module, self._kind = place, module, type(module).__name__
        self._forward: Callable[..., Any] = module.forward
        self._calls = 0
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward.

        Raises:
            ConfigError: it computes something else with whole weights.
        """
        if not torch.compiler.is_compiling():
            self._calls += 1
            if is_doubling(self._calls):
                arguments = self.comparable((args, kwargs))
                if _is_comparable(arguments):
                    self._compare(*arguments)
        return self._forward(*args, **kwargs)

    @abstractmethod
    def outputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Outputs with whole weights, and with the position's part; None: they cannot be compared.

        Args:
            args: arguments.
            kwargs: arguments by name.
        """

    def comparable(self, arguments: Any) -> Any:
        """Return the arguments, without what only a run with other positions needs."""
        return arguments

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Output of a forward of which no state, draw, loss or graph remains."""
        args, kwargs = pytree.tree_map_only(Tensor, copied, (args, kwargs))
        device = next(tensor.device for tensor in dimensional((args, kwargs)))
        with undisturbed(self._module, device), torch.no_grad(), collecting():
            return forward(*args, **kwargs)

    def _compare(self, args: Any, kwargs: Any) -> None:
        device = next(tensor.device for tensor in dimensional((args, kwargs)))
        try:
            outputs = self.outputs(args, kwargs)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _LOG.warning("%s was not compared with %s: %s", self._place, self.whole_weights, error)
            return
        lower = torch.is_autocast_enabled(device.type)
        if outputs is not None and not are_near(*outputs, lower_precision=lower):
            raise ConfigError(f"{self._place}: the forward of {self._kind} {self.error}")


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which a module and its children are in evaluation mode, and after which draws, attributes
    and buffers are as before.
    """
    modules = [*module.modules()]
    modes = [(submodule, submodule.training) for submodule in modules]
    tables = [(buffers_of(submodule), dict(buffers_of(submodule))) for submodule in modules]
    with (
        torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        restored_attributes(modules),
    ):
        for (table, buffers), (submodule, _) in zip(tables, modes, strict=True):
            submodule.training = False
            table.update({name: b if b is None or b.is_meta else b.clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for (table, buffers), (submodule, mode) in zip(tables, modes, strict=True):
                submodule.training = mode
                table.clear()
                table.update(buffers)


def _is_comparable(arguments: Any) -> bool:
    leaves = pytree.tree_leaves(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or values_unknown() or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return False
    return not any(tensor.is_meta or is_dtensor(tensor) or not tensor.numel() for tensor in tensors)
