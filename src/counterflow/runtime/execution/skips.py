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
from counterflow.schedule.ir import Op, SkipLink

from ..messages.message_queue import MessageQueue
from ..messages.values import Structure, Unit, ValueLayout, put_together, take_apart
from ..mini_batch.batch import Batch
from ..stages.skip_links import StageSkips
from ..stages.skips import Carried
from .routes import Gradients, Piece, SkipRoute

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
    """A value that is sent once a step: the value as it was passed on, and its contents at that time."""

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


@dataclass(frozen=True, slots=True)
class Once:
    """What a worker's stages make once in a mini-batch, or have of others, by link, pipe and slot."""

    made: dict[tuple[SkipLink, int, int], _SentOnce | None] = field(default_factory=dict)
    received: dict[tuple[SkipLink, int, int], Any] = field(default_factory=dict)


class OpSkips:
    """Inputs and outputs of one op by skip connections.

    Args:
        op: the op.
        units: units that it runs on.
        takes: routes of its inputs; of a backward, of gradients.
        gives: routes of its outputs.
        skips: skip connections of its stage.
        once: the worker's values that are made once in a mini-batch.
        messages: message queue of the worker.
    """

    def __init__(
        self,
        op: Op,
        units: Sequence[Unit],
        takes: Sequence[SkipRoute],
        gives: Sequence[SkipRoute],
        *,
        skips: StageSkips | None,
        once: Once,
        messages: MessageQueue,
    ) -> None:
        self.op, self.units, self.takes, self.gives = op, units, takes, gives
        self._skips, self._once, self._messages = skips, once, messages

    # -- forwards

    def give(self, batch: Batch, outputs: Sequence[Output]) -> list[Piece]:
        """Send the values of skip connections; the remaining outputs go to the next stage."""
        by_unit = [_split(output) for output in outputs]
        for place, its in enumerate((each for each in self.gives if not each.link.once), 1):
            self._give(batch, its, self.units, [parts[place] for parts in by_unit])
        return [parts[0] for parts in by_unit]

    @staticmethod
    def _give(batch: Batch, its: SkipRoute, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        assert its.route is not None
        its.route.give(units, pieces)
        if batch.known is None:
            for unit, piece in zip(units, pieces, strict=True):
                batch.learnt[its.link, unit.shape] = ValueLayout.of(*piece)

    def give_once(self, batch: Batch, unit: Unit, held: Any) -> None:
        """Pass on a value that is made once, with the first op that makes it; later ops must make it equally.

        Args:
            batch: the mini-batch.
            unit: unit that was computed.
            held: value that was saved; None: the unit has no samples.

        Raises:
            ConfigError: the value differs between micro-batches.
        """
        assert self._skips is not None
        stage, made_once = self.op.stage, self._once.made
        for (link, numbers), its in zip(self._skips.gives, self.gives, strict=False):  # then come states
            if not link.once:
                continue
            key = link, self.op.pipe, unit.slot
            value = None if held is None else {n: held[n] for n in numbers}
            structure, tensors = take_apart(value, f"stage {stage}")
            if its.first and unit is self.units[0]:
                made_once[key] = None
            made = made_once[key]
            if not its.first or made is not None:
                if value is not None and made is None:
                    raise ConfigError(_NO_SAMPLES.format(link.source))
                if value is not None and made is not None and not made.is_same(structure, tensors):
                    raise ConfigError(
                        f"stage {stage} saves in a Skip with once=True something else for micro-batch "
                        f"{unit.micro_batch} than for the first one of the step; leave out once=True"
                    )
                continue
            if value is not None:
                versions = [tensor._version for tensor in tensors]  # noqa: SLF001
                made_once[key] = _SentOnce(structure, tensors, versions, [t.clone() for t in tensors])
            if its.route is None:
                self._once.received[key] = value
            else:
                self._give(batch, its, self.units[:1], [(structure, tensors)])

    def take(self, batch: Batch, leaf: Callable[[Tensor], Tensor]) -> list[Came]:
        """What comes by skips, by unit, as leaves."""
        found = [Came() for _ in self.units]
        for its in self.takes:
            if its.link.once:
                value = self._taken_once(its)
                for one, rows in zip(found, map(batch.rows.__getitem__, self.units), strict=True):
                    if value is None and rows.start != rows.stop and not batch.guarded:
                        raise ConfigError(_NO_SAMPLES.format(its.link.source))
                    one.skips.update(value or {})
                continue
            assert its.route is not None
            taken = its.route.take(self.units, leaf, as_leaves=batch.training)
            for one, (structure, tensors, buffers) in zip(found, taken, strict=True):
                one.skips.update(put_together(structure, tensors) or {})
                one.tensors += tensors
                one.buffers += buffers
                one.gradients.append(sum(tensor.requires_grad for tensor in tensors))
        return found

    def _taken_once(self, its: SkipRoute) -> Any:
        key = its.link, self.op.pipe, self.units[0].slot
        if its.route is not None:
            ((structure, tensors, buffers),) = its.route.take(self.units[:1], _itself, as_leaves=False)
            self._messages.give_back(buffers)  # they are used again when nobody has their memory
            self._once.received[key] = put_together(structure, tensors)
        return self._once.received[key]

    # -- backwards

    def take_gradients(self) -> Gradients:
        """The gradients of what a unit gave by skips, and the buffers they are in."""
        found: list[Tensor | None] = []
        reused: list[Tensor] = []
        for its in self.takes:
            assert its.route is not None
            tensors, buffers = its.route.take_gradients(self.units[0])
            found += tensors
            reused += buffers
        return found, reused

    def give_gradients(self, found: list[Tensor | None], counts: Sequence[int]) -> list[Tensor | None]:
        """Pass on the gradients of skip connections; the remaining ones are of the stage's input.

        Args:
            found: gradients of all inputs of the unit.
            counts: number of them by link; empty if the unit has no samples.
        """
        at = len(found) - sum(counts)
        rest = found[:at]
        for place, its in enumerate(self.gives):
            assert its.route is not None
            count = counts[place] if counts else 0
            its.route.give_gradients(self.units[0], found[at : at + count])
            at += count
        return rest


def apart(skips: StageSkips, output: Carried | None, place: str, *, ends: bool) -> Output:
    """A stage's output taken apart, without what is made once; of None (no samples) as much of None.

    Args:
        skips: of the stage.
        output: of the stage.
        place: the stage, for messages.
        ends: whether no slice comes after, so that its state goes nowhere.
    """
    links = [numbers for link, numbers in skips.gives if not link.once]
    links += [skips.carries] if skips.carries and not ends else []
    alone = not links and not skips.gives
    if output is None:
        return take_apart(None, place) if alone else _joined([take_apart(None, place)] * (1 + len(links)))
    value, held = output
    first = Carried(value, {n: held[n] for n in skips.next}) if skips.next else value
    if alone:
        return take_apart(first, place)
    by_skips = (take_apart({n: held[n] for n in numbers}, place) for numbers in links)
    return _joined([take_apart(first, place), *by_skips])


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _joined(found: Sequence[Piece]) -> Output:
    parts = Parts(tuple((structure, len(tensors)) for structure, tensors in found))
    return parts, [tensor for _, tensors in found for tensor in tensors]


def _split(output: Output) -> list[Piece]:
    parts, tensors = output
    assert isinstance(parts, Parts)
    found = []
    at = 0
    for structure, count in parts.each:
        found.append((structure, tensors[at : at + count]))
        at += count
    return found
