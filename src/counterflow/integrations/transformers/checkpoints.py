"""Checkpoints of a trainer whose model is in pipeline stages, in transformers' own files.

Invariant: a checkpoint says nothing of the stages, so a run of any number of workers resumes from it, and so
does the trainer without a pipeline, whose checkpoints are read the same way.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from counterflow.errors import ConfigError
from counterflow.models import hf
from counterflow.models.hf.folder_files import files_by_tensor, has_weights
from counterflow.models.hf.weight_files import Folder
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.state_format import BACKOFF, GROWTH, LOSS_SCALE, LossScale, ParameterState

from .optimizer_view import OptimizerView

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

OPTIMIZER, SCHEDULER, SCALER, ARGUMENTS = "optimizer.pt", "scheduler.pt", "scaler.pt", "training_args.bin"
"""Files of a checkpoint, by transformers' names."""

_RNG_STATES = "rng_state_0.pth", "rng_state.pth"
"""Files of the random state, of several processes and of one."""

PIPELINE = "counterflow"
"""In the file of the optimiser: what a pipeline resumes with beside it."""


class Checkpoints(Base):  # type: ignore[misc]
    """Writes and reads the checkpoints of a trainer.

    Attributes:
        pipeline: the pipeline; None until it is needed.
    """

    pipeline: Pipeline | None = None
    _decays: set[str]
    """Names of the weights that decay."""
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
        if not self.args.should_save:
            return
        parameter_states: dict[str, ParameterState] = state["optimizer"]
        groups: list[dict[str, Any]] = []
        states: dict[int, dict[str, Any]] = {}
        count = 0
        for group_names in self._updated_names():
            options: dict[str, Any] = {}
            for number, names in enumerate(group_names, count):
                parameter_state = next(parameter_states[name] for name in names if name in parameter_states)
                options = parameter_state.options
                if parameter_state.state:
                    states[number] = parameter_state.state
            groups.append({**options, "params": [*range(count, count + len(group_names))]})
            count += len(group_names)
        _fill_empty(groups, self.args.weight_decay)
        extra_state = {name: state[name] for name in ("step", "seed")}
        optimizer_state = {"state": states, "param_groups": groups, PIPELINE: extra_state}
        torch.save(optimizer_state, Path(output_dir) / OPTIMIZER)
        torch.save(
            _schedule_for_groups(self.lr_scheduler.state_dict(), len(groups)), Path(output_dir) / SCHEDULER
        )
        scaling = self.pipeline.weights.loss_scale
        if scaling is not None:
            torch.save(_of_grad_scaler(scaling), Path(output_dir) / SCALER)

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: losses are scaled by the pipeline, and its scale is written with the optimiser."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        pass  # as above

    def _updated_names(self) -> list[list[list[str]]]:
        """All names of each trained weight, in the order and groups of the trainer without a pipeline."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                names.setdefault(id(parameter), []).append(name)
        return [
            [aliases for aliases in names.values() if (aliases[0] in self._decays) == decays]
            for decays in (True, False)
        ]

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
            of_first, of_all = (Path(output_dir) / name for name in _RNG_STATES)
            if of_first.exists():
                of_first.replace(of_all)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the first worker's random state on each: all draw the same order of the samples."""
        if checkpoint is None:
            return
        known = [path for name in _RNG_STATES if (path := Path(checkpoint) / name).exists()]
        with tempfile.TemporaryDirectory() as folder:
            for name in (f"rng_state_{self.args.process_index}.pth", _RNG_STATES[-1]) if known else ():
                shutil.copy(known[-1], Path(folder) / name)
            super()._load_rng_state(folder if known else checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.pipeline is not None:
            self.pipeline.load_model_state_dict(self._weights_of(resume_from_checkpoint))
        elif self._has_adapters or not has_weights(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            _load(
                self.model if model is None else model,
                self._weights_of(resume_from_checkpoint),
                resume_from_checkpoint,
            )

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _weights_of(self, folder: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file  # noqa: PLC0415

        adapters = self._has_adapters
        if isinstance(self.model, PreTrainedModel) and not adapters and has_weights(Path(folder)):
            return Folder.read(Path(folder), self.model).tensors()
        names: Collection[str] = ()
        if adapters:
            names = [path.name for path in Path(folder).glob("adapter_model.safetensors")]
        elif has_weights(Path(folder)):
            names = {*files_by_tensor(Path(folder)).values()}
        weights: dict[str, Tensor] = {}
        for name in sorted(names):
            weights |= load_file(Path(folder) / name)
        if not weights:
            raise ConfigError(
                f"{folder}: has no weights in safetensors; give a folder that this trainer wrote"
            )
        if not adapters:
            return weights
        assert self.pipeline is not None
        adapter_weights: dict[str, Tensor] = self.pipeline.model_state_dict(local=True)
        adapter = f".{self.model.active_adapters[0]}"
        for name in adapter_weights:
            weight = weights.get(name.replace(adapter, "").replace(".modules_to_save", ""))
            if adapter in name and weight is not None:
                adapter_weights[name] = weight
            elif adapter in name:
                raise ConfigError(
                    f"{folder}: has no weights of {name}; give a folder that this trainer wrote"
                )
        return adapter_weights

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER).exists():
            return
        assert self.pipeline is not None
        state = torch.load(Path(checkpoint) / OPTIMIZER, weights_only=True)
        names, groups = self._updated_names(), state.get("param_groups", [])
        if [len(group["params"]) for group in groups] != [len(group_names) for group_names in names]:
            raise ConfigError(
                f"{checkpoint}: {OPTIMIZER} is of other groups of weights than this trainer has; resume with "
                "the same model and arguments, or begin a new run from the checkpoint's model"
            )
        parameter_states: dict[str, Any] = {}
        for group_names, group in zip(names, groups, strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            for aliases, number in zip(group_names, group["params"], strict=True):
                parameter_state = {"state": state["state"].get(number, {}), "options": options}
                parameter_states |= dict.fromkeys(aliases, parameter_state)
        steps = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).global_step
        extra_state = {"step": steps, "seed": self.args.seed} | state.get(PIPELINE, {})
        if (Path(checkpoint) / SCALER).exists():
            scale = torch.load(Path(checkpoint) / SCALER, weights_only=True)
            growth_tracker = scale.get("_growth_tracker")
            extra_state[LOSS_SCALE] = {"0": {"scale": scale.get("scale"), "growth_tracker": growth_tracker}}
        weights = self.pipeline.model_state_dict(local=True)
        self.pipeline.load_state_dict(
            {"model": weights, "optimizer": parameter_states, "scheduler": {}, **extra_state}
        )
        schedule = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.optimizer = OptimizerView(self.pipeline, schedule["_last_lr"][0])
        self.lr_scheduler.optimizer = self.optimizer
        count = len(self.optimizer.param_groups)
        self.lr_scheduler.load_state_dict(_schedule_for_groups(schedule, count))


def _load(model: nn.Module, weights: Mapping[str, Tensor], folder: str) -> None:
    tensors = model.state_dict(keep_vars=True)
    read = {id(tensors[name]) for name in weights if name in tensors}
    missing = next((name for name, tensor in tensors.items() if id(tensor) not in read), None)
    if missing is not None:
        raise ConfigError(f"{folder}: has no weights of {missing}; give a folder that this trainer wrote")
    model.load_state_dict(weights, strict=False)


def _fill_empty(groups: Sequence[dict[str, Any]], weight_decay: float) -> None:
    # Torch's optimizers read the options of groups without weights, too.
    options = next((group for group in groups if group["params"]), {})
    for group, decay in zip(groups, (weight_decay, 0.0), strict=True):
        if not group["params"]:
            group.update({**options, "params": [], "weight_decay": decay})


def _of_grad_scaler(scaling: LossScale) -> dict[str, float | int]:
    return {
        "scale": scaling.scale,
        "growth_factor": GROWTH,
        "backoff_factor": BACKOFF,
        "growth_interval": scaling.interval,
        "_growth_tracker": scaling.steady_updates,
    }


def _schedule_for_groups(schedule: dict[str, Any], count: int) -> dict[str, Any]:
    # All groups have the same rate.
    return schedule | {n: v[:1] * count for n, v in schedule.items() if isinstance(v, list)}
