"""From a config to what is trained: layers, loss, mini-batches, optimiser, cuts.

Invariant: every config that cannot run is refused here, before any worker starts, and every process makes the
same job. Layers are on the meta device: each worker makes the weights of its own stages from the run's seed.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from counterflow.capture.estimates import estimated_costs
from counterflow.capture.model_layers import layers_of, parameter_count
from counterflow.checkpoints.memory_copies import ResumePoint
from counterflow.checkpoints.reader import Checkpoint
from counterflow.errors import ConfigError
from counterflow.measure.equal_layers import kinds_of
from counterflow.measure.machine import cores
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.program.segments import segments
from counterflow.runtime.assembly.rehearsal import Rehearsal
from counterflow.runtime.transport.base import Transport
from counterflow.schedule.cuts import balance, explicit, stage_layers
from counterflow.schedule.ir import Schedule
from counterflow.schedule.residency import weight_copies

from .config import RunConfig
from .resuming import changes, check, starting_checkpoint, verify_start
from .sections.keys import AUTO
from .sections.schedule_section import SCHEME
from .sections.training_section import OptimizerSection
from .source import ModelAndData
from .stage_mesh import degrees_of, rehearsal_of
from .supervision.exclusive import Fence
from .training_report import About
from .transport_choice import with_transport, workers_here


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a run trains: schedule, model, data and starting point.

    Attributes:
        config: config of the run.
        schedule: schedule of the run.
        bundle: the model, its loss and its samples.
        layers: layers of the model.
        cuts: the layers with which stages 1, 2, ... begin.
        start: checkpoint to resume from; None: fresh weights.
        about: description of the run in words and numbers.
    """

    config: RunConfig
    schedule: Schedule
    bundle: ModelAndData
    layers: list[nn.Module]
    cuts: tuple[int, ...]
    start: Checkpoint | None
    about: About

    @property
    def first_step(self) -> int:
        """Number of updates made by the run that is resumed."""
        return self.about.first_step

    @property
    def complete(self) -> bool:
        """True if all updates were made before, so only the end of the run is left."""
        return self.first_step >= self.config.train.steps

    def least_bytes(self, rehearsal: Rehearsal | None = None) -> tuple[int, ...]:
        """Bytes of each worker's weights in all versions, gradients and optimiser state, on its first rank.

        Activations, which depend on the model's code, come on top.

        Args:
            rehearsal: the division of the weights, if the caller has it already.
        """
        rehearsal = rehearsal or self.rehearsal()
        if rehearsal is not None:
            weights = [stage.weights for stage in rehearsal.stages]
            gradients = [stage.gradients for stage in rehearsal.stages]
        else:
            weights = gradients = [
                sum(parameter.nbytes for layer in numbers for parameter in self.layers[layer].parameters())
                for numbers in stage_layers(self.cuts, len(self.layers))
            ]
        section = self.config.optimizer
        slots = 2.0 if section.name != "sgd" else 1.0 if section.momentum else 0.0
        if self.config.pipeline.zero_stage:
            slots /= self.config.pipeline.replicas * self.schedule.pipes
        totals = []
        for worker, copies in enumerate(weight_copies(self.schedule)):
            stages = [stage for _, stage in self.schedule.placement.stages_on(worker)]
            stage_bytes = sum(weights[stage] for stage in stages)
            gradient_bytes = sum(gradients[stage] for stage in stages)
            totals.append(round(stage_bytes * (copies / len(stages) + slots) + gradient_bytes))
        return tuple(totals)

    def rehearsal(self) -> Rehearsal | None:
        """Division of the weights over the mesh; None: stages are not divided.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        return rehearsal_of(self.config, self.schedule, self.bundle, self.cuts)

    def going_on(self, step: int) -> Job:
        """A copy that continues from a step in the workers' memory, and from no checkpoint."""
        return dataclasses.replace(self, start=None, about=dataclasses.replace(self.about, first_step=step))

    def from_newest_state(
        self, copies: ResumePoint | None, transport: Transport, fence: Fence
    ) -> tuple[Job, ResumePoint | None]:
        """The job that resumes from the newest state; all workers call it.

        Checkpoints that ``auto`` chose and whose contents are damaged are renamed until one is not, or none
        is left.

        Args:
            copies: state in the workers' memory.
            transport: transport to the other workers.
            fence: fence of this attempt.

        Returns:
            The job, and the copies if it resumes from them.
        """
        job, train = self, self.config.train
        while copies is None or not job.first_step <= copies.step < train.steps:
            if job.start is None or train.resume != AUTO:
                return job, None
            fence.check()
            start = verify_start(job.start, transport)
            if start is job.start:
                return job, None
            job = job._resuming(start)
        return job.going_on(copies.step), copies

    def _resuming(self, start: Checkpoint | None) -> Job:
        if start is not None:
            check(start, self.bundle, self.config)
        about = dataclasses.replace(
            self.about,
            first_step=start.step if start is not None else 0,
            resumed=str(start.path) if start is not None else None,
            changed=changes(start, self.bundle.digest, self.config) if start is not None else (),
        )
        return dataclasses.replace(self, start=start, about=about)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser of parameters; norms and biases do not decay."""
        section = self.config.optimizer
        assert section.learning_rate is not None  # filled in by the config
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": group, "weight_decay": decay}
            for group, decay in ((matrices, section.weight_decay), (vectors, 0.0))
            if group
        ]
        if section.name == "sgd":
            return torch.optim.SGD(groups, lr=section.learning_rate, momentum=section.momentum)
        kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
        return kind(groups, lr=section.learning_rate, betas=section.betas)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning-rate scheduler from the first step on."""
        section, steps, first = self.config.optimizer, self.config.train.steps, self.first_step
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # a scheduler that begins later asks for it
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: rate_factor(section, steps, n), last_epoch=first - 1
        )
        # Checkpoints of a resumed run have the counts of one that was not stopped.
        scheduler.load_state_dict({**scheduler.state_dict(), "_step_count": first + 1})
        return scheduler

    @staticmethod
    def follow(schedulers: Iterable[torch.optim.lr_scheduler.LRScheduler]) -> None:
        """After a skipped update: go on with the schedule, whose rate is that of a step's number."""
        with warnings.catch_warnings():  # one is given if the first update is skipped
            warnings.simplefilter("ignore", UserWarning)
            for scheduler in schedulers:
                scheduler.step()

    def learning_rate(self, step: int) -> float:
        """The learning rate of step number ``step``, from 0."""
        section = self.config.optimizer
        assert section.learning_rate is not None
        return section.learning_rate * rate_factor(section, self.config.train.steps, step)


