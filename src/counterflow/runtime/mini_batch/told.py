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


class Call(IntEnum):
    """What a worker calls."""

    EVALUATE = 0
    STEP = 1
    KEEP = 2
    """A step without an update."""
    PREDICT = 3
    FLUSH = 4
    REFUSE = -1
    """A call that the worker refuses before any work."""
    STATE_DICT = -2
    """Also ``model_state_dict`` and ``stream_weights``."""
    EMA = -3
    AVERAGED = -4
    SET_TRAINABLE = -5
    TIMELINE = -6
    CLOSE = -7
    OTHER = -8
    """A call that begins otherwise."""
    RECORD = -9
    """A call before which the model is recorded again, as it has changed."""

    def __str__(self) -> str:
        return _IN_WORDS.get(self, self.name.lower())

    @property
    def trains(self) -> bool:
        """Whether it makes gradients."""
        return self in {Call.STEP, Call.KEEP}


_IN_WORDS = {
    Call.KEEP: "step without an update",
    Call.REFUSE: "step, evaluate or predict, and refuses its mini-batch",
    Call.OTHER: "something else",
    Call.RECORD: "step, evaluate or predict with a changed model",
}


class Form(IntEnum):
    """In which form a worker was given a mini-batch."""

    NOTHING = 0
    WHOLE = 1
    READY = 2
    """The mini-batch was passed as ready micro-batches."""


class OfSamples(NamedTuple):
    """What a worker reports of a mini-batch's samples; fields as of ``Told``."""

    inputs: int | None
    targets: int | None
    kind: int
    form: Form


class Told(NamedTuple):
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
        begins: whether the worker begins before it receives the other reports.
        ways: number of other ways to cut the inputs, which are to be tried if outputs say so; 0: no check.
    """

    call: Call
    step: int
    outputs: bool = False
    follows: bool = False
    inputs: int | None = None
    targets: int | None = None
    kind: int = 0
    form: Form = Form.NOTHING
    digests: tuple[float, float] = (0.0, 0.0)
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
            self.begins,
            self.ways,
        )

    @classmethod
    def unpack(cls, row: Sequence[float]) -> Told:
        """What ``pack`` packed; a worker whose call is another one may tell more after it."""
        return _unpacked((*row[:TOLD_WIDTH], *[0.0] * (TOLD_WIDTH - len(row))))

    @property
    def same_on_all(self) -> tuple[object, ...]:
        """The values that must be equal in the reports of all workers."""
        return self.call, self.step, self.outputs, self.follows

    @property
    def of_samples(self) -> OfSamples:
        """What the worker was given, without its contents."""
        return OfSamples(self.inputs, self.targets, self.kind, self.form)

    def __str__(self) -> str:
        outputs = " with outputs" if self.outputs and self.call is not Call.PREDICT else ""
        follows = " without a barrier" if self.follows else ""
        return f"{self.call}{outputs}{follows}, after {self.step} steps"


def refuse_other_calls(mine: Told, rows: Sequence[Told], rank: int) -> None:
    """Refuse the reports of workers that make different calls.

    Args:
        mine: the report of this worker.
        rows: the reports of all, by rank.
        rank: this worker's.

    Raises:
        ConfigError: the calls differ.
    """
    same = mine.same_on_all
    for other, row in enumerate(rows):
        if row.same_on_all != same:
            raise ConfigError(
                f"rank {rank} calls {mine}; rank {other} calls {row}; all workers make the same calls in the "
                "same order"
            )


@lru_cache(maxsize=4096)
def _unpacked(row: tuple[float, ...]) -> Told:
    """The record of a row; many workers report the same, and all report it twice in a step."""
    call, step, outputs, follows, inputs, targets, kind, form, first, second, begins, ways = row
    return Told(
        Call(int(call)) if call in _CALLS else Call.OTHER,
        int(step),
        bool(outputs),
        bool(follows),
        _count(inputs),
        _count(targets),
        int(kind),
        _FORMS[int(form)],
        (first, second),
        bool(begins),
        int(ways),
    )


class Counts(IntFlag):
    """What losses are divided by."""

    SAMPLES = 1
    ELEMENTS = 2
    """The elements counted by one of torch's own losses, if they are not those of all outputs."""
    EITHER = 4
    """Elements that are those of all outputs, and as many in each sample."""
    OTHER = 8
    """Targets of a cross entropy, or what a ``LossSum`` says."""


NOTHING = Counts(0)


class Weighed(NamedTuple):
    """Weights of a worker's losses.

    Attributes:
        weight: sum of their weights.
        counted: union of what they count.
        has_metrics: whether there are metrics in addition to the losses.
        least: smallest share of targets that counts in a micro-batch; infinite if none is known.
        most: largest share of targets that counts in a micro-batch.
        has_graph: whether any of the losses may depend on weights.
    """

    weight: float = 0.0
    counted: Counts = NOTHING
    has_metrics: bool = False
    least: float = float("inf")
    most: float = -float("inf")
    has_graph: bool = False


class Part(NamedTuple):
    """A worker's part of a mini-batch's loss and gradient norm.

    Attributes:
        loss: the sum of its losses.
        squared_norm: of its gradients.
        non_finite: its first micro-batch whose loss is not finite; None: all are.
        weighed: what its losses weigh.
    """

    loss: float
    squared_norm: float
    non_finite: int | None
    weighed: Weighed

    def pack(self) -> tuple[float, ...]:
        """Pack the record as numbers."""
        its = self.weighed
        return (
            self.loss,
            self.squared_norm,
            _NONE if self.non_finite is None else self.non_finite,
            *(its.weight, its.counted.value, its.has_metrics, its.least, its.most, its.has_graph),
        )

    @classmethod
    def unpack(cls, row: Sequence[float]) -> Part:
        """What ``pack`` packed."""
        loss, squared, non_finite, *weighed = row
        return cls(loss, squared, _count(non_finite), _weighed(tuple(weighed)))


@lru_cache(maxsize=4096)
def _weighed(row: tuple[float, ...]) -> Weighed:
    """The record of a row; that of a worker without losses is always the same."""
    weight, counts, has_metrics, least, most, has_graph = row
    return Weighed(weight, _COUNTS[int(counts)], bool(has_metrics), least, most, bool(has_graph))


TOLD_WIDTH, PART_WIDTH = 12, 9
"""Number of values in a packed ``Told`` and in a packed ``Part``."""

_CALLS, _FORMS = frozenset(Call), tuple(Form)
_COUNTS = tuple(map(Counts, range(1 << len(Counts))))
"""Members by number, in a table because the reports of many ranks are read each step."""

_NONE = -1
"""In place of a count, in a row."""


def _count(number: float) -> int | None:
    return None if number == _NONE else int(number)
