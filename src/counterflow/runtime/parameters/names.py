"""The names of parameters in the model, stage by stage, and which of them several stages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from counterflow.errors import ConfigError

from ..stages.named_layer import NamedLayer
from ..stages.stage import LocalStage

T = TypeVar("T")

Names = Sequence[Sequence[tuple[str, str]]]
"""Names of each stage's parameters: in the model, and the first name of the same object."""


def shared_names(names: Names) -> dict[str, list[int]]:
    """Parameters that several stages share, with these stages.

    >>> shared_names([[("0.weight", "0.weight")], [("1.weight", "0.weight"), ("1.bias", "1.bias")]])
    {'0.weight': [0, 1]}
    """
    users: dict[str, list[int]] = {}
    for stage, stage_names in enumerate(names):
        for _, first in stage_names:
            stages = users.setdefault(first, [])
            if stage not in stages:
                stages.append(stage)
    return {name: stages for name, stages in users.items() if len(stages) > 1}


def named_parameters(local_stage: LocalStage, names: Names) -> dict[str, nn.Parameter]:
    """The parameters of a stage at hand, by the name of the first that is the same."""
    stage_names = iter(names[local_stage.stage])
    return {
        next(stage_names)[1]: parameter
        for layer in local_stage.with_weights
        for _, parameter in layer.module.named_parameters(remove_duplicate=False)
    }


def named_tensors(
    local_stage: LocalStage, names: Names, *, buffers: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a stage under their first names, and buffers, in the order of ``tensors_of``."""
    first = dict(names[local_stage.stage])
    for layer in local_stage.with_weights:
        for name, parameter in layer.module.named_parameters():
            yield first[layer.names[name]], parameter
        if buffers:
            yield from _buffers_of(layer)


def named_buffers(local_stage: LocalStage) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a stage by name; those that are in no state are named by layer."""
    for layer in local_stage.with_weights:
        yield from _buffers_of(layer)


def _buffers_of(layer: NamedLayer) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in layer.module.named_buffers():
        yield layer.names.get(name, f"{layer.index}.{name}"), buffer


def first_of(values: Mapping[str, T], names: Iterable[str]) -> T | None:
    """Value of the first of some names that a mapping contains; None: it contains none."""
    return next((values[name] for name in names if name in values), None)


def matching(state: Mapping[str, Any], names: Sequence[str], local: Any) -> Any:
    """Saved form of a value in a model's state, under one of the value's names.

    Raises:
        ConfigError: no name is there, a tensor's shape differs, or names of one weight have different values.
    """
    known = [name for name in names if name in state]
    if not known:
        longer = next((name for name in state if name.endswith(f".{names[0]}")), None)
        hint = "" if longer is None else f"; it has {longer!r}: leave out what goes before the model's name"
        raise ConfigError(f"the state has no {names[0]!r}{hint}")
    value = state[known[0]]
    for name in known[1:]:
        refuse_untied("the state", (known[0], name), (value, state[name]))
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if isinstance(local, Tensor) and shape != tuple(local.shape):
        raise ConfigError(f"{names[0]} has shape {shape} in the state, {tuple(local.shape)} in the model")
    return value


def refuse_untied(place: str, names: tuple[str, str], values: tuple[object, object]) -> None:
    """Refuse a state in which two names of one weight have different values.

    Args:
        place: the state, in the message.
        names: two names of a weight of the model.
        values: their values in the state.

    Raises:
        ConfigError: the values differ.
    """
    first, second = values
    if first is second or not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return
    if first.shape != second.shape or not first.equal(second.to(first.device, first.dtype)):
        raise ConfigError(
            f"{names[0]} and {names[1]} are one weight of the model and two in {place}, with different "
            "values; load it into a model that does not tie them"
        )
