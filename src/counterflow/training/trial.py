"""A small training job to compare two ways of running it: a tiny GPT on random tokens.

It contains what goes wrong first: dropout, an embedding tied to the output layer, micro-batches of unequal
size, clipping, and an optimiser with a memory. Its optimiser is AdamW with an eps of 1e-3: with the usual
1e-8, gradients that are zero except for rounding (such as that of an attention key's bias) would make full
steps, and noise would be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.models.gpt import GPTConfig
from counterflow.program.checker import checked_program
from counterflow.program.segments import segments
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync
from counterflow.verification.reference_parts import parts_of
from counterflow.verification.training_agreement import TrainingAgreement, TrainingResult, one_process, verify

CLIP_NORM = 0.5
"""Less than the norm of the first gradients, so they are clipped."""


@dataclass(frozen=True, slots=True)
class TrialTraining:
    """A model, its samples, and the schedule that trains it.

    Attributes:
        schedule: schedule of the pipeline.
        layers: the model.
        loss: function of output and target that returns the mean loss over the samples.
        batches: mini-batches by step and replica: inputs and targets.
        optimizer: function that makes an optimiser of parameters.
    """

    schedule: Schedule
    layers: list[nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: list[list[tuple[Tensor, Tensor]]]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]

    def one_process(self, *, clip_norm: float | None = CLIP_NORM, **options: Any) -> TrainingResult:
        """The training in one process; options and errors as in ``verify.agreement.one_process``."""
        return one_process(
            self.layers,
            self.loss,
            parts_of(self.schedule),
            self.batches,
            optimizer=self.optimizer,
            clip_norm=clip_norm,
            **options,
        )

    def verify(self, *, clip_norm: float | None = CLIP_NORM, **options: Any) -> TrainingAgreement:
        """Compare one process with the pipeline; options and errors as in ``verify.agreement.verify``."""
        return verify(
            self.schedule,
            self.layers,
            self.loss,
            self.batches,
            optimizer=self.optimizer,
            clip_norm=clip_norm,
            **options,
        )


def updates_compared(schedule: Schedule, *, replicas: int = 1, sync: Sync = Sync.EAGER_OPT) -> int:
    """Default number of updates of a small trial.

    It is 3, or in an asynchronous scheme enough to reach all versions of the weights, with a flush before the
    last 2.

    Raises:
        ScheduleError: the checker does not accept the schedule.
    """
    if schedule.synchronous:
        checked_program(schedule, replicas=replicas, sync=sync)
        return 3
    return segments(schedule, replicas=replicas).last + 5


def small_trial(
    schedule: Schedule,
    *,
    replicas: int = 1,
    steps: int = 3,
    dtype: torch.dtype | str = torch.float64,
    dropout: float | None = None,
    tied: bool | None = None,
    seed: int = 0,
) -> TrialTraining:
    """A trial for a schedule: a layer per stage, or two more, and samples that divide unevenly.

    Args:
        schedule: schedule that will run it.
        replicas: number of pipeline groups, each with mini-batches of its own, larger for later groups.
        steps: number of mini-batches for each.
        dtype: dtype of the weights, or its name in torch.
        dropout: share of activations that is dropped; None: 0.1, or 0 with slices, which draw their own.
        tied: whether embedding and output layer share their weight; default: in synchronous schemes.
        seed: seed of weights and mini-batches.
    """
    slices = schedule.workload.slices
    if dropout is None:
        dropout = 0.1 if slices == 1 else 0.0
    config = GPTConfig(
        layers=max(schedule.stages - 2, 1) + seed % 2,
        hidden=8,
        heads=2,
        vocabulary=17,
        positions=4 if slices == 1 else 3 * slices + 1,
        dropout=dropout,
        tied=schedule.synchronous if tied is None else tied,
        deviation=0.3,
    )
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = list(nn.ModuleList(config.build()).to(dtype))
    generator = torch.Generator().manual_seed(seed + 1)
    fewest = schedule.micro_batches * schedule.workload.sample_parts
    # One sample more than fits evenly, and one more in each further replica.
    samples = [fewest + (1 if fewest > 1 else 0) + replica for replica in range(replicas)]
    batches = [[config.sample(count, generator=generator) for count in samples] for _ in range(steps)]
    return TrialTraining(
        schedule, layers, config.loss, batches, partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    )
