"""Models of transformers in pipelines: cut into layers, read and written in its own format.

All names import torch when they are first used; transformers itself is imported only by what needs it, and
comes with ``pip install "counterflow[hf]"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cut import layers
    from .folder import save
    from .objective import loss
    from .weights import load

__all__ = ["layers", "load", "loss", "save"]

_HOMES = {"layers": "cut", "loss": "objective", "load": "weights", "save": "folder"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
