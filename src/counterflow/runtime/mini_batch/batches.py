"""Make a step's micro-batches: agree on shapes across ranks, cut, prefetch to the device.

Invariant: all workers of a replica make the same batch, and remember and forget the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from counterflow.api.contexts import MULTIPLE
from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution
from counterflow.schedule.ir import Schedule

from ..mesh.parallel_dims import ParallelDims
from .agreement import Agreed, Agreement, Peers
from .batch import Batch, rows_of
from .entries import KnownLayouts
from .first_steps import FirstSteps
from .input_cuts import compared_rows
from .known_shapes import KnownShapes
from .losses import Losses
from .prefetcher import CopyStream, MicroBatchPrefetcher
from .slicing import SequenceDims, Slices, positions_of
from .step_report import CallKind, CallReport
from .user_batch import UserBatch, even, ready, unsplit


class PipelineState(Protocol):
    """State of the runner on which a batch depends."""

    @property
    def in_flight(self) -> bool:
        """True if earlier mini-batches are in flight."""

    @property
    def waiting(self) -> int:
        """Number of samples whose gradients wait for an update."""


@dataclass(frozen=True, slots=True)
class Role:
    """A worker's part in mini-batches.

    Attributes:
        worker: number of the worker in its group.
        takes_inputs: whether the worker holds the first stage.
        takes_targets: whether the worker holds the last stage.
        has_loss_function: whether a loss function, which needs targets, follows the last layer.
        reports_loss: whether the worker reports its losses; False if a worker with equal samples does.
        dims: record of the parallel dimensions.
    """

    worker: int
    takes_inputs: bool
    takes_targets: bool
    has_loss_function: bool
    reports_loss: bool
    dims: ParallelDims


class Batches:
    """One worker's mini-batches.

    Args:
        schedule: what takes them.
        execution: how often what workers have is compared.
        batching: how they are cut.
        role: this worker's part in them.
        peers: ranks that must pass the same shapes.
        copies: where they are copied to the device.
    """

    def __init__(
        self,
        schedule: Schedule,
        execution: Execution,
        batching: Batching,
        *,
        role: Role,
        peers: Peers,
        copies: CopyStream,
    ) -> None:
        self._schedule, self._batching, self._role = schedule, batching, role
        self._digest_every = execution.digest_every
        self._peers, self._copies = peers, copies
        self._parts = schedule.workload.sample_parts
        self._agreements = {
            trains: Agreement(peers, schedule.micro_batches, execution.digest_every)
            for trains in (True, False)
        }
        """On mini-batches that are trained on, which may follow each other, and on all others."""
        self._slices: Slices | None = None
        if schedule.workload.slices > 1:
            multiple = MULTIPLE if role.dims.contexts else 1
            self._slices = Slices(schedule.workload.lengths, multiple)
        if self._slices is not None and batching.per_micro_batch_loss:
            raise ConfigError(
                f"per_micro_batch_loss: {schedule.scheme} has no loss of a whole micro-batch where it cuts "
                "them in slices; return a mean over samples and positions, or a cf.LossSum"
            )
        self._first_steps = FirstSteps(
            batching, self._parts, sliced=self._slices is not None, shared=bool(role.dims.contexts),
            diagnoses_inputs=not role.dims.in_lockstep,
        )  # fmt: skip
        self._shapes = KnownShapes(schedule.workload)
        self._known_layouts: KnownLayouts = []
        """Lists in mini-batches whose samples were found to be in their tensors."""
        self._positions_may_differ = bool(execution.digest_every and role.dims.further)
        """True if positions of the further dimensions may differ: they are compared after the first step."""

    def user_batch(
        self,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | None,
        micro_batches: Iterable[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
    ) -> UserBatch:
        """Return the user's inputs and targets; arguments and errors as of ``Pipeline.step``."""
        dims = self._batching.input_dims, self._batching.target_dims, self._batching.kwarg_dims
        if micro_batches is None:
            if samples is not None:
                raise ConfigError("samples= are those of micro_batches; a whole mini-batch is counted")
            return unsplit(inputs, targets, kwargs, dims, self._known_layouts)
        if inputs is not None or targets is not None or kwargs is not None:
            raise ConfigError("give micro_batches, or inputs, targets and kwargs, not both")
        return ready(micro_batches, samples, self._schedule, dims, halves=self._parts > 1)

    def make(
        self,
        read: Callable[[], UserBatch],
        call: CallKind,
        step: int,
        run: PipelineState,
        *,
        outputs: bool = False,
    ) -> Batch:
        """Make the batch of a call.

        Args:
            read: returns this worker's inputs and targets.
            call: what is called.
            step: steps that were made before.
            run: what it is for.
            outputs: whether outputs are asked for.

        Raises:
            Refusal: something is missing, has no samples, or is not what the others were given, on any
                worker; and none has begun.
            ConfigError: the same, and another worker has begun, or may have: mini-batches are in flight.
        """
        follows, agreement = run.in_flight and call.trains, self._agreements[call.trains]
        try:
            user_batch = read()
            report, sizes, signatures = self._report(user_batch, call, step, outputs=outputs, follows=follows)
            input_cuts = self._first_steps.of_inputs(
                user_batch, report.kind, sizes, trains=call.trains, step=step
            )
        except Exception as error:
            refusal = error if follows else agreement.refuse(error, step)
            if refusal is error:
                raise
            raise refusal from error
        await_total: Callable[[], int] | None
        if follows:
            # In asynchronous schemes workers report a loss much later.
            later = self._schedule.synchronous
            report, await_total = agreement.follow(report, user_batch, sizes, reports_later=later)
        else:
            # This worker knows enough to begin; what the others say is read before it sends.
            samples, known_kind = sum(sizes), report.kind in self._shapes
            known = known_kind and samples > 0 and report.targets in (samples, None) and not user_batch.ready
            known = known and not self._peers.same_sequences  # positions communicate in their first op
            report, known = (
                report._replace(ways=0 if input_cuts is None else len(input_cuts.ways)),
                known and input_cuts is None,
            )
            await_total = agreement.begin(report, user_batch, sizes, signatures, known=known)
            report = CallReport(call, step, outputs, follows=True)
        agreed = agreement.last
        has_one_unit = call.predicts or self._has_one_unit(agreed, call, run)
        slices = self._slices if call.trains else None
        sequence, positions = None, tuple[int, ...]()
        if slices is not None:
            batching = self._batching
            dims = user_batch.dims_of_inputs(batching.sequence_dims, batching.kwarg_sequence_dims)
            sequence = SequenceDims(dims, batching.target_sequence_dims, slices)
            positions = positions_of(user_batch, agreed.sizes, sequence)
        at_once = not self._schedule.synchronous  # needed when the user may change what was given
        inputs, targets = (
            MicroBatchPrefetcher(user_batch.cut(pieces, dims, agreed.sizes), self._copies, at_once=at_once)
            if takes
            else None
            for takes, pieces, dims in (
                (self._role.takes_inputs, user_batch.inputs, user_batch.input_dims),
                (self._role.takes_targets, user_batch.targets, user_batch.target_dims),
            )
        )
        finishes = self._schedule.synchronous or not call.trains
        diagnoses = self._first_steps.of_step(
            agreed.kind,
            trains=call.trains,
            step=step,
            has_losses=self._needs_targets(call),
            units=None if finishes else self._units(agreed, call),
            compares=not has_one_unit,
        )
        return Batch(
            step=step,
            inputs=inputs,
            targets=targets,
            samples=agreed.sizes,
            total=agreed.total,
            rows=rows_of(
                self._peers.replica * self._schedule.micro_batches, tuple(agreed.sizes), slices, positions
            ),
            training=call.trains,
            input_dims=user_batch.input_dims,
            target_dims=user_batch.target_dims,
            known=self._shapes.of(agreed.kind, agreed.signatures),
            learns=bool(agreed.kind) and not self._batching.dynamic_shapes,
            report=report,
            compare=partial(agreement.compare, report),
            await_total=await_total,
            losses=Losses(reports=self._role.reports_loss),
            outputs={} if outputs else None,
            compared=call.trains and self._compares(step),
            diagnoses=diagnoses,
            sequence=sequence,
            input_cuts=input_cuts,
            ways=0 if follows else agreed.ways,
            ready=bool(agreed.signatures),
        )

    def probe(self, batch: Batch, which: int, way: int | None) -> Batch:
        """Some samples of a mini-batch in its first micro-batch, for their outputs alone.

        Args:
            batch: the mini-batch.
            which: number of the samples among those that are compared.
            way: number of the way to cut the inputs; None: as their dimensions say.
        """
        rows = compared_rows(batch.samples, self._parts, ready=batch.ready)
        assert rows is not None, "otherwise nothing is cut"
        count, input_cuts = rows[which].stop - rows[which].start, batch.input_cuts
        rest = self._schedule.micro_batches - 1
        samples = (count, *([0] * rest))
        inputs = None
        if self._role.takes_inputs and input_cuts is not None:
            inputs = MicroBatchPrefetcher(
                [input_cuts.cut(rows[which], way), *([None] * rest)], self._copies, at_once=False
            )
        return Batch(
            step=batch.step,
            inputs=inputs,
            targets=None,
            samples=samples,
            total=count,
            rows=rows_of(self._peers.replica * self._schedule.micro_batches, samples),
            training=False,
            input_dims=batch.input_dims,
            target_dims=batch.target_dims,
            known=None,
            report=batch.report,
            compare=batch.compare,
            outputs={},
            has_loss=False,
            guarded=True,
        )

    def _report(
        self, user_batch: UserBatch, call: CallKind, step: int, *, outputs: bool, follows: bool
    ) -> tuple[CallReport, tuple[int, ...], list[int]]:
        if outputs and call.trains and self._slices is not None:
            raise ConfigError(
                f"{self._schedule.scheme} cuts micro-batches in slices, and a step gives none of their "
                "outputs; call evaluate(outputs=True) or predict"
            )
        counts = user_batch.counts()
        self._refuse_missing(user_batch, call)
        sizes = next((tuple(sizes_by_tree) for sizes_by_tree in counts if sizes_by_tree is not None), ())
        if sizes and not user_batch.ready:
            sizes = even(sum(sizes), self._schedule.micro_batches)
        self._refuse_empty(sizes)
        inputs, targets = (None if sizes_by_tree is None else sum(sizes_by_tree) for sizes_by_tree in counts)
        kind, signatures = user_batch.shape_signatures(call, sizes)
        return (
            CallReport(call, step, outputs, follows, inputs, targets, kind, user_batch.form),
            sizes,
            signatures,
        )

    def _refuse_empty(self, sizes: Sequence[int]) -> None:
        dims = self._role.dims
        if 0 in sizes and sum(sizes) > 0 and dims.in_lockstep and dims.divides_features:
            raise ConfigError(
                f"{sum(sizes)} samples for {len(sizes)} micro-batches: with tensor parallelism and positions "
                "with samples of their own each micro-batch needs one; give more samples, or take fewer "
                "micro-batches"
            )

    def compare(self, report: CallReport, rows: Sequence[CallReport]) -> None:
        """Check that all workers report the same call.

        Raises:
            ConfigError: the calls differ.
        """
        self._agreements[report.call.trains].compare(report, rows)

    def remember(self, batch: Batch) -> None:
        """Know what a batch has shown of its kind."""
        if batch.known is None and batch.learns:
            agreed = self._agreements[batch.training].last
            self._shapes.learn(agreed.kind, agreed.signatures, batch.learnt)

    def forget(self) -> None:
        """Know no shapes any more: which gradients travel is known with them."""
        self._shapes.clear()

    def _needs_targets(self, call: CallKind) -> bool:
        return self._role.takes_targets and self._role.has_loss_function and not call.predicts

    def _refuse_missing(self, user_batch: UserBatch, call: CallKind) -> None:
        worker = self._role.worker
        if self._role.takes_inputs and user_batch.inputs is None:
            raise ConfigError(f"worker {worker} holds the first stage and needs the inputs")
        if self._needs_targets(call) and user_batch.targets is None:
            raise ConfigError(
                f"worker {worker} holds the last stage and needs the targets; where the model itself makes "
                "the loss, let its last layer return it and give loss_function=None"
            )

    def _compares(self, step: int) -> bool:
        if not self._digest_every:
            return False
        first, self._positions_may_differ = self._positions_may_differ, False
        return first or (step + 1) % self._digest_every == 0

    def _has_one_unit(self, agreed: Agreed, call: CallKind, run: PipelineState) -> bool:
        keeps = run.waiting > 0 or call is CallKind.KEEP
        return self._units(agreed, call) * self._peers.replicas == 1 and not keeps

    def _units(self, agreed: Agreed, call: CallKind) -> int:
        sliced = self._slices is not None and call.trains
        parts = self._schedule.workload.slices if sliced else self._parts
        return parts * sum(map(bool, agreed.sizes))
