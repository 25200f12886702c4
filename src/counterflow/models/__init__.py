"""The papers' models: GPT, BERT and ResNeXt as lists of layers, with their losses; in ``hf``, transformers'.

All names import torch when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterflow.common.lazy import attributes

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
    "": ("hf",),
    "bert": ("BERTConfig",),
    "gpt": ("GPTConfig",),
    "loss": ("classification_loss", "masked_token_loss", "next_token_loss"),
    "presets": ("PRESETS", "ModelConfig", "Preset", "preset"),
    "resnext": ("Norm", "ResNeXtConfig"),
}

__getattr__ = attributes(__name__, {name: home for home, names in _HOMES.items() for name in names})
