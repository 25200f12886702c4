"""The training arguments of transformers, with those of a pipeline.

Invariant: transformers and accelerate see each worker as the only process, so they wrap nothing and
distribute no samples; only the first worker writes and logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables from which accelerate learns of other processes."""

AUTO, FIRST = "auto", "1f1b"
"""The value of ``schedule`` that asks for a plan, and the scheme of the timed steps."""


@contextmanager
def single_process() -> Iterator[None]:
    """Hide the launcher's variables within this context, so accelerate finds one process."""
    variables = {name: os.environ.pop(name) for name in _PLACE if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(variables)


@dataclass
class PipelineFields:
    """Arguments of a pipeline, to be combined with any training arguments: ``class Mine(PipelineFields,
    SFTConfig)``. If more processes run than ``pp``, they are replicas of the pipeline.

    Attributes:
        pp: number of workers over which the model is cut.
        schedule: the scheme, by its name; ``counterflow schemes`` lists them. ``auto``: the model is
            measured, and the plan with the shortest step within the workers' memory is taken.
        cuts: the numbers of the layers with which stages 1, 2, ... begin; None: balanced.
        recompute: what a backward computes again: ``none``, ``stage`` or ``layer``, which is what
            ``activation_checkpointing`` of transformers becomes.

    Raises:
        ConfigError: ``ddp_backend`` is given.
    """

    pp: int = field(default=1, metadata={"help": "Number of workers over which the model is cut."})
    schedule: str = field(default="1f1b", metadata={"help": "The pipeline scheme, by its name."})
    cuts: list[int] | None = field(
        default=None, metadata={"help": "The layers with which stages 1, 2, ... begin; default: balanced."}
    )
    recompute: str = field(
        default="none", metadata={"help": "What a backward computes again: none, stage or layer."}
    )

    def __post_init__(self) -> None:
        """Set up devices as if this process were the only one."""
        self.pipeline_rank = int(os.environ.get("RANK", "0"))
        self.pipeline_workers = int(os.environ.get("WORLD_SIZE", "1"))
        backend = getattr(self, "ddp_backend", None)
        if backend is not None:  # accelerate would open a process group of this process alone
            raise ConfigError(
                f"ddp_backend={backend!r} cannot be combined with a pipeline: workers exchange messages by "
                "NCCL on GPUs and by Gloo on CPUs; leave it out"
            )
        with single_process():
            super().__post_init__()  # type: ignore[misc]
            for name in (
                "activation_checkpointing",
                "gradient_checkpointing",
            ):  # the older name is the second
                if getattr(self, name, None):
                    setattr(self, name, False)
                    self.recompute = "layer" if self.recompute == "none" else self.recompute
            getattr(self, "_setup_devices")  # noqa: B009 - it is made when it is first asked for
        self._n_gpu = min(getattr(self, "_n_gpu", 0), 1)  # the others are of other workers
        if self.device.type == "cuda" and self.pipeline_workers > 1:
            self._pipeline_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self._pipeline_device)

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return getattr(self, "_pipeline_device", None) or super().device  # type: ignore[misc,no-any-return]

    @property
    def replicas(self) -> int:
        """Number of replicas of the pipeline."""
        return max(self.pipeline_workers // self.pp, 1)

    @property
    def replica(self) -> int:
        """Number of the replica that this worker belongs to."""
        return self.pipeline_rank // self.pp

    @property
    def world_size(self) -> int:
        """Number of replicas, which have batches of their own; a replica is one process to the trainer."""
        return self.replicas

    @property
    def process_index(self) -> int:
        """Number of this worker; the first one writes and logs."""
        return self.pipeline_rank

    @property
    def local_process_index(self) -> int:
        """Number of this worker; the first one writes and logs."""
        return self.pipeline_rank

    def made_schedule(self) -> Schedule:
        """The schedule of a step, or with ``auto`` of the timed ones; its micro-batches are the batches that
        are accumulated.

        Raises:
            ConfigError: the scheme is unknown, does not support the number of workers or micro-batches, or is
                asynchronous.
        """
        name = FIRST if self.schedule == AUTO else self.schedule
        options: dict[str, Any] = {
            "workers": self.pp,
            "micro_batches": self.gradient_accumulation_steps,  # type: ignore[attr-defined]
        }
        scheme = registry.scheme(name)
        if not scheme.synchronous:
            raise ConfigError(
                f"schedule={self.schedule!r} is asynchronous, but transformers' Trainer updates at "
                "the end of each step; choose a synchronous scheme, such as zb-v or 1f1b"
            )
        return registry.build(name, scheme.with_own_depth(options))


@dataclass
class PipelineArguments(PipelineFields, transformers.TrainingArguments):  # type: ignore[misc]
    """``TrainingArguments`` with ``pp``, ``schedule``, ``cuts`` and ``recompute``."""
