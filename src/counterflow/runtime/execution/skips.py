"""What goes by skips between the stages of a worker and those of others, beside inputs and outputs.

Invariant: of a stage's tensors, those of the output come first and then those of each link, ascending; so in
outputs, in inputs and in the gradients of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.program.actions import Compute
from counterflow.schedule.ir import SkipLink

from ..messages.arrivals import Taken
from ..messages.message_queue import MessageQueue
from ..messages.values import Structure, Unit, ValueLayout, put_together, take_apart
from ..mini_batch.batch import Batch
from ..stages.skips import Carried, StageSkips
from .tasks import HERE, Task

_NO_SAMPLES = (
    "stage {} makes a Skip with once=True with a micro-batch that has no samples; give every micro-batch "
    "some, or leave out once=True"
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A stage's output and what goes by each link: structure and number of tensors of each."""

    each: tuple[tuple[Structure | None, int], ...]


Output = tuple[Structure | Parts | None, list[Tensor]]
"""A stage's output for a unit, taken apart."""


@dataclass(slots=True)
class Came:
    """What came by skips for a unit.

    Attributes:
        skips: by number.
        tensors: all of them.
        buffers: of the pool, in which they are.
        gradients: of each link, how many tensors have a gradient.
    """

    skips: dict[int, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _SentOnce:
    """What is made once: as it was handed on, and its contents then."""

    structure: Structure | None
    tensors: list[Tensor]
    versions: list[int]
    contents: list[Tensor]

    def is_same(self, structure: Structure | None, tensors: Sequence[Tensor]) -> bool:
        """Whether another micro-batch's is the same; nothing is read where it is the very same tensor."""
        if structure != self.structure or len(tensors) != len(self.tensors):
            return False
        for new, old, version, content in zip(
            tensors, self.tensors, self.versions, self.contents, strict=True
        ):
            if new is old and new._version == version:  # noqa: SLF001
                continue
            if new.dtype is not content.dtype or not torch.equal(new, content):
                return False
        return True


class SkipTraffic:
    """One worker's skips that are in flight.

    Args:
        messages: the worker's.
    """

    def __init__(self, messages: MessageQueue) -> None:
        self._messages = messages
        self._handed: dict[tuple[SkipLink, Unit], tuple[Structure | None, list[Tensor]]] = {}
        self._gradients: dict[tuple[SkipLink, Unit], list[Tensor | None]] = {}
        self._made_once: dict[tuple[SkipLink, int, int], _SentOnce | None] = {}
        self._come_once: dict[tuple[SkipLink, int, int], Any] = {}

    # -- forwards

    def apart(self, skips: StageSkips, output: Carried | None, place: str) -> Output:
        """A stage's output taken apart, without what is made once; of None (no samples) as much of None."""
        links = [numbers for link, numbers in skips.gives if not link.once]
        if output is None:
            return _joined([take_apart(None, place) for _ in range(1 + len(links))])
        value, held = output
        first = Carried(value, {n: held[n] for n in skips.next}) if skips.next else value
        by_skips = (take_apart({n: held[n] for n in numbers}, place) for numbers in links)
        return _joined([take_apart(first, place), *by_skips])

    def give(
        self, task: Task, batch: Batch, outputs: Sequence[Output]
    ) -> list[tuple[Structure | None, list[Tensor]]]:
        """Hand on what goes by links; what is left goes to the next stage."""
        by_unit = [_split(output) for output in outputs]
        links = [(link, number) for link, number in task.gives if not link.once]
        for place, (link, number) in enumerate(links, 1):
            pieces = [parts[place] for parts in by_unit]
            if number is not None and number >= 0:
                flat = [tensor for _, tensors in pieces for tensor in tensors]
                self._messages.put(number, flat, [(structure, len(tensors)) for structure, tensors in pieces])
            for unit, piece in zip(task.units, pieces, strict=True):
                if batch.known is None:
                    batch.learnt[link, unit.shape] = ValueLayout.of(*piece)
                if number == HERE:
                    self._handed[link, unit] = piece
        return [parts[0] for parts in by_unit]

    def give_once(self, task: Task, skips: StageSkips, batch: Batch, unit: Unit, held: Any) -> None:
        """Hand on what is made once, with the first op that makes it; later ones have to make the same.

        Args:
            task: the op.
            skips: of its stage.
            batch: its mini-batch.
            unit: what was computed.
            held: what was saved; None: it has no samples.

        Raises:
            ConfigError: it differs from one micro-batch to another.
        """
        for (link, numbers), (_, number) in zip(skips.gives, task.gives, strict=True):
            if not link.once:
                continue
            assert isinstance(task.action, Compute)
            key = link, task.action.op.pipe, unit.slot
            value = None if held is None else {n: held[n] for n in numbers}
            structure, tensors = take_apart(value, f"stage {task.stage}")
            first = task.units[0]
            if number is not None and unit is first:
                self._made_once[key] = None
            made = self._made_once[key]
            if number is None or made is not None:
                if value is not None and made is None:
                    raise ConfigError(_NO_SAMPLES.format(link.source))
                if value is not None and made is not None and not made.is_same(structure, tensors):
                    raise ConfigError(
                        f"stage {task.stage} saves in a Skip with once=True something else for micro-batch "
                        f"{unit.micro_batch} than for the first one of the step; leave out once=True"
                    )
                continue
            if value is not None:
                versions = [tensor._version for tensor in tensors]  # noqa: SLF001
                self._made_once[key] = _SentOnce(structure, tensors, versions, [t.clone() for t in tensors])
            if number == HERE:
                self._come_once[key] = value
                continue
            if batch.known is None:
                batch.learnt[link, first.shape] = ValueLayout.of(structure, tensors)
            self._messages.put(number, tensors, [(structure, len(tensors))])

    def take(self, task: Task, batch: Batch, leaf: Callable[[Tensor], Tensor]) -> list[Came]:
        """What comes by skips, by unit, as leaves."""
        found = [Came() for _ in task.units]
        for link, number in task.takes:
            if link.once:
                value = self._taken_once(task, link, number)
                for one, rows in zip(found, map(batch.rows.__getitem__, task.units), strict=True):
                    if value is None and rows.start != rows.stop:
                        raise ConfigError(_NO_SAMPLES.format(link.source))
                    one.skips.update(value or {})
                continue
            for one, (structure, tensors, buffers) in zip(
                found, self._taken(task, batch, link, number, leaf), strict=True
            ):
                one.skips.update(put_together(structure, tensors) or {})
                one.tensors += tensors
                one.buffers += buffers
                one.gradients.append(sum(tensor.requires_grad for tensor in tensors))
        return found

    def _taken(
        self, task: Task, batch: Batch, link: SkipLink, number: int | None, leaf: Callable[[Tensor], Tensor]
    ) -> list[Taken]:
        assert number is not None
        if number == HERE:
            handed = [self._handed.pop((link, unit)) for unit in task.units]
            return [(structure, [leaf(tensor) for tensor in tensors], ()) for structure, tensors in handed]
        return self._messages.take(number, len(task.units), as_leaves=batch.training)

    def _taken_once(self, task: Task, link: SkipLink, number: int | None) -> Any:
        assert isinstance(task.action, Compute)
        key = link, task.action.op.pipe, task.slot
        if number is not None:
            ((structure, tensors, buffers),) = self._messages.take(number, 1)
            self._messages.give_back(buffers)  # they are used again when nobody has their memory
            self._come_once[key] = put_together(structure, tensors)
        return self._come_once[key]

    # -- backwards

    def take_gradients(self, task: Task) -> tuple[list[Tensor | None], list[Tensor]]:
        """The gradients of what a unit gave by skips, and the buffers they are in."""
        found: list[Tensor | None] = []
        reused: list[Tensor] = []
        for link, number in task.takes:
            if number == HERE:
                found += self._gradients.pop((link, task.units[0]))
            elif number is not None:
                tensors, buffers = self._messages.take_gradients(number)
                found += tensors
                reused += buffers
        return found, reused

    def give_gradients(
        self, task: Task, found: list[Tensor | None], counts: Sequence[int]
    ) -> list[Tensor | None]:
        """Hand on the gradients of what came by skips; what is left is that of the stage's input.

        Args:
            task: the op.
            found: of all that the unit took.
            counts: how many of them are each link's; none where the unit has no samples.
        """
        at = len(found) - sum(counts)
        rest = found[:at]
        for place, (link, number) in enumerate(task.gives):
            count = counts[place] if counts else 0
            its, at = found[at : at + count], at + count
            if number == HERE:
                self._gradients[link, task.units[0]] = its
            elif number is not None:
                self._messages.put(number, its)
        return rest


def _joined(found: Sequence[tuple[Structure | None, list[Tensor]]]) -> Output:
    parts = Parts(tuple((structure, len(tensors)) for structure, tensors in found))
    return parts, [tensor for _, tensors in found for tensor in tensors]


def _split(output: Output) -> list[tuple[Structure | None, list[Tensor]]]:
    parts, tensors = output
    assert isinstance(parts, Parts)
    found = []
    at = 0
    for structure, count in parts.each:
        found.append((structure, tensors[at : at + count]))
        at += count
    return found
