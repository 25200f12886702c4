"""Weights of a stage before and after ``parallelize=``, which puts sharded ones in their places."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from counterflow.common.tensors.torch_private import has_hooks, parameters_of
from counterflow.errors import ConfigError


class WeightPlace(NamedTuple):
    """Attribute of a module that is a weight.

    Attributes:
        label: name in the stage, in messages.
        module: the module.
        name: name of the attribute.
        parameter: the weight before.
    """

    label: str
    module: nn.Module
    name: str
    parameter: nn.Parameter


class StageWeights:
    """Places of the weights of a stage.

    Args:
        stage: the stage, before it is sharded.
        number: number of the stage.
    """

    def __init__(self, stage: nn.Module, number: int) -> None:
        self._number = number
        self._places = [
            WeightPlace(f"{path}.{name}" if path else name, module, name, parameter)
            for path, module in stage.named_modules()
            for name, parameter in parameters_of(module).items()
            if parameter is not None
        ]

    def preserve(self, reduced: Collection[int]) -> None:
        """Give new weights the attributes of those before; refuse what they do not have.

        Args:
            reduced: weights whose gradients ``fully_shard`` sums, by identity.

        Raises:
            ConfigError: a weight with several names is several weights now, or hooks would not be called.
        """
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for label, module, name, before in self._places:
            now = parameters_of(module).get(name)
            if now is None:
                continue
            known, shared = first.setdefault(id(before), (label, now))
            if shared is not now:
                raise ConfigError(
                    f"{known} and {label} of stage {self._number} are one weight, and parallelize() made two "
                    "of it; leave both whole, or do not tie them"
                )
            if (now is not before and has_hooks(before)) or (id(now) in reduced and has_hooks(now)):
                raise ConfigError(
                    f"{label} of stage {self._number} has a hook, which is not called for the weight that "
                    "parallelize() puts in its place; remove it, or leave the weight whole"
                )
            if now is not before:
                vars(now).update({key: value for key, value in vars(before).items() if key not in vars(now)})
