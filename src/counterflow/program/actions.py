"""Actions: what a worker's interpreter executes, one after another.

Invariant: an action names all it needs (its peer, its stage, its op), so that no handler computes who
comes next. A message is named by the op whose output it carries. How the lists come to be is told in
``lowering.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from counterflow.schedule.ir import Op, OpKind, Product, Schedule
from counterflow.schedule.modes import Sync
from counterflow.schedule.workload import SkipLink

from .sync import needs_sync

_WORDS = {kind: kind.word.title().replace(" ", "") for kind in OpKind}
_CARRIED = {Product.OUTPUT: "Activation", Product.INPUT_GRADIENT: "Gradient"}


class Matching(Enum):
    """How a transport matches the messages between two workers.

    ``ORDER``: by their order alone, whichever way they go (NCCL). ``TAG``: by a number (Gloo).
    """

    ORDER = "order"
    TAG = "tag"


class Summed(Enum):
    """What is summed over workers.

    ``GRADIENTS``: of a stage, over its copies. ``TIED``: of weights that several stages share, over all who
    hold one of them. ``STATISTICS``: a stage's running statistics (batch norms), averaged over its copies.
    """

    GRADIENTS = "gradients"
    TIED = "tied gradients"
    STATISTICS = "statistics"


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute ``op``; waits for its input if that comes from another worker."""

    op: Op

    def __str__(self) -> str:
        return f"{_WORDS[self.op.kind]} {self.op}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send what ``output`` made for another stage, its output or its input gradient, to worker ``peer``.

    ``skip``: what goes by a skip; None: what the stage before or after takes.
    """

    output: Op
    peer: int
    skip: SkipLink | None = None

    def __str__(self) -> str:
        return f"Send{_what(self.output)} {named(self)} to worker {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of what ``output`` of worker ``peer`` makes; does not wait."""

    output: Op
    peer: int
    skip: SkipLink | None = None

    def __str__(self) -> str:
        return f"Receive{_what(self.output)} {named(self)} from worker {self.peer}"


@dataclass(frozen=True, slots=True)
class StartSync:
    """Begin to sum something of a stage and period over ``workers``; does not wait.

    ``tied`` are further stages whose weights are the same (``Summed.TIED``).
    """

    stage: int
    period: int
    workers: tuple[int, ...]
    what: Summed = Summed.GRADIENTS
    tied: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"StartSync {_summed(self)}"


@dataclass(frozen=True, slots=True)
class WaitSync:
    """Wait until the sum that the ``StartSync`` of the same fields began is there."""

    stage: int
    period: int
    workers: tuple[int, ...]
    what: Summed = Summed.GRADIENTS
    tied: tuple[int, ...] = ()

    @property
    def start(self) -> StartSync:
        """What began the sum."""
        return StartSync(self.stage, self.period, self.workers, self.what, self.tied)

    def __str__(self) -> str:
        return f"WaitSync {_summed(self)}"


@dataclass(frozen=True, slots=True)
class TellLoss:
    """Begin to tell all workers of all groups this worker's part of the period's loss; does not wait."""

    period: int

    def __str__(self) -> str:
        return f"TellLoss of period {self.period}"


@dataclass(frozen=True, slots=True)
class Agree:
    """Hear from all workers of all groups the period's loss and gradient norm; then clip by the norm.

    Without ``norm`` only the loss is waited for, which ``TellLoss`` told.
    """

    period: int
    norm: bool = True

    def __str__(self) -> str:
        return f"Agree on loss{' and norm' if self.norm else ''} of period {self.period}"


@dataclass(frozen=True, slots=True)
class Update:
    """Make weight version ``version`` of a stage from the gradients of period ``version`` − 1.

    ``frees`` are the older versions that nothing later uses.
    """

    stage: int
    version: int
    frees: tuple[int, ...]

    def __str__(self) -> str:
        return f"Update stage {self.stage} to version {self.version}"


Message = Send | Receive
SyncAction = StartSync | WaitSync
Action = Compute | Message | SyncAction | TellLoss | Agree | Update


def named(message: Message) -> str:
    """What tells a message from others of the same workers.

    >>> named(Send(Op(OpKind("F"), 0, (3,)), 1, SkipLink(0, 2)))
    'F3.0 for stage 2'
    """
    if message.skip is None:
        return str(message.output)
    forward = message.output.kind.gives is Product.OUTPUT
    stage = message.skip.target if forward else message.skip.source
    return f"{message.output} for stage {stage}{' once' if message.skip.once else ''}"


def _what(op: Op) -> str:
    return _CARRIED[op.kind.gives] if op.kind.gives else op.kind.word


def _summed(sync: SyncAction) -> str:
    stages = " and ".join(map(str, (sync.stage, *sync.tied)))
    return f"{sync.what.value} of stage{'s' if sync.tied else ''} {stages}, period {sync.period}"


@dataclass(frozen=True, slots=True)
class Program:
    """One action list a worker, lowered from a schedule for ``replicas`` pipeline groups.

    What is proved is what is timed and what runs: nothing reorders these lists.
    """

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]
    replicas: int = 1
    sync: Sync = Sync.EAGER_OPT
    matching: Matching = Matching.ORDER

    @property
    def needs_sync(self) -> bool:
        """Whether stages have several copies, so that their gradients have to be summed."""
        return needs_sync(self.schedule, self.replicas)

    def holders(self, *stages: int) -> tuple[int, ...]:
        """The workers of one group that hold a copy of one of ``stages``, ascending."""
        copies = (copy for stage in stages for copy in self.schedule.placement.copies(stage))
        return tuple(sorted({worker for _, worker in copies}))
