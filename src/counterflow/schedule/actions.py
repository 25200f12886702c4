"""Actions: what a worker's interpreter executes, one after another.

Invariant: an action names all it needs (its peer, its stage, its op), so that no handler computes who
comes next. A message is named by the op whose output it carries. How the lists come to be is told in
``lowering.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Op, Schedule
from .modes import Sync
from .sync import needs_sync


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute ``op``, a forward; waits for its input if that comes from another worker."""

    op: Op

    def __str__(self) -> str:
        return f"Forward {self.op}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute ``op``, a backward; waits for its gradient if that comes from another worker."""

    op: Op

    def __str__(self) -> str:
        return f"Backward {self.op}"


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send the output of the forward ``output`` to worker ``peer``."""

    output: Op
    peer: int

    def __str__(self) -> str:
        return f"SendActivation {self.output} to worker {self.peer}"


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the input gradient that the backward ``output`` made to worker ``peer``."""

    output: Op
    peer: int

    def __str__(self) -> str:
        return f"SendGradient {self.output} to worker {self.peer}"


@dataclass(frozen=True, slots=True)
class ReceiveActivation:
    """Post the receive of the output of the forward ``output`` of worker ``peer``; does not wait."""

    output: Op
    peer: int

    def __str__(self) -> str:
        return f"ReceiveActivation {self.output} from worker {self.peer}"


@dataclass(frozen=True, slots=True)
class ReceiveGradient:
    """Post the receive of the gradient that ``output`` of worker ``peer`` makes; does not wait."""

    output: Op
    peer: int

    def __str__(self) -> str:
        return f"ReceiveGradient {self.output} from worker {self.peer}"


@dataclass(frozen=True, slots=True)
class StartGradientSync:
    """Begin to sum a stage's gradients of a period over its copies on ``workers``; does not wait."""

    stage: int
    period: int
    workers: tuple[int, ...]

    def __str__(self) -> str:
        return f"StartGradientSync stage {self.stage} period {self.period}"


@dataclass(frozen=True, slots=True)
class WaitGradientSync:
    """Wait until the sum that ``StartGradientSync`` began is there."""

    stage: int
    period: int
    workers: tuple[int, ...]

    def __str__(self) -> str:
        return f"WaitGradientSync stage {self.stage} period {self.period}"


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


Compute = Forward | Backward
Send = SendActivation | SendGradient
Receive = ReceiveActivation | ReceiveGradient
SyncAction = StartGradientSync | WaitGradientSync
Action = Compute | Send | Receive | SyncAction | Update


@dataclass(frozen=True, slots=True)
class Program:
    """One action list a worker, lowered from a schedule for ``replicas`` pipeline groups."""

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]
    replicas: int = 1
    sync: Sync = Sync.EAGER_OPT

    @property
    def needs_sync(self) -> bool:
        """Whether stages have several copies, so that their gradients have to be summed."""
        return needs_sync(self.schedule, self.replicas)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The workers of one group that hold a copy of ``stage``, ascending."""
        return tuple(sorted({worker for _, worker in self.schedule.placement.copies(stage)}))
