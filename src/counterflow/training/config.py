"""A training run as data: the tables of a config together.

Invariant: a ``RunConfig`` that exists is one that can start: its schedule builds, its model has a layer for
every stage, its samples fill every micro-batch. The meaning of a key is stated in its table (``sections``).
Files are read and errors worded in ``load.py``; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from counterflow.common import toml
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.execution import unskippable, why_in_full
from counterflow.schedule.cuts import explicit
from counterflow.schedule.ir import Schedule
from counterflow.schedule.recompute_ops import as_recomputed
from counterflow.schedule.scheme import MICRO_BATCHES

from . import source_registry
from .sections.keys import AUTO, Section
from .sections.mesh_section import MeshSection
from .sections.model_section import DataSection, LoraSection, ModelSection
from .sections.pipeline_section import PipelineSection
from .sections.schedule_section import ScheduleSection
from .sections.training_section import MOST_TOKENS, OptimizerSection, PlanSection, TrainSection

_MOST_WARMUP = 2000

_MANY_MICRO_BATCHES = 1000
"""Micro-batches with which the schedule of any scheme is still built in a moment."""


def by_key(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a config's sections by ``section.key``."""
    return {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}


class RunConfig(Section):
    r"""A training run. Without arguments it is the built-in example.

    Errors are pydantic's ``ValidationError`` here, and ``ConfigError`` in ``load_config``.

    >>> config = RunConfig()
    >>> str(config.build_schedule())
    'chimera(stages=4, micro_batches=8, pairs=1, concat=direct)'
    >>> print(*config.to_toml().splitlines()[:2], sep="\n")
    [model]
    kind = "gpt"  # architecture, or the name of a model
    """

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
    mesh: MeshSection = Field(default_factory=MeshSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    train: TrainSection = Field(default_factory=TrainSection)
    plan: PlanSection = Field(default_factory=PlanSection)

    @model_validator(mode="after")
    def _fill(self) -> RunConfig:
        usual = {
            "learning_rate": self.model.source.learning_rate(self),
            "warmup_steps": min(_MOST_WARMUP, self.train.steps // 4),
        }
        missing = {name: value for name, value in usual.items() if getattr(self.optimizer, name) is None}
        object.__setattr__(self, "optimizer", self.optimizer.model_copy(update=missing))
        return self

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        self._refuse_empty_micro_batches_of_large_schedules()
        schedule = self.build_schedule()
        if self.train.resume == AUTO and self.train.out is None:
            raise ConfigError(
                'train.resume = "auto": resumes in the folder train.out, which is not given; give it, or '
                "--out"
            )
        for name, table in (("data", self.data), ("lora", self.lora)):
            source_registry.refuse_keys_of_others(self.model.kind, name, table.values())
        if problem := self.model.source.refusal(self, schedule):
            raise ConfigError(problem)
        self._refuse_fewer_layers_than_stages(schedule)
        self._refuse_empty_or_huge_micro_batches(schedule)
        self._refuse_other_cuts(schedule)
        if self.pipeline.skips_updates and not schedule.synchronous:  # ``Pipeline`` refuses it, too
            raise ConfigError(f"schedule.scheme = {schedule.scheme} {unskippable(self.pipeline)}")
        if self.pipeline.zero_stage and not (schedule.synchronous and self.pipeline.barrier):
            why = "no barrier" if schedule.synchronous else f"no flush in {schedule.scheme}"
            raise ConfigError(  # ``Pipeline`` refuses the same combination
                "pipeline.zero_stage = 1: updated weights are sent when a step ends on all workers, and with "
                f"{why} it does not; use only one of them"
            )
        self._refuse_compressed_sums(schedule)
        self._refuse_mesh(schedule)
        return self

    def but(self, **changed: Mapping[str, Any]) -> RunConfig:
        """A copy with other values of some keys, by section, which are not checked."""
        sections = {name: getattr(self, name).model_copy(update=keys) for name, keys in changed.items()}
        return self.model_copy(update=sections)

    def build_schedule(self) -> Schedule:
        """The schedule of one pipeline group, with recomputations of stages if the config says so; for an
        asynchronous scheme with as many periods as the config says.
        """
        return as_recomputed(self.schedule.built, self.pipeline.recompute)

    @property
    def processes(self) -> int:
        """Number of ranks: workers of all replicas, at all positions of the mesh."""
        return self.build_schedule().workers * self.pipeline.replicas * self.mesh.degrees.positions

    @property
    def sample_shares(self) -> int:
        """Number of groups of ranks that are given ``train.samples`` samples each in a step."""
        return self.pipeline.replicas * self.mesh.dp_shard

    def expect_processes(self, processes: int) -> None:
        """Refuse a number of processes other than workers times replicas times positions of the mesh.

        Args:
            processes: number of processes that were started, as ``torchrun`` or Slurm reports it.

        Raises:
            ConfigError: the number is another; the message says which would be legal.
        """
        workers, replicas = self.build_schedule().workers, self.pipeline.replicas
        needed, positions = self.processes, self.mesh.degrees.positions
        if processes == needed:
            return
        legal, of_replica = f"start {needed}", workers * positions
        if processes % of_replica == 0 and processes:
            legal += f", or set pipeline.replicas to {processes // of_replica}"
        per_worker = f", each on {positions} ranks by [mesh]," if positions > 1 else ""
        raise ConfigError(
            f"{plural(processes, 'process')} {'was' if processes == 1 else 'were'} started, but "
            f"{plural(workers, 'worker')} per replica{per_worker} and "
            f"{replicas} replica{'s' if replicas > 1 else ''} need {needed}: {legal}"
        )

    def results_folder(self, runs: Path = Path("runs")) -> Path:
        """``train.out``, or the first free ``runs/SCHEME-NUMBER``, counted from 1; the folder is not made."""
        if self.train.out is not None:
            return self.train.out
        name = self.schedule.scheme
        if name is None:
            assert self.schedule.file is not None
            name = self.schedule.file.stem
        number = 1
        while (runs / f"{name}-{number}").exists():
            number += 1
        return runs / f"{name}-{number}"

    def to_toml(self) -> str:
        """The resolved config as a TOML file that reads back equal; keys without a value are omitted.

        Raises:
            ConfigError: a path is not Unicode.
        """
        lines = []
        for name in type(self).model_fields:
            section: Section = getattr(self, name)
            if values := section.values():
                lines += ["", f"[{name}]"]
                lines += [
                    f"{key} = {toml.dumps(value)}  # {section.about(key)}" for key, value in values.items()
                ]
        return "\n".join(lines[1:]) + "\n"

    @property
    def copies_in_memory(self) -> bool:
        """True if restarts may resume from copies in memory, in which all holders of a weight are alike."""
        return self.train.memory_every != 0 and self.pipeline.gradient_compression is None

    def _refuse_compressed_sums(self, schedule: Schedule) -> None:
        if self.pipeline.gradient_compression is None:
            return
        for key in ("memory_every", "fewer_after"):
            if getattr(self.train, key):
                raise ConfigError(
                    f"train.{key}: each worker has residuals of its own with pipeline.gradient_compression, "
                    "which only checkpoints keep, for the same workers; leave out one of them"
                )
        why = why_in_full(self.pipeline, schedule.scheme, synchronous=schedule.synchronous)
        if why is not None:  # ``Pipeline`` refuses the same
            raise ConfigError(f"pipeline.{why}")

    def _refuse_mesh(self, schedule: Schedule) -> None:
        mesh = self.mesh
        if mesh.degrees.positions == 1:
            return
        why = mesh.refusal(
            self.pipeline.transport,
            synchronous=schedule.synchronous,
            scheme=schedule.scheme,
        )
        if why is not None:
            raise ConfigError(why)
        if self.train.fewer_after is not None:
            raise ConfigError(
                "train.fewer_after: plans of fewer workers have no [mesh]; leave out one of them"
            )
        for key in ("zero_stage", "gradient_compression"):
            if getattr(self.pipeline, key):
                raise ConfigError(f"pipeline.{key}: cannot be combined with [mesh]; leave out one of them")
        if self.pipeline.max_norm is not None and not schedule.synchronous:
            raise ConfigError(
                f"pipeline.clip_norm: {schedule.scheme} clips each stage by its own norm, of which each "
                "position of [mesh] knows its part; set it to 0, or leave out [mesh]"
            )
        if mesh.tp > 1 and self.lora.rank is not None:
            raise ConfigError("mesh.tp: modules with adapters are not divided; leave out [lora] or mesh.tp")
        if self.model.positions % (2 * mesh.cp) and mesh.cp > 1:
            raise ConfigError(
                f"model.positions = {self.model.positions}: each of the mesh.cp = {mesh.cp} positions has a "
                f"head and a tail of a sequence; give a multiple of {2 * mesh.cp}"
            )

    def _refuse_fewer_layers_than_stages(self, schedule: Schedule) -> None:
        have = self.model.all_layers
        if have < schedule.stages:
            least = max(1, schedule.stages - 2)
            raise ConfigError(
                f"model.layers = {self.model.layers}: with embedding and head the model has "
                f"{plural(have, 'layer')}, "
                "fewer "
                f"than the {plural(schedule.stages, 'stage')} of {schedule.scheme}; give model.layers = "
                f"{least} or "
                f"more, or {plural(have, 'stage')} or fewer"
            )

    def _refuse_empty_micro_batches_of_large_schedules(self) -> None:
        samples, micro_batches = self.train.samples, self.schedule.options().get(MICRO_BATCHES.name)
        if type(micro_batches) is int and micro_batches > max(samples, _MANY_MICRO_BATCHES):
            raise ConfigError(
                f"train.samples = {samples}: cannot be cut into the {micro_batches} micro-batches of "
                f"{self.schedule.scheme}; give train.samples = {micro_batches} or more, or "
                f"schedule.micro_batches = {samples} or fewer"
            )

    def _refuse_empty_or_huge_micro_batches(self, schedule: Schedule) -> None:
        samples, positions = self.train.samples, self.model.positions
        parts = schedule.workload.sample_parts
        least = parts * schedule.micro_batches
        if samples < least:
            halves = f", each in {parts} parts" if parts > 1 else ""
            fewer = 0 if self.schedule.file else samples // parts
            legal = f", or schedule.micro_batches = {fewer} or fewer" if fewer else ""
            raise ConfigError(
                f"train.samples = {samples}: cannot be cut into the {schedule.micro_batches} "
                f"micro-batches of {schedule.scheme}{halves}; give train.samples = {least} or more{legal}"
            )
        if samples * positions > MOST_TOKENS:
            raise ConfigError(
                f"train.samples = {samples}: with model.positions = {positions} a mini-batch would have "
                f"{samples * positions:,} tokens, but at most {MOST_TOKENS:,} fit; "
                "reduce train.samples or model.positions"
            )

    def _refuse_other_cuts(self, schedule: Schedule) -> None:
        cuts, layers = self.pipeline.cuts, self.model.all_layers
        if cuts is None:
            return
        if isinstance(cuts, str):
            try:
                explicit(cuts, layers, schedule.stages)
            except ConfigError as error:
                raise ConfigError(f"pipeline.cuts: {error}") from None
            return
        place = f"pipeline.cuts = {toml.shown(cuts)}"
        if len(cuts) != schedule.stages - 1:
            raise ConfigError(
                f"{place}: {len(cuts)} cuts make {len(cuts) + 1} stages, but {schedule.scheme} has "
                f"{schedule.stages}; give {schedule.stages - 1} cuts"
            )
        if any(begin >= end for begin, end in pairwise((0, *cuts, layers))):
            raise ConfigError(
                f"{place}: must rise from 1 or more to {layers - 1} or less, so that each "
                f"stage has one of the {layers} layers (embedding, blocks, head)"
            )
