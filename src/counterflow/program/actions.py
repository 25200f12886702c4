"""Actions: what a worker executes, one after another.

Invariant: an action names everything it needs (its peer, its stage, its op), so no handler computes who is
next. A message is named by the op whose output it carries. ``lowering.py`` makes the lists.
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
    """Rule by which a transport matches the messages between two workers.

    ``ORDER``: by their order alone, in either direction (NCCL). ``TAG``: by a number (Gloo).
    """

    ORDER = "order"
    TAG = "tag"


class Summed(Enum):
    """Values that are summed over workers.

    ``GRADIENTS``: a stage's gradients, over its replicas. ``TIED``: gradients of weights that several stages
    share, over all holders of one of these. ``STATISTICS``: a stage's running statistics (batch norms),
    averaged over its replicas.
    """

    GRADIENTS = "gradients"
    TIED = "tied gradients"
    STATISTICS = "statistics"


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute ``op``; waits for its input if another worker sends it.

    ``pair``: at the first op of a pair all its ops, which are those of this action and of the next ones. They
    run at once, and this action waits for the inputs of all. Empty: ``op`` begins no pair.
    """

    op: Op
    pair: tuple[Op, ...] = ()

    def __str__(self) -> str:
        further = ", ".join(map(str, self.pair[1:]))
        return f"{_WORDS[self.op.kind]} {self.op}{f' at once with {further}' if further else ''}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the output or input gradient that ``output`` made for another stage to worker ``peer``.

    ``skip``: the skip connection of the value; None: the stage before or after takes it.
    """

    output: Op
    peer: int
    skip: SkipLink | None = None

    def __str__(self) -> str:
        return f"Send{_what(self.output)} {named(self)} to worker {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of the value that ``output`` of worker ``peer`` makes; does not wait."""

    output: Op
    peer: int
    skip: SkipLink | None = None

    def __str__(self) -> str:
        return f"Receive{_what(self.output)} {named(self)} from worker {self.peer}"


@dataclass(frozen=True, slots=True)
class StartSync:
    """Start a sum of a stage and period over ``workers``; does not wait.

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
    """Wait until the sum that the ``StartSync`` with the same fields started is complete."""

    stage: int
    period: int
    workers: tuple[int, ...]
    what: Summed = Summed.GRADIENTS
    tied: tuple[int, ...] = ()

    @property
    def start(self) -> StartSync:
        """The action that started the sum."""
        return StartSync(self.stage, self.period, self.workers, self.what, self.tied)

    def __str__(self) -> str:
        return f"WaitSync {_summed(self)}"


@dataclass(frozen=True, slots=True)
class _Gather:
    """A gather from all workers of all groups of their results for some periods.

    ``loss`` is the period whose loss is gathered, ``norm`` the period of the gradient norm, and ``copies``
    the period after which replicas of stages are compared. None: no period. Nothing is gathered for a period
    before the first one.
    """

    loss: int | None = None
    norm: int | None = None
    copies: int | None = None

    @property
    def periods(self) -> tuple[int | None, int | None, int | None]:
        """Periods of loss, norm and copies."""
        return self.loss, self.norm, self.copies

    @property
    def early(self) -> bool:
        """True if it starts before the gradients of its loss's period exist."""
        return self.loss is not None and self.norm is not None and self.norm < self.loss

    def __str__(self) -> str:
        named = {"loss": self.loss, "norm": self.norm, "copies": self.copies}
        parts = []
        for period in sorted({number for number in self.periods if number is not None}, reverse=True):
            *first, last = (what for what, of_value in named.items() if of_value == period)
            parts.append(f"{', '.join(first)}{' and ' if first else ''}{last} of period {period}")
        return f"{type(self).__name__} {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class StartGather(_Gather):
    """Start a gather; does not wait."""


@dataclass(frozen=True, slots=True)
class WaitGather(_Gather):
    """Wait for the gather that the ``StartGather`` with the same fields started."""

    @property
    def start(self) -> StartGather:
        """The action that started the gather."""
        return StartGather(*self.periods)


@dataclass(frozen=True, slots=True)
class _OfAllStages:
    period: int

    def __str__(self) -> str:
        return f"{type(self).__name__} of period {self.period}"


class CallHooks(_OfAllStages):
    """Divide the gradients, and call the hooks with them."""


class Clip(_OfAllStages):
    """Divide the gradients, and clip them by the gathered norm."""


class DropNonFinite(_OfAllStages):
    """Divide the gradients, and set all of them to zero if one is non-finite.

    Their norm is measured on the device: the host reads it later.
    """


@dataclass(frozen=True, slots=True)
class ClipStage:
    """Divide a stage's gradients of a period, call the hooks, and clip the gradients by their own norm.

    This happens on the device: the host reads the norm later. All gradients become zero if one is non-finite.
    """

    stage: int
    period: int

    def __str__(self) -> str:
        return f"Clip stage {self.stage}, period {self.period}"


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
GatherAction = StartGather | WaitGather
GradientAction = CallHooks | Clip | DropNonFinite | ClipStage
"""Actions that turn summed gradients into those of the update."""
Action = Compute | Message | SyncAction | GatherAction | GradientAction | Update


def named(message: Message) -> str:
    """Name that distinguishes a message from others between the same workers.

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
    """One action list per worker, lowered from a schedule for ``replicas`` pipeline groups.

    The checker proves, the simulator times and the runtime executes these lists; nothing reorders them.
    """

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]
    replicas: int = 1
    sync: Sync = Sync.EAGER_OPT
    matching: Matching = Matching.ORDER

    @property
    def needs_sync(self) -> bool:
        """True if stages have several replicas, so their gradients have to be summed."""
        return needs_sync(self.schedule, self.replicas)

    def holders(self, *stages: int) -> tuple[int, ...]:
        """The workers of one group that hold one of ``stages``, ascending."""
        copies = (copy for stage in stages for copy in self.schedule.placement.copies(stage))
        return tuple(sorted({worker for _, worker in copies}))
