"""A training run as data: the tables of a config together.

Invariant: a ``RunConfig`` that exists is one that can start: its schedule builds, its model has a layer
for every stage, its samples fill every micro-batch. What a key means is said in its table (``sections``).
Reading files and wording errors is ``load.py``'s business; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from counterflow import toml
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from . import registry
from .sections.keys import AUTO, Section
from .sections.model import DataSection, LoraSection, ModelSection
from .sections.pipeline import PipelineSection
from .sections.schedule import ScheduleSection
from .sections.training import MOST_TOKENS, OptimizerSection, PlanSection, TrainSection

_MOST_WARMUP = 2000


class RunConfig(Section):
    r"""A training run. Without arguments it is the built-in example.

    What is wrong is pydantic's ``ValidationError`` here, and a ``ConfigError`` in ``load_config``.

    >>> config = RunConfig()
    >>> str(config.build_schedule())
    'chimera(stages=4, micro_batches=8, pairs=1, concat=direct)'
    >>> print(*config.to_toml().splitlines()[:2], sep="\n")
    [model]
    kind = "gpt"  # architecture, or the name of a model
    """

    model: ModelSection = Field(default_factory=ModelSection, description="what is trained")
    data: DataSection = Field(default_factory=DataSection, description="what it is trained on")
    lora: LoraSection = Field(default_factory=LoraSection, description="adapters in place of its weights")
    schedule: ScheduleSection = Field(default_factory=ScheduleSection, description="in which order")
    pipeline: PipelineSection = Field(default_factory=PipelineSection, description="how it is executed")
    optimizer: OptimizerSection = Field(
        default_factory=OptimizerSection, description="how weights are updated"
    )
    train: TrainSection = Field(default_factory=TrainSection, description="for how long")
    plan: PlanSection = Field(default_factory=PlanSection, description="what was expected of it")

    @model_validator(mode="after")
    def _fill(self) -> RunConfig:
        """The keys whose defaults follow from other sections."""
        usual = {
            "learning_rate": self.model.source.learning_rate(self),
            "warmup_steps": min(_MOST_WARMUP, self.train.steps // 4),
        }
        missing = {name: value for name, value in usual.items() if getattr(self.optimizer, name) is None}
        object.__setattr__(self, "optimizer", self.optimizer.model_copy(update=missing))
        return self

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        schedule = self.build_schedule()
        for problem in (
            self._nowhere_to_resume(),
            self._keys_of_other_models() or self.model.source.refusal(self, schedule),
            self._layers_missing(schedule),
            self._samples_missing(schedule),
            self._too_many_tokens(),
            self._cuts(schedule),
            self._not_sharded(schedule),
        ):
            if problem:
                raise ConfigError(problem)
        return self

    def but(self, **changed: Mapping[str, Any]) -> RunConfig:
        """The same with other values of some keys, by section, which are not checked."""
        sections = {name: getattr(self, name).model_copy(update=keys) for name, keys in changed.items()}
        return self.model_copy(update=sections)

    def build_schedule(self) -> Schedule:
        """The schedule of one pipeline group; of an asynchronous scheme as many periods as it says."""
        return self.schedule.built

    @property
    def processes(self) -> int:
        """Workers of all replicas."""
        return self.build_schedule().workers * self.pipeline.replicas

    def expect_processes(self, processes: int) -> None:
        """Refuse a number of processes that is not workers times replicas.

        Args:
            processes: how many were started, as ``torchrun`` or Slurm tells.

        Raises:
            ConfigError: it is another number; the message says which would be legal.
        """
        workers, replicas = self.build_schedule().workers, self.pipeline.replicas
        needed = workers * replicas
        if processes == needed:
            return
        legal = f"start {needed}"
        if processes % workers == 0 and processes:
            legal += f", or set pipeline.replicas to {processes // workers}"
        raise ConfigError(
            f"{processes} processes were started, but {workers} workers a replica and {replicas} "
            f"replica{'s' if replicas > 1 else ''} need {needed}: {legal}"
        )

    def results_folder(self, runs: Path = Path("runs")) -> Path:
        """``train.out``, or the first ``runs/SCHEME-NUMBER`` that is free, counted from 1; not made."""
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
        """The resolved config as a TOML file that reads back equal; what has no value is left out.

        Raises:
            ConfigError: a path is not Unicode.
        """
        return "\n".join(self._lines()).lstrip("\n") + "\n"

    def _lines(self) -> Iterator[str]:
        for name in type(self).model_fields:
            section: Section = getattr(self, name)
            given = section.given()
            if not given:
                continue
            yield f"\n[{name}]"
            for key, value in given.items():
                yield f"{key} = {toml.dumps(value)}  # {section.about(key)}"

    def _not_sharded(self, schedule: Schedule) -> str | None:
        """What is wrong if optimiser state cannot be sharded; ``Pipeline`` refuses the same."""
        if not self.pipeline.zero_stage or (schedule.synchronous and self.pipeline.barrier):
            return None
        why = "no barrier" if schedule.synchronous else f"no flush in {schedule.scheme}"
        return (
            f"pipeline.zero_stage = 1: updated weights are sent when a step ends on all workers, and with "
            f"{why} it does not; leave one of them out"
        )

    def _nowhere_to_resume(self) -> str | None:
        """What is wrong if a run is to go on in a folder that nobody names."""
        if self.train.resume == AUTO and self.train.out is None:
            return 'train.resume = "auto": goes on in the folder train.out; give it, or --out'
        return None

    def _keys_of_other_models(self) -> str | None:
        """What is wrong if a key is for models that come from elsewhere."""
        for name, table in (("data", self.data), ("lora", self.lora)):
            others = registry.keys_of_others(self.model.source, name)
            for key in table.given():
                if key in others:
                    only = f'is for model.kind = "{others[key]}"'
                    return f"{name}.{key}: {only}; leave it out, or set model.kind so"
        return None

    def _layers_missing(self, schedule: Schedule) -> str | None:
        """What is wrong if there are fewer layers than stages."""
        have = self.model.all_layers
        if have >= schedule.stages:
            return None
        least = max(1, schedule.stages - 2)
        return (
            f"model.layers = {self.model.layers}: with embedding and head these are {have} layers, fewer "
            f"than the {schedule.stages} stages of {schedule.scheme}; give model.layers = {least} or more, "
            f"or {have} stages or fewer"
        )

    def _samples_missing(self, schedule: Schedule) -> str | None:
        """What is wrong if a micro-batch, or a half of one, would have no sample."""
        parts = max((op.parts for op in schedule.ops()), default=1)
        least = parts * schedule.micro_batches
        if self.train.samples >= least:
            return None
        halves = f", each in {parts} parts" if parts > 1 else ""
        fewer = 0 if self.schedule.file else self.train.samples // parts
        legal = f", or schedule.micro_batches = {fewer} or fewer" if fewer else ""
        return (
            f"train.samples = {self.train.samples}: cannot be cut into the {schedule.micro_batches} "
            f"micro-batches of {schedule.scheme}{halves}; give train.samples = {least} or more{legal}"
        )

    def _too_many_tokens(self) -> str | None:
        """What is wrong if a mini-batch would not fit into any memory."""
        samples, positions = self.train.samples, self.model.positions
        if samples * positions <= MOST_TOKENS:
            return None
        return (
            f"train.samples = {samples}: with model.positions = {positions} a mini-batch would have "
            f"{samples * positions:,} tokens, and at most {MOST_TOKENS:,} fit; "
            "reduce train.samples or model.positions"
        )

    def _cuts(self, schedule: Schedule) -> str | None:
        """What is wrong if the cuts do not make the stages."""
        cuts = self.pipeline.cuts
        if cuts is None:
            return None
        place = f"pipeline.cuts = {toml.shown(cuts)}"
        if len(cuts) != schedule.stages - 1:
            return (
                f"{place}: {len(cuts)} cuts make {len(cuts) + 1} stages, but {schedule.scheme} has "
                f"{schedule.stages}; give {schedule.stages - 1} cuts"
            )
        bounds = (0, *cuts, self.model.all_layers)
        if any(begin >= end for begin, end in pairwise(bounds)):
            return (
                f"{place}: must rise from 1 or more to {self.model.all_layers - 1} or less, so that each "
                f"stage has one of the {self.model.all_layers} layers (embedding, blocks, head)"
            )
        return None
