"""The layers of any model, found by itself: ``layers(model, example)``.

The model's forward runs in training and in evaluation mode, in a copy whose tensors have shapes and no
numbers (fake tensors), on the shapes of an example. Modules are of two kinds there:

* an **opened** module's forward is followed: each call of torch and of a module within it is a step that is
  noted, with where its tensors are from (``record``). The model itself is opened, and what costs much of it;
* every other module is an **atom**: one step, which calls the user's own module. What is inside is not
  looked at, so that it may do anything that a module may do.

Which modules are opened follows from what their forwards cost; one whose forward cannot be followed stays an
atom, and only a model that cannot be opened itself is refused (``opening``). Further runs with other numbers
of samples, and other lengths, tell which numbers follow from them (``sizes``). The steps are then cut where
little crosses (``cutting``), and each piece is a ``CapturedLayer``, which runs its steps and gives all that
later layers need as one tuple of tensors (``layer``): skip connections, masks and times go along.

Invariant: layers run the user's own modules, parameters and buffers, in the modes they are in. What a forward
decides by numbers in tensors is refused, with the line that does; so is a mini-batch whose sizes differ from
the example's where these are not free. Nothing of the user's model is changed, and nothing is computed but
shapes.

What it does not do: it knows neither stages nor workers. What is in a module's attributes when it is captured
(sizes, flags, tensors that are neither parameter nor buffer) is taken for constant, where it is opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer import CapturedLayer
    from .listing import layers

__all__ = ["CapturedLayer", "layers"]

_HOMES = {"CapturedLayer": "layer", "layers": "listing"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