def _fits_without_flush(config: RunConfig, schedule: Schedule) -> None:
    segments(schedule, replicas=config.pipeline.replicas)  # the schedule has enough periods, and is right
    if config.model.tied:
        raise ConfigError(
            f"model.tied = true: {schedule.scheme} updates each stage at its own time, but the first and the "
            "last stage would share a weight; leave it false, or choose a synchronous scheme such as "
            f"{SCHEME}"
        )


def prepare(config: RunConfig, cuts: Sequence[int] | None = None, start: Path | None = None) -> Job:
    """The job of a config.

    Args:
        config: config of the run.
        cuts: cuts that were found before, so they are not searched again.
        start: with ``cuts``: the checkpoint that was found before.

    Raises:
        ConfigError: no such run can be made; the message says what would be legal.
    """
    schedule = config.build_schedule()
    config, where = with_transport(config, config.processes)
    refuse_what_cannot_run(schedule)
    if not schedule.synchronous:
        _fits_without_flush(config, schedule)
    bundle = config.model.source.make(config)
    layers = layers_of(bundle.model, bundle.list_layers)
    degrees_of(config).refuse_undivided(layers)
    begun = None
    if cuts is None or start is not None:
        begun = starting_checkpoint(config, start)
    if begun is not None:
        check(begun, bundle, config)
    if cuts is None and config.pipeline.cuts is not None:
        cuts = explicit(config.pipeline.cuts, len(layers), schedule.stages)
    if cuts is None:
        samples = max(1, config.train.samples // schedule.micro_batches)
        cuts = balance(operations(bundle, layers, samples), schedule.stages)
    cuts = tuple(cuts)
    stages = stage_layers(cuts, len(layers))
    section, blocks = config.model, config.model.layers
    about = About(
        model=f"{section.source.name(config)}, {blocks} block{'' if blocks == 1 else 's'}, hidden "
        f"{section.hidden}, heads {section.heads}, positions {section.positions}",
        parameters=parameter_count(layers),
        text=bundle.text,
        text_bytes=bundle.text_bytes,
        unigram_entropy=bundle.entropy,
        scheme=schedule.scheme,
        options=dict(schedule.options),
        workers=schedule.workers,
        replicas=config.pipeline.replicas,
        pipes=schedule.pipes,
        stage_layers=tuple((layers_[0], layers_[-1]) for layers_ in stages),
        micro_batches=schedule.micro_batches,
        samples=config.train.samples * config.sample_shares,
        positions=bundle.batches.positions,
        steps=config.train.steps,
        first_step=begun.step if begun else 0,
        resumed=str(begun.path) if begun else None,
        changed=changes(begun, bundle.digest, config) if begun else (),
        workers_here=workers_here(config.processes),
        cores=cores(),
        on_cpu=config.pipeline.transport != "nccl",
        mesh=degrees_of(config).sizes,
        unit=bundle.unit,
        target=bundle.target,
        where=where,
    )
    return Job(config, schedule, bundle, layers, cuts, begun, about)


def rate_factor(section: OptimizerSection, steps: int, step: int) -> float:
    """The share of the maximum learning rate with which step number ``step`` (from 0) of ``steps`` is made.

    >>> section = OptimizerSection(warmup_steps=2, schedule="linear")
    >>> [rate_factor(section, 6, step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = section.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if section.schedule == "constant":
        return 1.0
    return 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def operations(bundle: ModelAndData, layers: Sequence[nn.Module], samples: int) -> list[float]:
    """Floating-point operations of each layer's forward for this many samples, estimated."""
    inputs, _ = bundle.batches.batch(0, samples)
    if not isinstance(inputs, dict):
        listed = bundle.list_layers is None  # blocks of the built-in models differ in nothing but weights
        return estimated_costs(layers, inputs, kinds=kinds_of(layers) if listed else None)
    # Layers that need keyword arguments cannot run on the meta device: they are estimated by their weights.
    return [cost * samples * bundle.batches.positions for cost in estimated_costs(layers)]
