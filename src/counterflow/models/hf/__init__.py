"""Models of transformers in pipelines: cut into layers, read and written in its own format.

All names import torch when they are first used; transformers itself is imported only if needed; install it
with ``pip install "counterflow[transformers]"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterflow.common.lazy import attributes

if TYPE_CHECKING:
    from .cut import layers
    from .model_folder import save
    from .objective import loss
    from .weight_files import load

__all__ = ["layers", "load", "loss", "save"]

__getattr__ = attributes(
    __name__, {"layers": "cut", "loss": "objective", "load": "weight_files", "save": "model_folder"}
)
