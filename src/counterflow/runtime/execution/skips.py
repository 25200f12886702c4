"""Skip connections between the stages of a worker and those of others, beside inputs and outputs.

Invariant: of a stage's tensors, those of the output come first and then those of each link, ascending; so in
outputs, in inputs and in the gradients of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from counterflow.api.skip import Carried
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, SkipLink

from ..messages.message_queue import MessageQueue
from ..messages.values import Structure, Unit, ValueLayout, flatten_value, unflatten_value
from ..mini_batch.batch import Batch
from ..stages.skip_links import StageSkips
from .routes import Gradients, Piece, SkipRoute

_NO_SAMPLES = (
    "stage {} makes a Skip with once=True with a micro-batch that has no samples; give every micro-batch "
    "some, or leave out once=True"
)


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Layout of a stage's output and of its values by link: structure and number of tensors of each."""

    pieces: tuple[tuple[Structure | None, int], ...]


Output = tuple[Structure | OutputLayout | None, list[Tensor]]
"""A stage's output for a unit, taken apart."""


@dataclass(slots=True)
class SkipInputs:
    """Values of one unit that were received by skip connections.

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
    structure: Structure | None
    tensors: list[Tensor]
    versions: list[int]
    contents: list[Tensor]

    def is_same(self, structure: Structure | None, tensors: Sequence[Tensor]) -> bool:
        """True if the value of another micro-batch is the same; the same tensor is not read."""
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
class StepConstants:
    """Values that a worker's stages make, or receive, once in a mini-batch: by link, pipe and slot."""

    sent: dict[tuple[SkipLink, int, int], _SentOnce | None] = field(default_factory=dict)
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
        once: StepConstants,
        messages: MessageQueue,
    ) -> None:
        self.op, self.units, self.takes, self.gives = op, units, takes, gives
        self._skips, self._once, self._messages = skips, once, messages

    # -- forwards

    def send(self, batch: Batch, outputs: Sequence[Output]) -> list[Piece]:
        """Send the values of skip connections; the remaining outputs go to the next stage."""
        by_unit = [_split(output) for output in outputs]
        for place, route in enumerate((route for route in self.gives if not route.link.once), 1):
            self._send(batch, route, self.units, [parts[place] for parts in by_unit])
        return [parts[0] for parts in by_unit]

    @staticmethod
    def _send(batch: Batch, route: SkipRoute, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        assert route.route is not None
        route.route.send(units, pieces)
        if batch.known is None:
            for unit, piece in zip(units, pieces, strict=True):
                batch.learnt[route.link, unit.shape] = ValueLayout.of(*piece)

    def send_once(self, batch: Batch, unit: Unit, skips: Any) -> None:
        """Pass on a value that is made once, with the first op that makes it; later ops must make it equally.

        Args:
            batch: the mini-batch.
            unit: unit that was computed.
            skips: values that were saved, by number; None: the unit has no samples.

        Raises:
            ConfigError: the value differs between micro-batches.
        """
        assert self._skips is not None
        stage, sent_once = self.op.stage, self._once.sent
        for (link, numbers), route in zip(self._skips.gives, self.gives, strict=False):  # then come states
            if not link.once:
                continue
            key = link, self.op.pipe, unit.slot
            value = None if skips is None else {n: skips[n] for n in numbers}
            structure, tensors = flatten_value(value, f"stage {stage}")
            if route.first and unit is self.units[0]:
                sent_once[key] = None
            sent = sent_once[key]
            if not route.first or sent is not None:
                if value is not None and sent is None:
                    raise ConfigError(_NO_SAMPLES.format(link.source))
                if value is not None and sent is not None and not sent.is_same(structure, tensors):
                    raise ConfigError(
                        f"stage {stage} saves in a Skip with once=True something else for micro-batch "
                        f"{unit.micro_batch} than for the first one of the step; leave out once=True"
                    )
                continue
            if value is not None:
                versions = [tensor._version for tensor in tensors]  # noqa: SLF001
                sent_once[key] = _SentOnce(structure, tensors, versions, [t.clone() for t in tensors])
            if route.route is None:
                self._once.received[key] = value
            else:
                self._send(batch, route, self.units[:1], [(structure, tensors)])

    def receive(self, batch: Batch, leaf: Callable[[Tensor], Tensor]) -> list[SkipInputs]:
        """Receive the values of skip connections, by unit, as leaves."""
        received = [SkipInputs() for _ in self.units]
        for route in self.takes:
            if route.link.once:
                value = self._receive_once(route)
                for skip_inputs, rows in zip(received, map(batch.rows.__getitem__, self.units), strict=True):
                    if value is None and rows.start != rows.stop and not batch.guarded:
                        raise ConfigError(_NO_SAMPLES.format(route.link.source))
                    skip_inputs.skips.update(value or {})
                continue
            assert route.route is not None
            values = route.route.receive(self.units, leaf, as_leaves=batch.training)
            for skip_inputs, (structure, tensors, buffers) in zip(received, values, strict=True):
                skip_inputs.skips.update(unflatten_value(structure, tensors) or {})
                skip_inputs.tensors += tensors
                skip_inputs.buffers += buffers
                skip_inputs.gradients.append(sum(tensor.requires_grad for tensor in tensors))
        return received

    def _receive_once(self, route: SkipRoute) -> Any:
        key = route.link, self.op.pipe, self.units[0].slot
        if route.route is not None:
            ((structure, tensors, buffers),) = route.route.receive(self.units[:1], _itself, as_leaves=False)
            self._messages.return_buffers(buffers)  # they are used again when nobody has their memory
            self._once.received[key] = unflatten_value(structure, tensors)
        return self._once.received[key]

    # -- backwards

    def receive_gradients(self) -> Gradients:
        """Receive the gradients of values that a unit sent by skip connections, and their buffers."""
        gradients: list[Tensor | None] = []
        reused: list[Tensor] = []
        for route in self.takes:
            assert route.route is not None
            tensors, buffers = route.route.receive_gradients(self.units[0])
            gradients += tensors
            reused += buffers
        return gradients, reused

    def send_gradients(self, gradients: list[Tensor | None], counts: Sequence[int]) -> list[Tensor | None]:
        """Pass on the gradients of skip connections; the remaining ones are of the stage's input.

        Args:
            gradients: gradients of all inputs of the unit.
            counts: number of them by link; empty if the unit has no samples.
        """
        at = len(gradients) - sum(counts)
        rest = gradients[:at]
        for place, route in enumerate(self.gives):
            assert route.route is not None
            count = counts[place] if counts else 0
            route.route.send_gradients(self.units[0], gradients[at : at + count])
            at += count
        return rest


def output_parts(links_of_stage: StageSkips, output: Carried | None, place: str, *, ends: bool) -> Output:
    """Take a stage's output apart, without values that are made once; None (no samples) has the same layout.

    Args:
        links_of_stage: skip connections of the stage.
        output: output of the stage.
        place: the stage, for messages.
        ends: True if no slice comes after, so that no state is passed on.
    """
    links = [numbers for link, numbers in links_of_stage.gives if not link.once]
    links += [links_of_stage.carries] if links_of_stage.carries and not ends else []
    plain = not links and not links_of_stage.gives
    if output is None:
        return (
            flatten_value(None, place) if plain else _joined([flatten_value(None, place)] * (1 + len(links)))
        )
    value, skips = output
    first = Carried(value, {n: skips[n] for n in links_of_stage.next}) if links_of_stage.next else value
    if plain:
        return flatten_value(first, place)
    by_skips = (flatten_value({n: skips[n] for n in numbers}, place) for numbers in links)
    return _joined([flatten_value(first, place), *by_skips])


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _joined(pieces: Sequence[Piece]) -> Output:
    parts = OutputLayout(tuple((structure, len(tensors)) for structure, tensors in pieces))
    return parts, [tensor for _, tensors in pieces for tensor in tensors]


def _split(output: Output) -> list[Piece]:
    parts, tensors = output
    assert isinstance(parts, OutputLayout)
    pieces = []
    at = 0
    for structure, count in parts.pieces:
        pieces.append((structure, tensors[at : at + count]))
        at += count
    return pieces
