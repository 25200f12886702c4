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
class _Gather:
    """What is gathered from all workers of all groups: what each one knows of some periods.

    ``loss`` is the period of whose loss each gives its part, ``norm`` the one of whose gradient norm, and
    ``copies`` the one after which what it holds of stages with copies is compared. None: of no period. Of a
    period before the first one nothing is gathered.
    """

    loss: int | None = None
    norm: int | None = None
    copies: int | None = None

    @property
    def periods(self) -> tuple[int | None, int | None, int | None]:
        """Of loss, norm and copies."""
        return self.loss, self.norm, self.copies

    @property
    def early(self) -> bool:
        """Whether it starts before the gradients of the period of its loss are there."""
        return self.loss is not None and self.norm is not None and self.norm < self.loss

    def __str__(self) -> str:
        named = {"loss": self.loss, "norm": self.norm, "copies": self.copies}
        found = []
        for period in sorted({each for each in self.periods if each is not None}, reverse=True):
            *others, last = (what for what, its in named.items() if its == period)
            found.append(f"{', '.join(others)}{' and ' if others else ''}{last} of period {period}")
        return f"{type(self).__name__} {', '.join(found)}"


@dataclass(frozen=True, slots=True)
class StartGather(_Gather):
    """Begin to gather; does not wait."""


@dataclass(frozen=True, slots=True)
class WaitGather(_Gather):
    """Wait for what the ``StartGather`` of the same fields began."""

    @property
    def start(self) -> StartGather:
        """What began the gather."""
        return StartGather(*self.periods)


@dataclass(frozen=True, slots=True)
class _OfAllStages:
    """What is done to a period's gradients of all stages of the worker."""

    period: int

    def __str__(self) -> str:
        return f"{type(self).__name__} of period {self.period}"


class CallHooks(_OfAllStages):
    """Divide the gradients, and let hooks see them."""


class Clip(_OfAllStages):
    """Divide the gradients, and clip them by the norm that was gathered."""


class DropNonFinite(_OfAllStages):
    """Divide the gradients, and make all of them zeros if one is not finite.

    Their norm is measured where they are: the host reads it later.
    """


@dataclass(frozen=True, slots=True)
class ClipStage:
    """Divide a stage's gradients of a period, let hooks see them, and clip them by their own norm.

    That is done where they are: the host reads the norm later. They become zeros if one is not finite.
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
"""What makes of summed gradients those that an update takes."""
Action = Compute | Message | SyncAction | GatherAction | GradientAction | Update


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
