"""Runs a schedule step by step: executes the lists, and knows what an action does to weights and losses.

With a barrier, without one, and asynchronous are three lowerings (``program/``). This module contains the
handlers of their actions, in a table by action type.

* With a barrier no weight changes before loss and gradient norm of the whole mini-batch are known everywhere,
  and at a step's end nothing is in flight.
* Without a barrier all numbers are bit-exactly equal. Only those waits are left out that no number needs: for
  the other workers' ends, for messages in flight, for the agreement on the next mini-batch, which is like the
  last one. A worker is at most one step ahead of another (``early_loss.py``), so two sets of message numbers
  distinguish the steps. If gradients are clipped, or updates skipped, updates wait for the norm of all as
  with a barrier. Else they wait for the loss only. So a non-finite loss ends the run before any update uses
  it. If a gradient is non-finite but the loss is finite, its worker updates with zeros and the others with
  their gradients, and all workers end before the next updates. A device always has an op to run while its
  host reads: the loss is read an op after it was computed, and the norm is reported with the next step's
  loss, an op into that step.
* An asynchronous step begins a mini-batch and leaves the last ones in flight: what it runs is a segment
  (``program/segments.py``), and n steps and a flush are the program of the scheme with n periods, action by
  action. Gradients are clipped stage by stage, because a stage is updated before the gradients of the other
  stages exist.

Invariant: what all workers know of a mini-batch follows from the same numbers in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from counterflow.common.tensors import devices
from counterflow.errors import ConfigError, WorkerError
from counterflow.execution import Execution
from counterflow.program.actions import (
    Action,
    CallHooks,
    Clip,
    ClipStage,
    DropNonFinite,
    GatherAction,
    StartGather,
    StartSync,
    Update,
    WaitGather,
    WaitSync,
)
from counterflow.program.segments import Segments, without_update

from ..mini_batch.batch import Batch
from ..mini_batch.losses import added, divisor_of
from ..mini_batch.step_report import CallReport
from ..parameters.gradient_norms import StageNorm, clip_factor
from ..parameters.manual_changes import ManualChanges
from ..parameters.shared_state import SharedState
from ..parameters.weights import Weights
from ..stages.versions import Versions
from .gathers import Gathered, GatherRequest, Head, MiniBatch, StepGathers, refuse_other_steps
from .interpreter import Interpreter
from .step import Workers
from .tasks import Tasks
from .weighing import LossNormaliser


class Runner:
    """One worker's part.

    Args:
        cut: the lists of all workers.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        execution: whether and how it clips and skips. Asynchronous: a stage's gradients are scaled down to
            the largest norm divided by the square root of the number of stages, so that those of all stages
            together never exceed it.
        shared: what stages share.
    """

    def __init__(
        self,
        cut: Segments,
        make: Callable[..., Interpreter],
        workers: Workers,
        weights: Weights,
        execution: Execution,
        *,
        shared: SharedState,
    ) -> None:
        schedule = cut.schedule
        self._shared = shared
        self._cut, self.workers, self.weights, self.execution = cut, workers, weights, execution
        self.warm_up_steps = cut.last
        """Steps until a segment is like all later ones."""
        # One slot more than mini-batches in flight: a worker may be ahead of the one it sends to.
        self._slots = cut.periods_in_flight + bool(cut.drains)
        self.interpreter = make(schedule, slots=self._slots)
        self._flushes = schedule.synchronous
        self._handlers: Mapping[type[Action], Callable[[Any], None]] = {
            StartSync: weights.start_sync,
            WaitSync: weights.wait_sync,
            StartGather: self._start_gather,
            WaitGather: self._wait_gather,
            CallHooks: self._call_hooks,
            Clip: self._clip,
            DropNonFinite: self._drop_non_finite,
            ClipStage: self._clip_stage,
            Update: self._update,
        }
        self._by_hand = ManualChanges(weights, watches=not self._flushes)
        self._lists: dict[tuple[int, int, bool, bool], Tasks] = {}
        most = execution.max_norm
        self._limit = None if most is None else most / math.sqrt(schedule.stages)
        if not self._flushes:
            exclude = self.interpreter.saved.exclude_constants
            for stage, local_stage in weights.stages.items():
                local_stage.versions = Versions(stage, local_stage.parameters, exclude)
        self._gathers = StepGathers(
            workers,
            digests=weights.digests.columns,
            together=cut.together,
            square=self._square,
            head=self._calls if self._flushes else self._steps_begun,
        )
        self._begun = 0  # mini-batches, since nothing was in flight
        self._offset = 0  # periods that the list at hand is run later than it says
        self._mini_batches: dict[int, MiniBatch] = {}
        """Mini-batches whose results are not all known yet, by number since the pipeline was empty."""
        self._known: deque[MiniBatch] = deque()
        self._batch: Batch  # of the last step
        self._report: CallReport
        self._compare: Callable[[Sequence[CallReport]], object]
        self._alive: dict[int, Tensor] = {}
        """True if all gradients so far were finite, by stage; after a non-finite one they count as zeros."""
        self._dead: set[int] = set()
        """Stages with a gradient that was not finite, as far as this worker has read it."""
        self._skipped = False  # something since the last update was not finite
        self._weighing = LossNormaliser(workers)
        self.waiting = 0
        """Samples whose gradients wait for an update, of steps without one."""

    @property
    def in_flight(self) -> bool:
        """True if a step has left ops for later, here or on another worker: never with a barrier."""
        return self._begun > 0

    @property
    def peers(self) -> set[int]:
        """The ranks to which messages go or from which they come."""
        return {peer for tasks in self.lists for peer in tasks.peers}

    @property
    def lists(self) -> Sequence[Tasks]:
        """Lists that this runner executes."""
        last = self._cut.last
        lists = [self._tasks(segment, 0) for segment in range(last)]
        lists += [self._tasks(last, period_offset) for period_offset in range(self._slots)]
        return lists + [self._tasks(segment, 0, drains=True) for segment in range(len(self._cut.drains))]

    def _tasks(self, segment: int, period_offset: int, *, drains: bool = False, update: bool = True) -> Tasks:
        key = segment, period_offset, drains, update
        if key not in self._lists:
            program = (self._cut.drains if drains else self._cut.steady)[segment]
            program = program if update else without_update(program)
            self._lists[key] = self.interpreter.prepare(program, self._handlers, period_offset)
        return self._lists[key]

    # -- steps

    def refuse_no_update(self, *, update: bool) -> None:
        """Refuse a step without an update in an asynchronous scheme.

        Raises:
            ConfigError: ``update`` is False, and the scheme is asynchronous.
        """
        if not (update or self._flushes):
            raise ConfigError(
                f"{self._cut.schedule.scheme} updates each stage at its own time, and cannot make a "
                "step without an update; give more micro-batches, or take a synchronous scheme"
            )

    def step(self, batch: Batch, *, update: bool = True) -> MiniBatch | None:
        """Begin a mini-batch, and run all ops that can run.

        Args:
            batch: the mini-batch.
            update: whether weights are updated; else the gradients are kept for the next update.

        Returns:
            The oldest known mini-batch, this or an earlier one, that was not returned yet; None: none.
        """
        number = self._begun
        if number:
            self._by_hand.check()
        else:
            for versions in self._versions():
                versions.begin()
        if self._cut.drains:  # else nothing is left when it ends
            self._begun += 1
        self._batch = batch
        batch.divisor = self._weighing.divisor
        mini_batch = self._mini_batches[number] = MiniBatch(
            batch.step, batch.losses, batch.compared, updates=update
        )
        if (scaling := self.weights.loss_scale) is not None:
            mini_batch.loss_scale = batch.loss_scale = scaling.scale
        self._run(number, batch, update=update)
        self.weights.commit_statistics()
        self._shared.end()
        if update and not self._skipped:
            self.weights.share()
            self.weights.update_balances()
        self.waiting = 0 if update else self.waiting + batch.total
        self._skipped = self._skipped and not update
        self.weights.detach()
        if self._cut.drains and self._flushes:
            if mini_batch.compared:
                mini_batch.digests.append(devices.HostCopy(self.weights.digests.digests()))
            self.interpreter.in_flight.release(batch)  # it stays itself until its slot is needed
        self._by_hand.note(batch.step)
        return self._known.popleft() if self._known else None

    def flush(self, report: CallReport, compare: Callable[[Sequence[CallReport]], object]) -> list[MiniBatch]:
        """End what is in flight.

        Args:
            report: this worker's report of the call.
            compare: checks the reports of all workers.

        Returns:
            Mini-batches that no step has reported yet.
        """
        if not self._begun:
            return []
        self._by_hand.check()
        self._report, self._compare = report, compare
        self._run(self._begun - 1, None)
        self.weights.detach()
        for versions in self._versions():
            versions.end()
        self.interpreter.in_flight.release(self._batch)
        mini_batches = list(self._known)
        self._known.clear()
        self._mini_batches.clear()
        self._alive.clear()
        self._begun = 0
        return mini_batches

    def _run(self, number: int, batch: Batch | None, *, update: bool = True) -> None:
        segment = min(number, self._cut.last)
        self._offset = number - segment
        tasks = self._tasks(segment, self._offset % self._slots, drains=batch is None, update=update)
        if batch is not None and self._flushes:
            self._report, self._compare = batch.report, batch.compare
        self.weights.attach()
        self.weights.mutations.note_parameters()
        self._shared.note(training=True)
        shown = self._offset if self.interpreter.tracing or not self._flushes else 0
        try:
            self.interpreter.run(
                tasks, batch, period_offset=shown, drains=batch is None or not self._cut.drains
            )
        except WorkerError as error:
            if isinstance(error.__cause__, RuntimeError):
                mutations = self.weights.mutations
                (mutations.refuse_overwritten if self._flushes else mutations.check)()
            self._shared.explain(error)
            raise
        finally:
            self.weights.hooks.give_back()
            for versions in self._versions():
                versions.show_latest()

    def _versions(self) -> list[Versions]:
        versions = (local_stage.versions for local_stage in self.weights.stages.values())
        return [of_stage for of_stage in versions if of_stage is not None]

    # -- losses and norms

    def _start_gather(self, action: StartGather) -> None:
        if not action.early:
            self._check_changes()
        request = self._request(action)
        if any(request):
            self._gathers.start(request)

    def _wait_gather(self, action: WaitGather) -> None:
        """Receive the reports of all workers on some mini-batches.

        Raises:
            ConfigError: the workers made different calls; or copies of a stage changed buffers of their own.
            WorkerError: a loss or a gradient is not finite; or copies of a stage differ.
        """
        if action.early:
            self._check_changes()
        loss, norm, copies = request = self._request(action)
        if not any(request):
            return
        first = next(part for part in request if part is not None)
        self.workers.transport.status.now(f"gathering the reports of step {first.step}")
        gathered = self._gathers.wait()
        if copies is not None and copies.compared:
            self.weights.digests.compare(gathered.digests, f"after step {copies.step}")
        if norm is not None and norm is not loss:  # of one before
            self._know_norm(norm, gathered)
        if loss is not None:
            self._know_loss(loss, gathered)
            if norm is loss:
                self._know_norm(loss, gathered)
        oldest = self._offset + min(period for period in action.periods if period is not None)
        for number in [number for number in self._mini_batches if number < oldest]:
            del self._mini_batches[number]

    def _check_changes(self) -> None:
        self.weights.mutations.check()
        self._shared.check()

    def _request(self, gather: GatherAction) -> GatherRequest:
        # None for periods before the first one
        batches, offset = self._mini_batches, self._offset
        return GatherRequest(
            *[None if period is None else batches.get(period + offset) for period in gather.periods]
        )

    def _square(self, mini_batch: MiniBatch) -> float:
        if not mini_batch.updates:
            return 0.0
        if not mini_batch.norms:
            return self.weights.squared_norm()
        square = 0.0
        for norm in mini_batch.norms:
            counted, dead = norm.read()
            square += counted
            if dead is not None:
                self._dead.add(dead)
        return square

    def _calls(self, request: GatherRequest) -> Head:
        del request
        compare = self._compare
        return self._report.pack(), lambda heads: compare([*map(CallReport.unpack, heads)])

    def _steps_begun(self, request: GatherRequest) -> Head:
        assert request.loss is not None
        return (self._begun, request.loss.step), refuse_other_steps

    def _know_loss(self, mini_batch: MiniBatch, gathered: Gathered) -> None:
        parts = gathered.parts
        weighed = [part.weights for part in parts]
        scale, this_step = self._weighing.add(
            weighed, mini_batch.step, self._batch.total, updates=mini_batch.updates
        )
        if not mini_batch.norms:  # else its gradients are divided by now
            mini_batch.scale = scale / (mini_batch.loss_scale or 1.0)
        if self.execution.skips_updates and not all(math.isfinite(part.loss) for part in parts):
            self._skipped = True
            mini_batch.loss = added(part.loss for part in parts) * this_step
        else:
            mini_batch.loss = self.workers.loss(parts, mini_batch.step, this_step)
        mini_batch.metrics = self._gathers.metrics(gathered, weighed, mini_batch.losses, this_step)

    def _know_norm(self, mini_batch: MiniBatch, gathered: Gathered) -> None:
        squares = [part.squared_norm * mini_batch.scale**2 for part in gathered.parts]
        if self.execution.skips_updates and not all(map(math.isfinite, squares)):
            self._skipped = True
        mini_batch.skipped = self._skipped
        if mini_batch.updates and self.weights.loss_scale is not None:
            self.weights.loss_scale.update(mini_batch.step, skipped=mini_batch.skipped)
        if mini_batch.updates and not mini_batch.skipped:
            not_finite = self._read_not_finite if mini_batch.norms else self.weights.not_finite
            mini_batch.norm = self.workers.norm(
                squares, mini_batch.loss, mini_batch.step, not_finite, updated=mini_batch.used
            )
        mini_batch.samples = self._batch.total
        self._known.append(mini_batch)

    def _read_not_finite(self) -> tuple[int, str] | None:
        return (min(self._dead), "one of its weights") if self._dead else None

    # -- gradients

    def _call_hooks(self, action: CallHooks) -> None:
        mini_batch = self._of(action.period)
        if not self._skipped:
            self.weights.scale(mini_batch.scale)
            mini_batch.scale = 1.0
            self.weights.call_hooks(mini_batch.step)

    def _clip(self, action: Clip) -> None:
        mini_batch = self._of(action.period)
        if not self._skipped:
            factor = mini_batch.scale * clip_factor(mini_batch.norm, self.execution.max_norm)
            if factor != 1.0:
                self.weights.scale(factor)

    def _drop_non_finite(self, action: DropNonFinite) -> None:
        mini_batch = self._of(action.period)
        norm = self.weights.own_norm()
        norm.drop()
        mini_batch.norms.append(norm)
        mini_batch.used = (
            "other stages may be updated with it; with clip_norm, math.inf say, nothing would be"
        )
        if mini_batch.scale != 1.0:
            self.weights.scale(mini_batch.scale)

    def _clip_stage(self, action: ClipStage) -> None:
        """Clip a stage's gradients; the host does not read them.

        After a non-finite gradient a stage's gradients count as zeros, and all workers end when they
        receive the report of it.
        """
        self._check_changes()
        mini_batch, stage = self._of(action.period), action.stage
        samples = self._batch.total  # the same in all in flight
        divisor = divisor_of(samples, flushes=False)
        if divisor != samples:
            self.weights.scale(divisor / samples, stage)
        versions = self.weights.stages[stage].versions
        assert versions is not None
        versions.show_latest()
        with versions.unseen():
            self.weights.call_hooks(mini_batch.step, stage)
        counted, alive = self.weights.clip(stage, self._limit, self._alive.get(stage))
        self._alive[stage] = alive
        mini_batch.norms.append(StageNorm(stage, counted, alive))
        mini_batch.used = "its stage counted it and all later ones as zeros"

    def _update(self, action: Update) -> None:
        stage, version = action.stage, action.version + self._offset
        mini_batch, local_stage = self._of(action.version - 1), self.weights.stages[stage]
        if local_stage.versions is None:
            if self._skipped:
                self.weights.skip(stage)
            else:
                self.weights.update(stage, mini_batch.step)
            local_stage.precision.forget()
            return
        frees = [freed + self._offset for freed in action.frees]
        local_stage.versions.make(version, frees)
        with local_stage.versions.unseen():
            self.weights.update(stage, mini_batch.step)
        if mini_batch.compared:
            mini_batch.digests.append(devices.HostCopy(self.weights.digests.digests({stage}, buffers=False)))
        local_stage.precision.updated(version, frees)

    def _of(self, period: int) -> MiniBatch:
        return self._mini_batches[period + self._offset]
