"""Equal layers of a model, of which one is measured: by structure, weights, and shapes at their boundaries.

Invariant: layers that are left out of a measured chain follow equal ones, so the chain still fits together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.api.skip import LoadSkip, SaveSkip
from counterflow.capture.layer import CapturedLayer
from counterflow.common.tensors.fake_layers import fake_layers, saved_storages, shapes_alone

from .content_digests import settings_of
from .operator_digests import OperatorRecorder, detached, differentiate

_LOG = logging.getLogger(__name__)

_WORDS = re.compile(r"(?<=[A-Za-z0-9])(?=[A-Z][a-z])")
"""Beginning of a word in a class's name."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The value between two layers.

    Attributes:
        structure: its structure.
        leaves: shape and dtype of each tensor, and any other value itself.
    """

    structure: str
    leaves: tuple[Hashable, ...]

    @classmethod
    def of(cls, value: Any) -> Boundary:
        """The boundary that a value crosses."""
        leaves, spec = pytree.tree_flatten(value)
        return cls(
            str(spec), tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else str(x) for x in leaves)
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """A layer's input and output, and the operators between them.

    Attributes:
        input: its input.
        output: its output.
        forward: digest of the operators of its forward.
        saved: number of tensors that autograd saves, which recomputation within the layer changes.
        backward: digest of the operators of its backward.
        loss: digest of the operators of the loss function, of the last layer; empty: not known.
    """

    input: Boundary
    output: Boundary
    forward: str
    saved: int
    backward: str
    loss: str = ""


def flows_of(
    layers: Sequence[nn.Module], inputs: Any, loss: object = None, targets: Any = None
) -> tuple[Flow, ...] | None:
    """Inputs and outputs of layers, without memory and without computing.

    Args:
        layers: the model's layers, on any device.
        inputs: input of the first one, as in ``Pipeline.step``.
        loss: the loss function; only a module is run, as a copy, for a function may keep tensors.
        targets: targets, as in ``Pipeline.step``.

    Returns:
        The flow of each layer; None: a layer needs the values of tensors.
    """
    flows = []
    backwards: dict[Hashable, str] = {}
    try:
        with shapes_alone():
            copies, value, _ = fake_layers(layers, inputs, torch.device("cpu"))
            for layer in copies:
                before = Boundary.of(value)
                value, leaves = detached(value)
                with OperatorRecorder() as forward, saved_storages() as saved, added_losses() as losses:
                    value = layer(value)
                key = before, forward.digest, len(saved)
                if key not in backwards:  # a backward takes longer than a forward, and equal blocks share it
                    with OperatorRecorder() as backward:
                        differentiate([value, *losses.values()], leaves, [*layer.parameters()])
                    backwards[key] = backward.digest
                flows.append(Flow(before, Boundary.of(value), *key[1:], backwards[key]))
            if isinstance(loss, nn.Module):
                flows[-1] = replace(flows[-1], loss=_operators_of_loss(loss, value, targets))
    except Exception as error:
        _LOG.debug("layers that need values are all measured: %s", error)
        return None
    return tuple(flows)


def _operators_of_loss(loss: nn.Module, output: Any, targets: Any) -> str:
    try:
        (loss,), (_, targets), _ = fake_layers([loss], (None, targets), torch.device("cpu"))
        value, leaves = detached(output)
        recorder = OperatorRecorder()
        with recorder:
            differentiate(loss(value, targets), leaves, [*loss.parameters()])
    except Exception as error:
        _LOG.debug("a loss that needs values counts by its code: %s", error)
        return ""
    return recorder.digest


def traits_of(
    layers: Sequence[nn.Module], flows: Sequence[Flow] | None = None
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Class of each layer, and what layers of one kind have in common: steps, weights and flow, or settings
    in place of a flow.
    """
    for index, layer in enumerate(layers):
        if isinstance(layer, CapturedLayer):
            name, steps = layer.class_name, layer.structure
        else:
            name, steps = type(layer).__name__, tuple(key for key, _ in layer.named_parameters())
        weights = tuple(
            (tuple(value.shape), value.dtype, value.requires_grad) for value in layer.parameters()
        )
        flow: object = None if flows is None else flows[index]
        if flow is None and not isinstance(layer, CapturedLayer):
            flow = tuple(settings_of(layer).items())
        yield _WORDS.sub("-", name).lower(), (steps, weights, flow, index == 0, index + 1 == len(layers))


def kinds_of(layers: Sequence[nn.Module], flows: Sequence[Flow] | None = None) -> list[str]:
    """Kind of each layer: its class, and a number if layers of a class differ.

    Layers differ in the shapes of weights, in frozen weights, in their inputs, outputs and operators, or in
    settings if these are not known; captured ones in their steps. The first one computes no gradient of its
    input, the last one has the loss.

    Args:
        layers: the model's layers.
        flows: inputs and outputs of each; None: not known.

    >>> kinds_of([nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1)])
    ['layer-norm', 'linear', 'linear', 'layer-norm-2', 'linear-2']
    """
    known: dict[str, list[tuple[object, ...]]] = {}
    kinds = []
    for name, traits in traits_of(layers, flows):
        of_class = known.setdefault(name, [])
        if traits not in of_class:
            of_class.append(traits)
        number = of_class.index(traits) + 1
        kinds.append(name if number == 1 else f"{name}-{number}")
    return kinds


def without_repeats(kinds: Sequence[str], keep: int = 1) -> list[int]:
    """Places that remain of a row of kinds if a part that follows ``keep`` equal ones is left out.

    >>> without_repeats("E B B B H".split()), without_repeats("E B B B H".split(), keep=2)
    ([0, 1, 4], [0, 1, 2, 4])
    >>> without_repeats("E A M A M A M H".split())
    [0, 1, 2, 7]
    >>> without_repeats("A B A".split())
    [0, 1, 2]
    """
    places = list(range(len(kinds)))
    for length in range(1, len(kinds) // 2 + 1):
        start = 0
        while (stop := start + keep * length) + length <= len(places):
            parts = [kinds[place] for place in places[start : stop + length]]
            if parts[length:] == parts[:-length]:  # all parts are equal
                del places[stop : stop + length]
            else:
                start += 1
    return places


def passes_values(layers: Sequence[nn.Module]) -> bool:
    """True if layers save values for later ones, so that none can be left out."""
    return any(isinstance(module, SaveSkip | LoadSkip) for layer in layers for module in layer.modules())
