"""Forward of a module whose children's matrices are divided over positions of the mesh.

Tensor parallelism divides by the plan of a module, which says nothing of what its forward does in between:
one that makes ``self.heads`` heads of a part of the features, or normalises over these, computes something
else. So it is compared with the same forward with whole matrices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from typing_extensions import override

from counterflow.common.tensors.dtensors import full_tensor
from counterflow.common.tensors.torch_private import buffers_of, children_of, parameters_of

from .compared_forward import ComparedForward


class DividedForward(ComparedForward):
    """Forward of the module, which is compared.

    Args:
        place: stage and name of the module, in messages.
        module: the module, before its children are divided.
        names: paths of the children that are divided.
    """

    whole_weights = "whole matrices"
    error = (
        "computes something else of its part of the features than of all: make heads of head_dim features "
        "(-1 heads, not a fixed number), and normalise or choose within a head, or leave out its "
        "tensor_parallel_plan"
    )

    def __init__(self, place: str, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__(place, module)
        self._undivided = _shallow(module)
        self._copies: list[tuple[nn.Module, Any]] = [(module, self._undivided)]
        """The module and those below it on the way to divided children, each with its copy."""
        self._children: list[tuple[nn.Module, Any]] = []
        """Each divided child, and its copy, which takes whole weights."""
        for name in names:
            *path, last = name.split(".")
            parent = self._undivided
            for part in path:
                parent = self._replaced(parent, part)
            self._children.append((module.get_submodule(name), self._replaced(parent, last)))

    @override
    def outputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run the forward with whole matrices, which all positions gather, and with the divided ones."""
        output = self.run(self._forward, args, kwargs)
        try:
            for divided, undivided in self._children:
                table = parameters_of(undivided)
                for name, parameter in parameters_of(divided).items():
                    table[name] = None if parameter is None else full_tensor(parameter.detach())
            self._refresh()
            return self.run(self._undivided.forward, args, kwargs), output
        finally:
            for _, undivided in self._children:
                parameters_of(undivided).clear()

    def _replaced(self, parent: nn.Module, name: str) -> Any:
        child = parent.get_submodule(name)
        table = children_of(parent)
        table[name] = _shallow(child)
        self._copies.append((child, table[name]))
        return table[name]

    def _refresh(self) -> None:
        # Copies have the attributes that their modules have now, and buffers of their own.
        for module, shallow in self._copies:
            buffers_of(shallow).update(
                {
                    name: None if buffer is None else buffer.clone()
                    for name, buffer in buffers_of(module).items()
                }
            )
            for name, value in vars(module).items():
                is_table = name.startswith("_") and isinstance(value, dict)
                if name != "forward" and not is_table:
                    vars(shallow)[name] = value
            shallow.training = False


def _shallow(module: nn.Module) -> Any:
    # Attributes are the module's; tables of children, parameters and hooks are not. A class's own way to be
    # copied may do more.
    shallow: Any = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(shallow)[name] = copy.copy(value) if isinstance(value, dict) else value
    return shallow
