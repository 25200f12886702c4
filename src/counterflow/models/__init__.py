"""The papers' models: GPT, BERT and ResNeXt as lists of layers, with their losses; in ``hf``, transformers'.

All names import torch when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import hf
    from .bert import BERTConfig
    from .gpt import GPTConfig
    from .loss import classification_loss, masked_token_loss, next_token_loss
    from .presets import PRESETS, ModelConfig, Preset, preset
    from .resnext import Norm, ResNeXtConfig

__all__ = [
    "PRESETS",
    "BERTConfig",
    "GPTConfig",
    "ModelConfig",
    "Norm",
    "Preset",
    "ResNeXtConfig",
    "classification_loss",
    "hf",
    "masked_token_loss",
    "next_token_loss",
    "preset",
]

_HOMES = {
    "bert": ("BERTConfig",),
    "gpt": ("GPTConfig",),
    "loss": ("classification_loss", "masked_token_loss", "next_token_loss"),
    "presets": ("PRESETS", "ModelConfig", "Preset", "preset"),
    "resnext": ("Norm", "ResNeXtConfig"),
}


def __getattr__(name: str) -> Any:
    """The names that need torch, imported when they are first used."""
    if name == "hf":
        return importlib.import_module(f"{__name__}.hf")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
