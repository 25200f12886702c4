"""The layers of a model that are measured: a chain with few of each run of equal layers.

One of equal layers has the costs of all, if its weights do not remain in a core's cache between two ops. In a
stage of several small layers they do not: so a chain has up to four of these.

Invariant: what a profile says of layers beside their costs is that of the model, and can be pickled.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.capture.layer import CapturedLayer
from counterflow.common.trees import bytes_in
from counterflow.planning.inputs.model import LayerTie

from .content_digests import content_of
from .equal_layers import Flow, flows_of, kinds_of, passes_values, traits_of, without_repeats
from .layer_costs import layers_with_loss, ties_of
from .subject_pipeline import Subject

_REPEATS = 4
"""Most of equal layers in a row that are measured."""
_CACHED_BYTES = 4 << 20
"""Weights of a chain of which one of equal layers may remain in a core's cache. The largest caches of one
core have 2 MiB, and a layer's outputs and gradients need as much."""
_DEVIATION = 0.02
"""Standard deviation of weights that have no values."""


@dataclass(frozen=True, slots=True)
class LayerChain:
    """The layers of a model that are measured.

    Attributes:
        kinds: kind of each layer of the model.
        places: numbers of the layers that are measured.
        ties: weights that layers of the model share.
        input_bytes: size of the model's input for one sample.
        digest: a number of the layers and the loss function, equal for those whose costs are.
    """

    kinds: tuple[str, ...]
    places: tuple[int, ...]
    ties: tuple[LayerTie, ...]
    input_bytes: float
    digest: str

    @classmethod
    def of(cls, subject: Subject) -> Self:
        """The chain of a subject; all of its layers if they save values for later ones, or need values."""
        inputs, _ = subject.batch(1)
        batch = subject.batch(2)
        flows = flows_of(subject.layers, batch[0], subject.loss, batch[1])
        kinds = kinds_of(subject.layers, flows)
        skipping = flows is not None and not passes_values(subject.layers)
        return cls(
            tuple(kinds),
            tuple(_places(kinds, subject.layers) if skipping else range(len(kinds))),
            ties_of(layers_with_loss(subject.layers, subject.loss)),
            float(sum(t.nbytes for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))),
            _digest(subject, flows, batch),
        )

    @property
    def measured_kinds(self) -> list[str]:
        """Kinds of the layers that are measured."""
        return [self.kinds[place] for place in self.places]

    def subject(self, subject: Subject) -> Subject:
        """A subject with the measured layers of another one, with values if that has none."""
        layers = [subject.layers[place] for place in self.places]
        return replace(subject, layers=with_values(layers) if subject.fills_meta else layers)


def _places(kinds: Sequence[str], layers: Sequence[nn.Module]) -> list[int]:
    places = without_repeats(kinds)
    for keep in range(2, _REPEATS + 1):
        more = without_repeats(kinds, keep)
        if (
            len(more) == len(places)
            or bytes_in([[*layers[place].parameters()] for place in more]) > _CACHED_BYTES
        ):
            break
        places = more
    return places


def _digest(subject: Subject, flows: tuple[Flow, ...] | None, batch: tuple[Any, Any]) -> str:
    # Operators are not all that costs depend on: numbers, kernels, and code beside tensors count too.
    code = [content_of(layer) for layer in (*subject.layers, *_models_of(subject.layers))]
    parts = [*traits_of(subject.layers, flows)], code, content_of(batch), content_of(subject.loss)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _models_of(layers: Sequence[nn.Module]) -> list[nn.Module]:
    # Modules of captured layers are those with weights; the forwards that call these are of the model.
    records = [x.recording for x in layers if isinstance(x, CapturedLayer) and x.recording is not None]
    return [*{id(record.model): record.model for record in records if record.model is not None}.values()]


def with_values(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Copies of layers on the meta device with any weights, as costs do not depend on them.

    >>> (linear,) = with_values([nn.Linear(2, 3, device="meta")])
    >>> linear.weight.device
    device(type='cpu')
    """
    memo: dict[int, Any] = {}
    for layer in layers:
        named = [*layer.named_parameters(), *layer.named_buffers()]
        memo |= {id(tensor): _filled(name, tensor) for name, tensor in named if tensor.is_meta}
    return [copy.deepcopy(layer, memo) for layer in layers] if memo else list(layers)


def _filled(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    values = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() > 1:
        values.normal_(std=_DEVIATION)
    elif name.endswith("weight"):
        values.fill_(1)
    return nn.Parameter(values, requires_grad=tensor.requires_grad)
