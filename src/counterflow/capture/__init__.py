"""Automatic layers of any model: ``layers(model, example)``.

The model's forward runs in training and in evaluation mode, in a copy whose tensors have shapes but no values
(fake tensors), on the shapes of an example. Modules are of two kinds:

* an **opened** module's forward is traced: each call of torch and of a module within it is a step, which is
recorded with the origin of its tensors (``record``). The model itself and its expensive modules are opened; *
every other module is an **atom**: one step, which calls the user's own module. Its inside is not traced, so
it may do anything that a module may do.

The cost of their forwards decides which modules are opened; one whose forward cannot be traced stays an atom,
and only a model that cannot be opened itself is refused (``opening``). Further runs with other numbers of
samples, and other lengths, show which numbers depend on them (``sizes``). The steps are then cut where few
bytes cross (``cutting``), and each piece is a ``CapturedLayer``, which runs its steps and returns everything
that later layers need as one tuple of tensors (``layer``), including skip connections, masks and times.

What opened forwards read of Python is constant in a record, and is remembered with it: attributes of modules
and of what these reach, globals, closures, modes, hooks, autocast (``guards``, ``state``, ``walk``). A
``Recording`` compares it before each step, and records the model again if it has changed (``recording``),
with the same cuts (``recutting``). Effects of opened forwards beyond their result are refused (``effects``).

On slices of a sequence, and token after token, layers carry keys and values, and compute masks and positions
of all tokens so far (``sequence_steps``, ``sequence_run``).

Invariant: layers run the user's own modules, parameters and buffers, in their current modes and contexts. A
forward that decides by values of tensors, or changes an attribute of an atom for a call, is refused, with the
line that does; so is a mini-batch whose sizes differ from the example's where these are not free. The user's
model is not changed, only shapes are computed, and no tensor without values is left anywhere (``leaks``).

Stages and workers play no role here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer import CapturedLayer
    from .layer_listing import layers

__all__ = ["CapturedLayer", "layers"]

_HOMES = {"CapturedLayer": "layer", "layers": "layer_listing"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
