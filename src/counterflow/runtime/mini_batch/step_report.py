"""Workers' reports of a call and of its losses: records, and the numbers in which they are sent.

Invariant: a record unpacks from what it packs to, whatever precedes or follows it in a row; no other module
knows the places of the numbers. The consequences of the reports are not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import NamedTuple

from counterflow.errors import ConfigError


class CallKind(IntEnum):
    """Kind of a worker's call."""

    EVALUATE = 0
    STEP = 1
    KEEP = 2
    """A step without an update."""
    PREDICT = 3
    FLUSH = 4
    GENERATE = 5
    """A prompt, or tokens after it; layers keep states for the next ones."""
    GENERATE_WHOLE = 6
    """A whole sequence, with which tokens that ran alone are compared."""
    REFUSE = -1
    """A call that the worker refuses before any work."""
    STATE_DICT = -2
    """Also ``model_state_dict`` and ``stream_weights``."""
    EMA = -3
    AVERAGED = -4
    SET_TRAINABLE = -5
    TIMELINE = -6
    CLOSE = -7
    UNKNOWN = -8
    """A call that begins otherwise."""
    RECORD = -9
    """A call before which the model is recorded again, as it has changed."""
    MEMORY = -10

    def __str__(self) -> str:
        return _IN_WORDS.get(self, self.name.lower())

    @property
    def trains(self) -> bool:
        """True if the call computes gradients."""
        return self in {CallKind.STEP, CallKind.KEEP}

    @property
    def predicts(self) -> bool:
        """True if the call has outputs and no loss."""
        return self in {CallKind.PREDICT, CallKind.GENERATE, CallKind.GENERATE_WHOLE}


_IN_WORDS = {
    CallKind.KEEP: "step without an update",
    CallKind.GENERATE_WHOLE: "generate, whose tokens are compared,",
    CallKind.REFUSE: "step, evaluate or predict, and refuses its mini-batch",
    CallKind.UNKNOWN: "something else",
    CallKind.RECORD: "step, evaluate or predict with a changed model",
}


class BatchForm(IntEnum):
    """Form in which a worker received a mini-batch."""

    NOTHING = 0
    UNSPLIT = 1
    READY = 2
    """The mini-batch was passed as ready micro-batches."""


class SampleCounts(NamedTuple):
    """Samples of a worker's mini-batch; fields as of ``CallReport``."""

    inputs: int | None
    targets: int | None
    kind: int
    form: BatchForm


class CallReport(NamedTuple):
    """A worker's report of a call.

    Attributes:
        call: kind of the call.
        step: number of earlier steps.
        outputs: whether outputs are requested.
        follows: whether the call follows others without an agreement of all workers.
        inputs: number of samples in the inputs; None: the worker has no inputs.
        targets: number of samples in the targets; None: the worker has no targets.
        kind: signature of the inputs; 0: the worker has no inputs.
        form: form in which the mini-batch was passed.
        digests: digests of the contents of inputs and targets; 0: they are not compared.
        sequences: digests of the whole sequences of which inputs and targets are shares; 0: not known.
        begins: whether the worker begins before it receives the other reports.
        ways: number of other ways to cut the inputs, which are to be tried if outputs say so; 0: no check.
    """

    call: CallKind
    step: int
    outputs: bool = False
    follows: bool = False
    inputs: int | None = None
    targets: int | None = None
    kind: int = 0
    form: BatchForm = BatchForm.NOTHING
    digests: tuple[float, float] = (0.0, 0.0)
    sequences: tuple[float, float] = (0.0, 0.0)
    begins: bool = False
    ways: int = 0

    def pack(self) -> tuple[float, ...]:
        """Pack the record as numbers."""
        return (
            self.call,
            self.step,
            self.outputs,
            self.follows,
            _NONE if self.inputs is None else self.inputs,
            _NONE if self.targets is None else self.targets,
            self.kind,
            self.form,
            *self.digests,
            *self.sequences,
            self.begins,
            self.ways,
        )

    @classmethod
    def unpack(cls, row: Sequence[float]) -> CallReport:
        """Unpack a row; the row of a worker that makes a different call may be longer."""
        return _unpacked((*row[:CALL_WIDTH], *[0.0] * (CALL_WIDTH - len(row))))

    @property
    def same_on_all(self) -> tuple[object, ...]:
        """The values that must be equal in the reports of all workers."""
        return self.call, self.step, self.outputs, self.follows

    @property
    def sample_counts(self) -> SampleCounts:
        """Sample counts of the report, without the contents' digests."""
        return SampleCounts(self.inputs, self.targets, self.kind, self.form)

    def __str__(self) -> str:
        outputs = " with outputs" if self.outputs and not self.call.predicts else ""
        follows = " without a barrier" if self.follows else ""
        return f"{self.call}{outputs}{follows}, after {self.step} steps"


