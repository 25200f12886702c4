"""The Trainer of transformers, and those made of it (TRL's), in pipeline stages.

``PipelineTrainer`` and ``PipelineArguments`` take the place of ``Trainer`` and ``TrainingArguments``; the
mixins ``Pipelined`` and ``PipelineFields`` make the same of a trainer and arguments of one's own.

What the trainer computes its loss by (``compute_loss``: the model's own loss, label smoothing, a function of
the user's, TRL's losses) is captured as one model, whose layers are found by itself, and run in the stages.
So a step's loss, gradients and norm are the trainer's own, for any number of workers.

It comes with ``pip install "counterflow[hf]"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import PipelineArguments, PipelineFields
    from .trainer import Pipelined, PipelineTrainer

__all__ = ["PipelineArguments", "PipelineFields", "PipelineTrainer", "Pipelined"]

_HOMES = {
    "PipelineArguments": "arguments",
    "PipelineFields": "arguments",
    "PipelineTrainer": "trainer",
    "Pipelined": "trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
