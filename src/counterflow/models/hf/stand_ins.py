"""What stands in a model of transformers in place of its layers: it notes what they are called with, or gives
what came in.

Invariant: a stand-in computes nothing; what it cannot follow it refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError

HIDDEN = "hidden_states"
"""The keyword by which models give a layer what goes from one to the next."""


class Called(Exception):  # noqa: N818 - nothing is wrong
    """Ends a model's forward when its last repeated layer was called."""


class Absent(nn.Module):
    """In place of what comes after the repeated layers; a rule may fill its weight, which is empty."""

    weight = torch.empty(0)
    bias = None

    def forward(self, *_: object, **__: object) -> Any:
        """Refuse to be called."""
        raise unfollowed("calls what comes after its repeated layers before them")


class Note(nn.Module):
    """In place of a repeated layer: notes what it is called with, and hands on what it would change.

    Args:
        block: the repeated layer.
        notes: of all layers; who reads them empties them.
        last: whether the last one.
    """

    def __init__(
        self, block: nn.Module, notes: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]], *, last: bool
    ) -> None:
        super().__init__()
        _told_of(self, block)
        self.notes = notes
        self.last = last

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note the arguments, and return the hidden states as they came in."""
        hidden, *rest = args if args else (kwargs.pop(HIDDEN, None),)
        if not isinstance(hidden, Tensor) or (self.notes and hidden is not self.notes[0][0]):
            raise unfollowed("changes what goes from one repeated layer to the next")
        self.notes.append((hidden, tuple(rest), kwargs))
        if self.last:
            raise Called
        return hidden


class Held(nn.Module):
    """In place of what comes before the end: gives what is held, whatever it is called with.

    Args:
        held: what came in.
        module: what it stands for.
        embeds: whether that comes before the repeated layers, of which a model may make several streams.
    """

    def __init__(self, held: list[Tensor], module: nn.Module, *, embeds: bool = False) -> None:
        super().__init__()
        _told_of(self, module)
        self.held = held
        self.embeds = embeds

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return what is held."""
        hidden = self.held[0]
        return hidden.flatten(2, -2)[:, :, 0] if self.embeds and hidden.dim() > 3 else hidden


def _told_of(stand_in: nn.Module, module: nn.Module) -> None:
    """Give a stand-in what a model may ask its layers: of which kind they are, say."""
    for name, value in vars(module).items():
        if name not in vars(stand_in) and isinstance(value, (str, int, float, type(None))):
            setattr(stand_in, name, value)


def unfollowed(what: str) -> ConfigError:
    """The error of a model that does what a pipeline of its layers cannot follow."""
    return ConfigError(
        f"the model {what}, which a pipeline of its layers cannot follow; give list_layers a function of "
        "your own that lists its layers"
    )
