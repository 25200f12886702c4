"""The training arguments of transformers, with those of a pipeline.

Invariant: to transformers and accelerate each worker is the only process, so that they wrap nothing and deal
out no samples; only the first one writes and logs.
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
"""What tells accelerate that there are other processes."""


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
    """What a pipeline is told, beside any training arguments: ``class Mine(PipelineFields, SFTConfig)``.

    Attributes:
        pp: how many workers the model is cut over.
        schedule: the scheme, by its name; ``counterflow schemes`` lists them.
        cuts: the numbers of the layers with which stages 1, 2, ... begin; None: balanced.
        recompute: what is computed again in a backward: ``none``, ``stage`` or ``layer``.
    """

    pp: int = field(default=1, metadata={"help": "How many workers the model is cut over."})
    schedule: str = field(default="1f1b", metadata={"help": "The pipeline scheme, by its name."})
    cuts: list[int] | None = field(
        default=None, metadata={"help": "The layers with which stages 1, 2, ... begin; balanced by default."}
    )
    recompute: str = field(default="none", metadata={"help": "What is computed again: none, stage or layer."})

    def __post_init__(self) -> None:
        """Set up devices, as if this process were the only one."""
        self.pipeline_rank = int(os.environ.get("RANK", "0"))
        self.pipeline_workers = int(os.environ.get("WORLD_SIZE", "1"))
        with alone():
            super().__post_init__()  # type: ignore[misc]
            getattr(self, "_setup_devices")  # noqa: B009 - it is made when it is first asked for

    @property
    def process_index(self) -> int:
        """The number of this worker: the first one writes and logs."""
        return self.pipeline_rank

    @property
    def local_process_index(self) -> int:
        """Likewise."""
        return self.pipeline_rank

    def made_schedule(self) -> Schedule:
        """The schedule of a step, whose micro-batches are the batches that are accumulated.

        Raises:
            ConfigError: there is no such scheme, it has no such number of workers or micro-batches, or it is
                asynchronous.
        """
        options: dict[str, Any] = {
            "workers": self.pp,
            "micro_batches": self.gradient_accumulation_steps,  # type: ignore[attr-defined]
        }
        scheme = registry.scheme(self.schedule)
        if not scheme.synchronous:
            raise ConfigError(
                f"schedule={self.schedule!r} is asynchronous, and transformers' Trainer updates at "
                "the end of each step; take a synchronous scheme, such as zb-v or 1f1b"
            )
        return registry.build(self.schedule, scheme.with_own_depth(options))


@dataclass
class PipelineArguments(PipelineFields, transformers.TrainingArguments):  # type: ignore[misc]
    """``TrainingArguments`` with ``pp``, ``schedule``, ``cuts`` and ``recompute``."""