def refuse_other_calls(report: CallReport, rows: Sequence[CallReport], rank: int) -> None:
    """Refuse the reports of workers that make different calls.

    Args:
        report: the report of this worker.
        rows: the reports of all, by rank.
        rank: this worker's.

    Raises:
        ConfigError: the calls differ.
    """
    same = report.same_on_all
    for peer, row in enumerate(rows):
        if row.same_on_all != same:
            raise ConfigError(
                f"rank {rank} calls {report}; rank {peer} calls {row}; all workers make the same calls in "
                "the same order"
            )


@lru_cache(maxsize=4096)
def _unpacked(row: tuple[float, ...]) -> CallReport:
    # Many workers report the same, and all report it twice in a step.
    call, step, outputs, follows, inputs, targets, kind, form, *digests, begins, ways = row
    return CallReport(
        CallKind(int(call)) if call in _CALLS else CallKind.UNKNOWN,
        int(step),
        bool(outputs),
        bool(follows),
        _count(inputs),
        _count(targets),
        int(kind),
        _FORMS[int(form)],
        (digests[0], digests[1]),
        (digests[2], digests[3]),
        bool(begins),
        int(ways),
    )


class Normaliser(IntFlag):
    """Quantities that losses are divided by."""

    SAMPLES = 1
    ELEMENTS = 2
    """The elements counted by one of torch's own losses, if they are not those of all outputs."""
    EITHER = 4
    """Elements that are those of all outputs, and as many in each sample."""
    WEIGHTS = 8
    """Targets of a cross entropy, or what a ``LossSum`` says."""


NOTHING = Normaliser(0)


class LossWeights(NamedTuple):
    """Weights of a worker's losses.

    Attributes:
        weight: sum of their weights.
        normaliser: union of their normalisers.
        has_metrics: whether there are metrics in addition to the losses.
        least: smallest share of targets that counts in a micro-batch; infinite if none is known.
        most: largest share of targets that counts in a micro-batch.
        has_graph: whether any of the losses may depend on weights.
    """

    weight: float = 0.0
    normaliser: Normaliser = NOTHING
    has_metrics: bool = False
    least: float = float("inf")
    most: float = -float("inf")
    has_graph: bool = False


class WorkerReport(NamedTuple):
    """A worker's share of a mini-batch's loss and gradient norm.

    Attributes:
        loss: the sum of its losses.
        squared_norm: of its gradients.
        non_finite: its first micro-batch whose loss is not finite; None: all are.
        weights: weights of its losses.
    """

    loss: float
    squared_norm: float
    non_finite: int | None
    weights: LossWeights

    def pack(self) -> tuple[float, ...]:
        """Pack the record as numbers."""
        weights = self.weights
        return (
            self.loss,
            self.squared_norm,
            _NONE if self.non_finite is None else self.non_finite,
            weights.weight,
            weights.normaliser.value,
            *weights[2:],
        )

    @classmethod
    def unpack(cls, row: Sequence[float]) -> WorkerReport:
        """Unpack a row."""
        loss, squared, non_finite, *weights = row
        return cls(loss, squared, _count(non_finite), _unpacked_weights(tuple(weights)))


@lru_cache(maxsize=4096)
def _unpacked_weights(row: tuple[float, ...]) -> LossWeights:
    # A worker without losses always reports the same row.
    weight, counts, has_metrics, least, most, has_graph = row
    return LossWeights(weight, _COUNTS[int(counts)], bool(has_metrics), least, most, bool(has_graph))


CALL_WIDTH, WORKER_WIDTH = 14, 9
"""Number of values in a packed ``CallReport`` and in a packed ``WorkerReport``."""

_CALLS, _FORMS = frozenset(CallKind), tuple(BatchForm)
_COUNTS = tuple(map(Normaliser, range(1 << len(Normaliser))))
"""Members by number, in a table because the reports of many ranks are read each step."""

_NONE = -1
"""In place of a count, in a row."""


def _count(number: float) -> int | None:
    return None if number == _NONE else int(number)
