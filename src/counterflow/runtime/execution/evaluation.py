"""Runs the forwards of a mini-batch on which nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from counterflow.program.actions import Program

from ..mini_batch.batch import Batch
from ..stages.stage import StageCopy
from .interpreter import Interpreter


class EvaluationRunner:
    """One worker's part.

    Args:
        program: the lists of all workers.
        make: makes the interpreter of a schedule.
        stages: this worker's.
    """

    def __init__(
        self, program: Program, make: Callable[..., Interpreter], stages: Mapping[int, StageCopy]
    ) -> None:
        self._interpreter, self._stages = make(program.schedule), stages
        self._tasks = self._interpreter.prepare(program, {})
        self.peers = self._tasks.peers
        """The ranks to which messages go or from which they come."""

    def run(self, batch: Batch) -> None:
        """Run the forwards in evaluation mode; their losses and outputs are the batch's then."""
        with ExitStack() as evaluating:
            for stage in self._stages.values():
                evaluating.enter_context(stage.evaluating())
            self._interpreter.run(self._tasks, batch)
