"""Check that no layer mutates, in training, what only updates may change: weights, and buffers of copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError

from ..stages.buffers import Contents
from ..stages.stage import LocalStage
from ..transport.base import Group
from .names import Names, named_parameters, shared_names


class InPlaceMutationCheck:
    """Check of a worker's layers for mutations of weights and buffers since these were noted.

    Args:
        stages: the worker's stages.
        names: names of the parameters of all stages.
        groups: group of the workers with copies of a stage, by stage; None: there is one copy.

    Attributes:
        buffer_contents: contents of the noted buffers, by stage with copies.
        mutated_weights: first names of weights that a layer has changed in its forward.
        single_stages: stages that have changed what their copies would not exchange; None: these are refused.
    """

    def __init__(
        self, stages: Mapping[int, LocalStage], names: Names, groups: Mapping[int, Group | None]
    ) -> None:
        self._stages, self._names, self._groups = stages, names, groups
        self.buffer_contents: dict[int, Contents] = {}
        self.mutated_weights: set[str] = set()
        self.single_stages: set[int] | None = None
        self._watched = {
            stage: [parameter for parameter in local_stage.parameters() if not is_dtensor(parameter)]
            for stage, local_stage in stages.items()
        }
        """Parameters of each stage that are not sharded."""
        self._unchanged: dict[int, list[int]] = {}
        """Number of changes of these parameters when they were noted."""

    def record(self) -> None:
        """Record stages that must have one copy, in place of an error: copies of a measurement may differ."""
        self.single_stages = set()

    def note_buffers(self) -> None:
        """Note the contents of buffers of stages with copies, or of all stages while ``record`` applies."""
        records = self.single_stages is not None
        self.buffer_contents = {
            stage: local_stage.buffers.snapshot()
            for stage, local_stage in self._stages.items()
            if (records or self._groups.get(stage) is not None) and local_stage.buffers.places
        }

    def note_parameters(self) -> None:
        """Note the number of changes of the parameters, for ``check`` and ``refuse_overwritten``."""
        for local_stage in self._stages.values():
            if local_stage.versions is not None:
                local_stage.versions.note()
        self._unchanged = {
            stage: [parameter._version for parameter in watched]  # noqa: SLF001 - documented as it
            for stage, watched in self._watched.items()
        }

    def check(self) -> None:
        """Refuse a layer that changed a buffer since ``note_buffers``, or a weight, if its stage has copies.

        Running statistics of batch norms are averaged, and counters added up, unless mini-batches are in
        flight together; for other buffers there is no rule. A buffer whose shape changes is a cache.

        Raises:
            ConfigError: a layer changed one.
        """
        for stage, place, name, full in self._changed_weights():
            group = self._groups.get(stage)
            if self._stages[stage].versions is not None:
                raise ConfigError(
                    f"{place} changes its weight {name!r} in training, and an asynchronous schedule keeps "
                    "several versions of it, of which one would be changed; let only the optimizer change it "
                    "(in a hook after its step, say), or take a synchronous scheme"
                )
            if full in shared_names(self._names):
                raise ConfigError(
                    f"{place} changes its weight {name!r} in training, which is one of other stages too, "
                    "where it would stay; let only the optimizer change it (in a hook after its step, say)"
                )
            if self.single_stages is not None:
                self.single_stages.add(stage)
            elif group is not None:
                raise ConfigError(
                    f"{place} changes its weight {name!r} in training (max_norm of an embedding does), and "
                    f"each of the {len(group.ranks)} copies of stage {stage} would change its own; take a "
                    "scheme with one copy of a stage and one replica, or let only the optimizer change it"
                )
            self.mutated_weights.add(full)
        for stage, index, module, name in self._changed_buffers():
            group = self._groups.get(stage)
            if self.single_stages is not None:
                self.single_stages.add(stage)
            elif group is not None:
                raise ConfigError(
                    f"layer {index} ({type(module).__name__}) changes its buffer {name!r} in "
                    f"training, and each of the {len(group.ranks)} copies of stage {stage} would change its "
                    "own; take a scheme with one copy of a stage and one replica, let training keep the "
                    "buffer, or declare a counter with counterflow.sum_over_copies (in synchronous schemes)"
                )

    def refuse_overwritten(self) -> None:
        """Refuse a layer that changed a weight in its forward, after an error of autograd.

        Raises:
            ConfigError: a layer changed one.
        """
        for _, place, name, _ in self._changed_weights():
            raise ConfigError(
                f"{place} changes its weight {name!r} in training, and the backwards of the micro-batches "
                "before need it as it was; let only the optimizer change it (in a hook after its step, say)"
            )

    def _changed_buffers(self) -> Iterator[tuple[int, int, nn.Module, str]]:
        for stage, before in self.buffer_contents.items():
            local_stage = self._stages[stage]
            current = local_stage.buffers.snapshot()
            counters = local_stage.buffers.summed if local_stage.versions is None else ()
            for number, (old, new) in enumerate(zip(before, current, strict=True)):
                if number in counters or old is new or old is None or new is None:
                    continue
                if old.shape != new.shape or old.equal(new):
                    continue
                module, name = local_stage.buffers.places[number]
                layer = next(x for x in local_stage.with_weights if module in set(x.module.modules()))
                yield stage, layer.index, layer.module, name

    def _changed_weights(self) -> Iterator[tuple[int, str, str, str]]:
        for stage, noted in self._unchanged.items():
            for changed in self._changed_parameters(stage, noted):
                firsts = {id(p): n for n, p in named_parameters(self._stages[stage], self._names).items()}
                for layer in self._stages[stage].with_weights:
                    place = f"layer {layer.index} ({type(layer.module).__name__})"
                    for name, parameter in layer.module.named_parameters():
                        if parameter is changed:
                            yield stage, place, name, firsts[id(changed)]

    def _changed_parameters(self, stage: int, noted: Sequence[int]) -> list[nn.Parameter]:
        versions, watched = self._stages[stage].versions, self._watched[stage]
        swapped = set() if versions is None else versions.swapped
        overwritten = [] if versions is None else [p for p in versions.overwritten() if not is_dtensor(p)]
        pairs = zip(watched, noted, strict=True)
        return overwritten + [p for p, count in pairs if id(p) not in swapped and p._version != count]  # noqa: SLF001
