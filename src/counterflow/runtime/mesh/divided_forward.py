"""Forward of a module whose children's matrices are divided over positions of the mesh.

Tensor parallelism divides by the plan of a module, which says nothing of what its forward does in between:
one that makes ``self.heads`` heads of a part of the features, or normalises over these, computes something
else. Calls 1, 2, 4, 8 … compare it with the same forward with whole matrices.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import collecting
from counterflow.api.carry import Carry
from counterflow.common.doubling import is_doubling
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor
from counterflow.common.tensors.torch_private import children_of, parameters_of
from counterflow.common.tensors.unknown_values import values_unknown
from counterflow.common.trees import dimensional
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.sequence_parts import are_near

from ..stages.input_guard import copied
from .routed_forward import undisturbed

_LOG = logging.getLogger(__name__)

_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, slice, type(None))
"""Arguments that a forward with the same ones leaves as they are."""


class DividedForward:
    """Forward of the module, which is compared.

    Args:
        place: stage and name of the module, in messages.
        module: the module, before its children are divided.
        names: paths of the children that are divided.
    """

    def __init__(self, place: str, module: nn.Module, names: Iterable[str]) -> None:
        self._place, self._module = place, module
        self._forward: Callable[..., Any] = module.forward
        self._undivided = _shallow(module)
        self._children: list[tuple[nn.Module, nn.Module]] = []
        """Each divided child, and the one of the same forward that takes whole weights."""
        for name in names:
            *path, last = name.split(".")
            parent = self._undivided
            for part in path:
                parent = _replaced(parent, part)
            self._children.append((module.get_submodule(name), _replaced(parent, last)))
        self._calls = 0
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward.

        Raises:
            ConfigError: it computes something else with whole matrices.
        """
        if not torch.compiler.is_compiling():
            self._calls += 1
            if is_doubling(self._calls) and _is_comparable((args, kwargs)):
                self._compare(args, kwargs)
        return self._forward(*args, **kwargs)

    def _compare(self, args: Any, kwargs: Any) -> None:
        args, kwargs = pytree.tree_map_only(Tensor, copied, (args, kwargs))
        carries = [(carry, dict(vars(carry))) for carry in self._module.modules() if isinstance(carry, Carry)]
        device = next(tensor.device for tensor in dimensional((args, kwargs)))
        try:
            with undisturbed(self._module, device), torch.no_grad(), collecting():
                output = self._forward(*args, **kwargs)
                for divided, undivided in self._children:
                    table = parameters_of(undivided)
                    for name, parameter in parameters_of(divided).items():
                        table[name] = None if parameter is None else full_tensor(parameter.detach())
                expected = self._undivided.forward(*args, **kwargs)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _LOG.warning("%s was not compared with whole matrices: %s", self._place, error)
            return
        finally:
            for _, undivided in self._children:
                parameters_of(undivided).clear()
            for carry, attributes in carries:
                vars(carry).update(attributes)
        lower = torch.is_autocast_enabled(device.type)
        if not are_near(expected, output, lower_precision=lower):
            raise ConfigError(
                f"{self._place}: the forward of {type(self._module).__name__} computes something else of its "
                "part of the features than of all: make heads of head_dim features (-1 heads, not a fixed "
                "number), and normalise or choose within a head, or leave out its tensor_parallel_plan"
            )


def _shallow(module: nn.Module) -> Any:
    # Attributes are the module's; tables of children, parameters and hooks are not. A class's own way to be
    # copied may do more.
    shallow: Any = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(shallow)[name] = copy.copy(value) if isinstance(value, dict) else value
    return shallow


def _replaced(parent: nn.Module, name: str) -> Any:
    child = _shallow(parent.get_submodule(name))
    children_of(parent)[name] = child
    return child


def _is_comparable(arguments: Any) -> bool:
    leaves = pytree.tree_leaves(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or values_unknown() or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return False
    return not any(tensor.is_meta or is_dtensor(tensor) or not tensor.numel() for tensor in tensors)
