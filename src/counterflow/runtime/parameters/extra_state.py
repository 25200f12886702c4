"""State of a model that is in none of its listed layers: buffers, frozen parameters, extra state.

Invariant: nothing trains it. Every worker has all of it, as its own model has it, and all have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.capture.model_layers import EXTRA_STATE, Model, aliases_of
from counterflow.common.numbering import number_of
from counterflow.errors import ConfigError

from ..transport.base import Transport
from .digest import digest
from .names import matching


def extra_state_names(model: Model, layers: Sequence[Mapping[str, str]]) -> list[str]:
    """The names of the model's state that no layer has, nor anything tied to what a layer has.

    Args:
        model: as in ``layers_of``.
        layers: what ``state_names`` gives.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> model.register_buffer("mean", torch.zeros(2))
    >>> extra_state_names(model, [{"weight": "0.weight", "bias": "0.bias"}])
    ['mean']
    """
    if not isinstance(model, nn.Module):
        return []
    listed = {full for names in layers for full in names.values()}
    for names_of_value in aliases_of(model).values():
        if not listed.isdisjoint(names_of_value):
            listed |= set(names_of_value)
    return [name for name in model.state_dict(keep_vars=True) if name not in listed]


class ExtraState:
    """State of a model that is in none of its layers.

    Args:
        model: as in ``layers_of``.
        layers: what ``state_names`` gives.

    Raises:
        ConfigError: some of it is on the meta device, or made by a hook of the model's ``state_dict``.
    """

    def __init__(self, model: Model, layers: Sequence[Mapping[str, str]]) -> None:
        self._model = model if isinstance(model, nn.Module) else nn.Module()
        self.names = extra_state_names(model, layers)
        lists = (self._model.named_parameters, self._model.named_buffers)
        registered = (
            {name for named in lists for name, _ in named(remove_duplicate=False)} if self.names else {}
        )
        for name, value in self._state().items():
            if isinstance(value, Tensor) and name not in registered:
                raise ConfigError(
                    f"{name} in the state_dict of the {type(model).__name__} is none of its parameters and "
                    "buffers: a hook of its state_dict makes it, of weights that live on several workers; "
                    "register the hook on the layer whose weights it renames"
                )
            if isinstance(value, Tensor) and value.is_meta:
                raise ConfigError(
                    f"{name} of the {type(model).__name__} is in none of the listed layers and on the meta "
                    "device, so that it has no numbers to save; make it on a real one, or list a layer that "
                    "has it"
                )

    def _state(self) -> dict[str, Any]:
        state = self._model.state_dict(keep_vars=True) if self.names else {}
        return {name: state[name] for name in self.names}

    def entries(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """All names of each value, and the value as it is: a tensor, or extra state."""
        names: dict[int, list[str]] = {}
        state = self._state()
        for name, value in state.items():
            names.setdefault(id(value) if isinstance(value, Tensor) else -len(names) - 1, []).append(name)
        for same in names.values():
            yield tuple(same), state[same[0]]

    def found_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of another state that belong here, by first names.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        return {names[0]: matching(state, names, value) for names, value in self.entries()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what ``found_in`` gave."""
        for names, value in self.entries():
            saved = state[names[0]]
            if isinstance(value, Tensor):
                with torch.no_grad():
                    value.copy_(saved)
                continue
            owner, _, leaf = names[0].rpartition(".")
            if leaf != EXTRA_STATE:
                raise ConfigError(
                    f"{names[0]} of the {type(self._model).__name__} is in none of the listed layers, no "
                    "tensor and no extra state, so that nobody knows how to load it; list a layer that has it"
                )
            self._model.get_submodule(owner).set_extra_state(deepcopy(saved))

    def broadcast(self, transport: Transport) -> None:
        """Take the tensors of rank 0 where a rank has others; all workers call it.

        Raises:
            ConfigError: they have other shapes.
        """
        tensors = [value for _, value in self.entries() if isinstance(value, Tensor)]
        shapes = number_of(*self.names, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        rows = transport.gather([shapes, digest(tensors, transport.device).item()])
        for rank, row in enumerate(rows):
            if row[0] != rows[0][0]:
                raise ConfigError(
                    f"what is in none of the listed layers has other names or shapes on rank {rank} than on "
                    "rank 0; make the same model on every worker"
                )
        for tensor in tensors if any(row != rows[0] for row in rows) else ():
            host = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            if host.numel():
                transport.spread(host.reshape(-1).view(torch.uint8), 0)
                with torch.no_grad():
                    tensor.copy_(host)
