"""The names of parameters in the model, stage by stage, and which of them several stages share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..stages.stage import StageCopy

Names = Sequence[Sequence[tuple[str, str]]]
"""By stage: each parameter's name in the model, and the name of the first one that is the same object."""


def shared_names(names: Names) -> dict[str, list[int]]:
    """Parameters that several stages share, with these stages.

    >>> shared_names([[("0.weight", "0.weight")], [("1.weight", "0.weight"), ("1.bias", "1.bias")]])
    {'0.weight': [0, 1]}
    """
    users: dict[str, list[int]] = {}
    for stage, its in enumerate(names):
        for _, first in its:
            stages = users.setdefault(first, [])
            if stage not in stages:
                stages.append(stage)
    return {name: stages for name, stages in users.items() if len(stages) > 1}


def named_parameters(copy: StageCopy, names: Names) -> dict[str, nn.Parameter]:
    """The parameters of a stage at hand, by the name of the first that is the same."""
    its = iter(names[copy.stage])
    return {
        next(its)[1]: parameter
        for layer in copy.with_weights
        for _, parameter in layer.module.named_parameters(remove_duplicate=False)
    }
