"""The Trainer of transformers, and trainers derived from it (TRL's), in pipeline stages.

``PipelineTrainer`` and ``PipelineArguments`` replace ``Trainer`` and ``TrainingArguments``; the mixins
``PipelineTrainerMixin`` and ``PipelineFields`` do the same for a user's own trainer and arguments.

The computation of the trainer's loss (``compute_loss``: the model's own loss, label smoothing, a user's
function, TRL's losses) is captured as one model, whose layers are found automatically and run in the stages.
So a step's loss, gradients and norm are the trainer's own, for any number of workers.

Install it with ``pip install "counterflow[transformers]"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import PipelineTrainer, PipelineTrainerMixin
    from .trainer_arguments import PipelineArguments, PipelineFields

__all__ = ["PipelineArguments", "PipelineFields", "PipelineTrainer", "PipelineTrainerMixin"]

_HOMES = {
    "PipelineArguments": "trainer_arguments",
    "PipelineFields": "trainer_arguments",
    "PipelineTrainer": "trainer",
    "PipelineTrainerMixin": "trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ("transformers", "accelerate"):
                raise
            advice = f'{error.name} is not installed; pip install "counterflow[transformers]"'
            raise ModuleNotFoundError(advice, name=error.name) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
