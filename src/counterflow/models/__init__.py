"""The papers' models, and how any model is listed by layers and costed.

All names import torch when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bert import BERTConfig
    from .costs import estimated_costs, measured_costs, parameter_count
    from .gpt import GPTConfig
    from .layers import (
        Activation,
        ListLayers,
        Model,
        layers_of,
        parameter_names,
        shared_parameters,
        state_names,
    )
    from .loss import classification_loss, masked_token_loss, next_token_loss
    from .presets import PRESETS, ModelConfig, Preset, preset
    from .resnext import Norm, ResNeXtConfig

__all__ = [
    "PRESETS",
    "Activation",
    "BERTConfig",
    "GPTConfig",
    "ListLayers",
    "Model",
    "ModelConfig",
    "Norm",
    "Preset",
    "ResNeXtConfig",
    "classification_loss",
    "estimated_costs",
    "layers_of",
    "masked_token_loss",
    "measured_costs",
    "next_token_loss",
    "parameter_count",
    "parameter_names",
    "preset",
    "shared_parameters",
    "state_names",
]

_HOMES = {
    "bert": ("BERTConfig",),
    "costs": ("estimated_costs", "measured_costs", "parameter_count"),
    "gpt": ("GPTConfig",),
    "layers": (
        "Activation",
        "ListLayers",
        "Model",
        "layers_of",
        "parameter_names",
        "shared_parameters",
        "state_names",
    ),
    "loss": ("classification_loss", "masked_token_loss", "next_token_loss"),
    "presets": ("PRESETS", "ModelConfig", "Preset", "preset"),
    "resnext": ("Norm", "ResNeXtConfig"),
}


def __getattr__(name: str) -> Any:
    """The names that need torch, imported when they are first used."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
