"""The part of a stage that passes use.

It is a protocol, so that these modules do not depend on the one that composes a stage of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from counterflow.schedule.modes import Recompute
from counterflow.verification.diagnosis.reruns import RerunDiagnosis

from ..mesh.parallel import StageModule
from ..messages.values import Value
from .buffers import Buffers
from .detach_points import DetachPoints
from .input_guard import InputGuard
from .named_layer import NamedLayer
from .precision import Precision
from .randomness import RandomStreams
from .replays import LayerReplays
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes
from .split_backward import SplitBackwardPlanner
from .stage_wrappers import Run


class RunnableStage(Protocol):
    """A stage as its passes use it; ``LocalStage`` documents the members."""

    stage: int
    last: bool
    trains: bool
    checked: bool
    joins: bool | None
    recompute: Recompute
    layers: tuple[NamedLayer, ...]
    streams: RandomStreams
    run_layers: Run
    precision: Precision
    buffers: Buffers
    entry: InputGuard
    reruns: RerunDiagnosis
    replays: LayerReplays | None
    split_planner: SplitBackwardPlanner
    module: StageModule | None

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, each once."""

    def detaching(self) -> AbstractContextManager[DetachPoints | None]:
        """Return the context of a forward whose backward is split."""

    def backward_context(self, meter: SavedBytes) -> AbstractContextManager[Any] | None:
        """Return the context of a backward; None: it needs none."""

    def forward_joined(self, value: Value, step: int, rows: SampleRows) -> Value | None:
        """Run several units as one; None if the outputs of samples depend on each other."""

    def graph_leaves(self) -> list[Tensor]:
        """Return tensors beside the parameters where graphs end."""

    def note_checked(self) -> None:
        """Note that the stage's first graph is diagnosed."""
