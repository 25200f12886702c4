"""A worker's actions, ready to be run: a small class a kind, with all that can be looked up before a step.

What ops do is in ``forwards.py`` and ``backwards.py``. Another kind of op needs a subclass of ``RunOp`` and a
row in the table of ``interpreter.py``.

Invariant: a task does what its action names and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from counterflow.program.actions import Action, Compute, Message

from ..mini_batch.batch import Batch
from ..stages.stage import LocalStage
from .addresses import Addresses
from .in_flight import InFlight
from .outputs import Outputs
from .skips import OpSkips


class ActionTask(ABC):
    """An action, ready to be run.

    Args:
        action: what it does.
    """

    def __init__(self, action: Action) -> None:
        self.action = action

    @abstractmethod
    def run(self) -> None:
        """Do it."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Objects that all tasks of a worker use.

    Attributes:
        in_flight: what is in flight.
        outputs: what becomes of the outputs of stages.
        addresses: where ops take from and give to.
        stages: the worker's, by number.
    """

    in_flight: InFlight
    outputs: Outputs
    addresses: Addresses
    stages: Mapping[int, LocalStage]


class RunOp(ActionTask):
    """An op: it receives its input, computes, and publishes its result.

    The clock times ``compute``. ``receive`` may wait for a message; ``publish`` queues, and the next
    ``SendTask`` posts.

    Args:
        action: what it does.
        tools: the worker's.
        period_offset: how many periods later than it says it is going to run.
    """

    def __init__(self, action: Compute, tools: Tools, period_offset: int) -> None:
        super().__init__(action)
        op = self.op = action.op
        self.stage = op.stage
        self.local_stage = tools.stages[op.stage]
        self.units = tools.addresses.units(op, period_offset)
        self.slot = self.units[0].slot
        addresses, in_flight, skips = tools.addresses, tools.in_flight, self.local_stage.skips
        takes, gives = addresses.by_skips(op, period_offset)
        if skips is not None and skips.carries:
            states_in, states_out = addresses.carried(op)
            takes, gives = [*takes, *states_in], [*gives, *states_out]
        self.splits = addresses.splits(op)
        """Whether a backward of what the op runs on is two ops."""
        self.source = addresses.source(op, period_offset)
        self.target = addresses.target(op, period_offset)
        self.skips = OpSkips(
            op,
            self.units,
            takes,
            gives,
            skips=skips,
            once=in_flight.once,
            messages=in_flight.messages,
        )
        self.in_flight, self._outputs = in_flight, tools.outputs
        self._transport, self._clock = in_flight.transport, in_flight.clock

    @override
    def run(self) -> None:
        in_flight, transport, clock, op = self.in_flight, self._transport, self._clock, self.op
        transport.stay_near()
        if in_flight.ended:
            in_flight.end_ops()  # work that has time until an op runs
        batch = in_flight.batches[self.slot]
        inputs = self.receive(batch)
        begin, versions = clock.begin(), self.local_stage.versions
        if versions is not None and batch.training:
            versions.use(op.version + in_flight.period_offset)
        result = self.compute(batch, inputs)
        clock.end(op, in_flight.period_offset, begin)
        transport.computed()
        self.publish(batch, inputs, result)

    @property
    def is_empty(self) -> bool:
        """True if this worker's mini-batch has no samples for the op."""
        rows = [self.in_flight.batches[self.slot].rows[unit] for unit in self.units]
        return all(unit_rows.start == unit_rows.stop for unit_rows in rows)

    @abstractmethod
    def receive(self, batch: Batch) -> Any:
        """Return the op's input; waits until it was received."""

    @abstractmethod
    def compute(self, batch: Batch, inputs: Any) -> Any:
        """Run the op."""

    @abstractmethod
    def publish(self, batch: Batch, inputs: Any, result: Any) -> None:
        """Publish the result for the ops that depend on it."""


class _MessageTask(ActionTask):
    """A message.

    Args:
        action: what it does.
        tools: the worker's.
        period_offset: how many periods later than it says it is going to run.
    """

    def __init__(self, action: Message, tools: Tools, period_offset: int) -> None:
        super().__init__(action)
        self.envelope, self._slot = tools.addresses.envelope(action, period_offset)
        self._batches, self._messages = tools.in_flight.batches, tools.in_flight.messages


class SendTask(_MessageTask):
    """The send of what lies ready."""

    @override
    def run(self) -> None:
        batch = self._batches[self._slot]
        self._messages.send(self.envelope, batch.known, batch.learnt)


class ReceiveTask(_MessageTask):
    """A receive that is posted."""

    @override
    def run(self) -> None:
        batch = self._batches[self._slot]
        self._messages.receive(self.envelope, batch.known, batch.learnt)


class DoOther(ActionTask):
    """An action that is neither an op nor a message.

    Args:
        action: what it does.
        does: who does it.
    """

    def __init__(self, action: Action, does: Callable[[Any], None]) -> None:
        super().__init__(action)
        self._does = does

    @override
    def run(self) -> None:
        self._does(self.action)


@dataclass(frozen=True, slots=True)
class Tasks:
    """A worker's list, ready to be run.

    Attributes:
        local_prefix: the first tasks, as long as they need no other worker.
        rest: the tasks after them.
    """

    local_prefix: tuple[ActionTask, ...]
    rest: tuple[ActionTask, ...]

    def __iter__(self) -> Iterator[ActionTask]:
        yield from self.local_prefix
        yield from self.rest

    @property
    def peers(self) -> set[int]:
        """The ranks to which messages go or from which they come."""
        return {task.envelope.peer for task in self if isinstance(task, _MessageTask)}
