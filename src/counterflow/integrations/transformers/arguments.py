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

import transformers

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables from which accelerate learns of other processes."""


@contextmanager
def alone() -> Iterator[None]:
    """Within this context accelerate finds one process."""
    held = {name: os.environ.pop(name) for name in _PLACE if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


@dataclass
class PipelineFields:
    """Arguments of a pipeline, to be combined with any training arguments: ``class Mine(PipelineFields,
    SFTConfig)``.

    Attributes:
        pp: number of workers over which the model is cut.
        schedule: the scheme, by its name; ``counterflow schemes`` lists them.
        cuts: the numbers of the layers with which stages 1, 2, ... begin; None: balanced.
        recompute: what a backward computes again: ``none``, ``stage`` or ``layer``.
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
        with alone():
            super().__post_init__()  # type: ignore[misc]
            getattr(self, "_setup_devices")  # noqa: B009 - it is made when it is first asked for

    @property
    def process_index(self) -> int:
        """Number of this worker; the first one writes and logs."""
        return self.pipeline_rank

    @property
    def local_process_index(self) -> int:
        """Number of this worker; the first one writes and logs."""
        return self.pipeline_rank

    def made_schedule(self) -> Schedule:
        """The schedule of a step; its micro-batches are the batches that are accumulated.

        Raises:
            ConfigError: the scheme is unknown, does not support the number of workers or micro-batches, or is
                asynchronous.
        """
        options: dict[str, Any] = {
            "workers": self.pp,
            "micro_batches": self.gradient_accumulation_steps,  # type: ignore[attr-defined]
        }
        scheme = registry.scheme(self.schedule)
        if not scheme.synchronous:
            raise ConfigError(
                f"schedule={self.schedule!r} is asynchronous, but transformers' Trainer updates at "
                "the end of each step; choose a synchronous scheme, such as zb-v or 1f1b"
            )
        return registry.build(self.schedule, scheme.with_own_depth(options))


@dataclass
class PipelineArguments(PipelineFields, transformers.TrainingArguments):  # type: ignore[misc]
    """``TrainingArguments`` with ``pp``, ``schedule``, ``cuts`` and ``recompute``."""
