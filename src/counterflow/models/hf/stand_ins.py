"""Stand-ins for layers of a transformers model: they record their arguments, or return what they hold.

Invariant: a stand-in computes nothing; it refuses unsupported calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError

HIDDEN = "hidden_states"
"""Keyword by which models pass a layer the value that flows from layer to layer."""


class Called(Exception):  # noqa: N818 - nothing is wrong
    """Ends a model's forward after the call of its last repeated layer."""


class Absent(nn.Module):
    """Replaces modules after the repeated layers; a rule may fill its weight, which is empty."""

    weight = torch.empty(0)
    bias = None

    def forward(self, *_: object, **__: object) -> Any:
        """Refuse to be called."""
        raise unfollowed("calls what comes after its repeated layers before them")


class Note(nn.Module):
    """Replaces a repeated layer: records its arguments, and passes on the hidden states unchanged.

    Args:
        block: the repeated layer.
        notes: arguments of all layers; the reader empties the list.
        last: whether the layer is the last.
    """

    def __init__(
        self, block: nn.Module, notes: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]], *, last: bool
    ) -> None:
        super().__init__()
        _told_of(self, block)
        self.notes = notes
        self.last = last

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record the arguments, and return the hidden states unchanged."""
        hidden, *rest = args if args else (kwargs.pop(HIDDEN, None),)
        if not isinstance(hidden, Tensor) or (self.notes and hidden is not self.notes[0][0]):
            raise unfollowed("changes the value that flows from one repeated layer to the next")
        self.notes.append((hidden, tuple(rest), kwargs))
        if self.last:
            raise Called
        return hidden


class SavedInput(nn.Module):
    """Replaces modules before the end: returns a saved input for any arguments.

    Args:
        saved_input: the value to return.
        module: the module that it replaces.
        embeds: whether the module precedes the repeated layers, so a model may make several streams of it.
    """

    def __init__(self, saved_input: list[Tensor], module: nn.Module, *, embeds: bool = False) -> None:
        super().__init__()
        _told_of(self, module)
        self.saved_input = saved_input
        self.embeds = embeds

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return the saved input."""
        hidden = self.saved_input[0]
        return hidden.flatten(2, -2)[:, :, 0] if self.embeds and hidden.dim() > 3 else hidden


def _told_of(stand_in: nn.Module, module: nn.Module) -> None:
    for name, value in vars(module).items():
        if name not in vars(stand_in) and isinstance(value, (str, int, float, type(None))):
            setattr(stand_in, name, value)


def unfollowed(what: str) -> ConfigError:
    """The error about a model whose calls a pipeline of its layers does not support."""
    return ConfigError(
        f"the model {what}, which a pipeline of its layers does not support; give list_layers a function of "
        "your own that lists its layers"
    )
