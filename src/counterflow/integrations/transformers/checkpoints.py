"""Checkpoints of a trainer whose model is in pipeline stages, in transformers' own files.

Invariant: a checkpoint says nothing of the stages, so a run of any number of workers resumes from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.models import hf
from counterflow.runtime.pipeline import Pipeline

from .shown import Shown

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

OPTIMIZER, SCHEDULER, ARGUMENTS = "optimizer.pt", "scheduler.pt", "training_args.bin"
"""Files of a checkpoint, by transformers' names."""


class Checkpoints(Base):  # type: ignore[misc]
    """Writes and reads the checkpoints of a trainer.

    Attributes:
        pipeline: the pipeline; None until it is needed.
    """

    pipeline: Pipeline | None = None
    optimizer: Any
    lr_scheduler: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as transformers does; all workers call it."""
        if self.pipeline is None:
            if self.args.should_save:
                super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        tokenizer = self.processing_class
        if tokenizer is None:  # as transformers does
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        hf.save(self.model, self.pipeline, folder, tokenizer=tokenizer)
        if self.args.should_save:
            torch.save(self.args, folder / ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.pipeline is not None
        state = self.pipeline.state_dict(rank=0)
        if self.args.should_save:
            state.pop("model")
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.pipeline is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.pipeline.load_model_state_dict(self._weights_of(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _weights_of(self, folder: str) -> dict[str, Tensor]:
        """The model's weights in the form of a checkpoint."""
        from safetensors.torch import load_file  # noqa: PLC0415

        adapters = hasattr(self.model, "peft_config")
        found: dict[str, Tensor] = {}
        for file in sorted(
            Path(folder).glob("adapter_model.safetensors" if adapters else "model*.safetensors")
        ):
            found |= load_file(file)
        if not found:
            raise ConfigError(
                f"{folder}: has no weights in safetensors; give a folder that this trainer wrote"
            )
        if not adapters:
            return found
        assert self.pipeline is not None
        mine: dict[str, Tensor] = self.pipeline.model_state_dict(local=True)
        adapter = f".{self.model.active_adapters[0]}"
        for name in mine:
            its = found.get(name.replace(adapter, "").replace(".modules_to_save", ""))
            if adapter in name and its is not None:
                mine[name] = its
            elif adapter in name:
                raise ConfigError(
                    f"{folder}: has no weights of {name}; give a folder that this trainer wrote"
                )
        return mine

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER).exists():
            return
        assert self.pipeline is not None
        state = torch.load(Path(checkpoint) / OPTIMIZER, weights_only=True)
        if "optimizer" not in state:
            raise ConfigError(
                f"{checkpoint}: {OPTIMIZER} is not one of a trainer in a pipeline; resume from a checkpoint "
                "that this trainer wrote, or begin a new run from the checkpoint's model"
            )
        self.pipeline.load_state_dict({**state, "model": self.pipeline.model_state_dict(local=True)})
        kept = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.optimizer = Shown(self.pipeline, kept["_last_lr"][0])
        self.lr_scheduler.optimizer = self.optimizer
        mine = self.lr_scheduler.state_dict()
        # Each group of weights has an element; workers, and other numbers of workers, have other groups.
        kept |= {n: kept[n][:1] * len(v) for n, v in mine.items() if isinstance(v, list) and kept.get(n)}
        self.lr_scheduler.load_state_dict(kept)
