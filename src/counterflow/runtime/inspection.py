"""Views of a pipeline's run: timelines, stages that cannot be split, compiled layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from counterflow.schedule.ir import Op

from .call_guard import CallGuard
from .execution.interpreter import Interpreter, timelines
from .mini_batch.step_report import CallKind
from .stages.captures import CapturedStage
from .stages.compiled import CompiledLayers
from .stages.stage import LocalStage
from .transport.base import Transport

_LOG = logging.getLogger("counterflow.runtime.pipeline")

Timelines = list[list[tuple[Op, float, float]]]
"""By worker the ops in their order, with start and end in seconds."""


class Inspection:
    """Times and properties of one worker's run; the methods are those of ``Pipeline``, which documents them.

    Args:
        guard: guard of the pipeline's calls.
        stages: the worker's stages.
        split: stages whose backward the schedule splits.
        interpreter: interpreter of the training steps.
        ranks: ranks of each replica's workers.
        transport: transport to the other workers.
    """

    def __init__(
        self,
        guard: CallGuard,
        stages: Mapping[int, LocalStage],
        split: Sequence[int],
        *,
        interpreter: Interpreter,
        ranks: Sequence[Sequence[int]],
        transport: Transport,
    ) -> None:
        self._guard, self._stages, self._split = guard, stages, split
        self._interpreter, self._ranks, self._transport = interpreter, ranks, transport
        self._perhaps_unsplit = set(split)
        self._perhaps_compiled = set(self.compiled)
        self._perhaps_captured = set(self.captured)

    @contextmanager
    def traced(self) -> Iterator[Callable[[], Timelines]]:
        """Context in which all ops are timed."""
        with self._interpreter.trace():
            yield self.timeline

    def timeline(self, replica: int = 0) -> Timelines:
        """Ops of the last step, or of a trace so far."""
        with self._guard.reported():
            self._guard.agree(CallKind.TIMELINE)
            return timelines(self._transport, self._interpreter, self._ranks[replica])

    @property
    def unsplit(self) -> tuple[int, ...]:
        """Stages that cannot be split."""
        return tuple(stage for stage in self._split if self._stages[stage].split_planner.is_split is False)

    @property
    def compiled(self) -> dict[int, tuple[CompiledLayers, ...]]:
        """Compiled layers by stage."""
        layers = {stage: local_stage.compiled_layers() for stage, local_stage in self._stages.items()}
        return {stage: compiled for stage, compiled in layers.items() if compiled}

    @property
    def captured(self) -> dict[int, CapturedStage]:
        """Captures by stage."""
        pairs = [(number, stage.captures) for number, stage in self._stages.items()]
        return {number: captures.report() for number, captures in pairs if captures is not None}

    def log(self) -> None:
        """Log what a step has shown of stages: that they cannot be split, how they are compiled, captured."""
        if self._perhaps_unsplit:
            self._log_unsplit()
        if self._perhaps_compiled:
            self._log_compiled()
        if self._perhaps_captured:
            self._log_captured()

    def _log_unsplit(self) -> None:
        known = {s for s in self._perhaps_unsplit if self._stages[s].split_planner.is_split is not None}
        self._perhaps_unsplit -= known
        for stage in sorted(known & set(self.unsplit)):
            _LOG.warning(
                "the backward of stage %d cannot be split: its weights' gradients are made with the input "
                "gradient, because a custom function (a compiled layer, a checkpoint) makes both at once, or "
                "they are used several times, or are vectors; a scheme with whole backwards costs no more",
                stage,
            )

    def _log_compiled(self) -> None:
        known = {stage for stage in self._perhaps_compiled if self._stages[stage].checked}
        self._perhaps_compiled -= known
        for stage in sorted(known):
            text = ", ".join(map(str, self.compiled[stage]))
            _LOG.info("stage %d is compiled: %s", stage, text)

    def _log_captured(self) -> None:
        for stage, report in self.captured.items():
            if stage in self._perhaps_captured and (report.units or report.reason is not None):
                self._perhaps_captured.remove(stage)
                _LOG.info("stage %d %s", stage, report)
