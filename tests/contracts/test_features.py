"""Every feature and pair of features: the numbers of plain torch, a state that survives, clean errors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import counterflow as cf
from counterflow.schedule import registry
from counterflow.schedule.registry import schedule_of

from ..tables import WHOLE, turns
from .features import DECAY, FEATURES, SCHEMES, Case, Feature
from .one_process import OneProcess, Training

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's

CLOSED = "the pipeline is closed, because an earlier call failed"

Work = tuple[Training, Training, tuple[int, ...], dict[int, Any]]
"""The training as a whole, the same with its last steps from a saved state, the cuts, and captured stages."""


class FaultError(Exception):
    """The user's own error."""


class Piped:
    """A worker's trainer of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.fails = case, False
        self.pipeline = cf.Pipeline(
            case.layers(),
            self._loss,
            case.schedule,
            optimizer=case.optimizer,
            scheduler=case.scheduler,
            **case.options,
        )
        if case.largest("ema"):
            self.pipeline.ema(DECAY)

    def _loss(self, output: Tensor, target: Tensor) -> Any:
        if self.fails:
            raise FaultError
        return self.case.loss(output, target)

    def train(self, steps: Sequence[int]) -> list[float]:
        reports = [self._step(step) for step in steps] + self.pipeline.flush()
        losses = {report.reports_step: report.loss for report in reports if report.reports_step is not None}
        return [losses[step] for step in steps]

    def _step(self, step: int) -> Any:
        update = (step + 1) % self.case.largest("together") == 0
        return self.pipeline.step(*self.case.batch(step, self.pipeline.replica), update=update)

    def training(self, losses: list[float], step: int) -> Training:
        evaluation = self.pipeline.evaluate(*self.case.batch(step, self.pipeline.replica)).loss
        average = self.pipeline.model_state_dict(ema=True) if self.case.largest("ema") else {}
        return Training(losses, self.pipeline.model_state_dict(), average, evaluation)

    def fail(self) -> None:
        """A step that fails on the last stage ends on all workers, and every later call says so."""
        self.fails = True

        def steps() -> None:
            for _ in range(4):  # an error of an asynchronous step is reported by a later one
                self._step(self.case.steps - 1)
            self.pipeline.flush()

        with pytest.raises(cf.CounterflowError):
            steps()
        self.fails = False
        for call in (lambda: self._step(0), self.pipeline.state_dict):
            with pytest.raises(cf.WorkerError, match=CLOSED):
                call()
        self.pipeline.close()


def parts_of(case: Case) -> tuple[range, range]:
    """Steps before a state is saved, and after it."""
    return range(case.steps - 2), range(case.steps - 2, case.steps)


def work(case: Case) -> Work:
    """Train a case."""
    trainer = Piped(case)
    before, after = parts_of(case)
    losses = trainer.train(before)
    file = io.BytesIO()
    torch.save(trainer.pipeline.state_dict(), file)
    whole = trainer.training(losses + trainer.train(after), case.steps)
    cuts, captured = trainer.pipeline.cuts, trainer.pipeline.captured
    trainer.pipeline.close()
    file.seek(0)
    resumed = Piped(case)
    resumed.pipeline.load_state_dict(torch.load(file, weights_only=True))
    parts = resumed.training(losses + resumed.train(after), case.steps)
    resumed.fail()
    return whole, parts, cuts, captured


def same_numbers(training: Training, expected: Training, begin: dict[str, Tensor], tolerance: float) -> None:
    """Compare losses, and changes of tensors relative to the largest change."""
    losses = [*training.losses, training.evaluation], [*expected.losses, expected.evaluation]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance, nan_ok=True)
    for state, values in ((training.state, expected.state), (training.average, expected.average)):
        assert state.keys() == values.keys()
        errors = {name: float((state[name] - value).abs().max()) for name, value in values.items()}
        largest = max(
            (float((value - begin[name]).abs().max()) for name, value in values.items()), default=0.0
        )
        wrong = {name: error for name, error in errors.items() if not error <= tolerance * largest}
        assert not wrong, f"errors {wrong} of changes up to {largest:.3g}"


ASYNCHRONOUS = "asynchronous"
REFUSED: dict[tuple[str, str], str] = {
    (ASYNCHRONOUS, "tied weights"): "is a weight of several stages; do not tie them",
    (ASYNCHRONOUS, "deferred batch norm"): "begins a mini-batch before the one before has ended",
    (ASYNCHRONOUS, "counted loss"): "updates weights before the LossSum of all micro-batches is known",
    (ASYNCHRONOUS, "accumulation"): "cannot make a step without an update",
    (ASYNCHRONOUS, "skipped update"): "skip_non_finite cannot skip an update everywhere",
    (ASYNCHRONOUS, "sharded updates"): "zero_stage = 1: .* updates each stage at its own time",
    (ASYNCHRONOUS, "small sums"): "gradient_compression.*: .* updates each stage at its own time",
    (ASYNCHRONOUS, "loss scale"): "loss_scale cannot skip an update everywhere",
    ("added loss", "counted loss"): "micro-batches have other shares of targets that count",
    ("no barrier", "sharded updates"): "zero_stage = 1: updated weights are sent when a step ends",
    ("small sums", "loss scale"): "gradient_compression.* does not go with a loss scale",
    ("autocast", "bfloat16"): "compute_dtype replaces weights while layers run; autocast does not go with it",
    (
        "loss scale",
        "bfloat16",
    ): "compute_dtype replaces weights while layers run; autocast does not go with it",
    ("bfloat16", "compiled"): "compute_dtype replaces weights while layers run; compile does not go with it",
    ("compiled", "captured"): "capture: compile runs code that is no operator of torch",
    ("slices", "balance"): "has no loss of a whole micro-batch where it cuts them in slices",
    ("slices", "doubled"): "micro-batches that run together, or are halved, cannot be sliced",
    ("slices", "halved"): "micro-batches that run together, or are halved, cannot be sliced",
    ("slices", "batch norm"): "makes something else of a whole sequence than of its 2 slices",
    ("slices", "deferred batch norm"): "would normalise each slice by its own mean",
}
"""Errors of features that do not go together, or with asynchronous schemes."""


ROUNDED = {("split", "slices")}
"""Features whose resumed training has the same numbers to rounding: the first graph of a stage whose backward
is split is one piece, later ones are several, so gradients that slices share are added in another order."""


def is_exact(case: Case) -> bool:
    """True if a resumed training has the same numbers bit for bit."""
    names = {feature.name for feature in case.features}
    return case.exact and not any(set(pair) <= names for pair in ROUNDED)


def refusals(case: Case) -> list[str]:
    """Errors of which one has to be raised."""
    kinds = [feature.name for feature in case.features]
    if not registry.scheme(case.scheme.name).synchronous:
        kinds.append(ASYNCHRONOUS)
    return [text for pair, text in REFUSED.items() if set(pair) <= set(kinds)]


def cases(features: Sequence[tuple[Feature, ...]], share: int = 1) -> list[Case]:
    """Features with the schemes that have them; ``make test`` takes a share of rows, and a scheme of each."""
    rows = [[case for scheme in SCHEMES.values() if (case := Case(scheme, row)).exists] for row in features]
    return turns([row for row in rows if row], share)


def trained(case: Case) -> list[Work]:
    """Results of ``work`` by worker."""
    workers = schedule_of(case.schedule, {}).workers * case.replicas
    return cf.launch(work, case, workers=workers, transport=case.transport, timeout_seconds=60, threads=1)


def check(case: Case) -> None:
    """Compare all workers with one process, or see that the case is refused."""
    if errors := refusals(case):
        with pytest.raises(cf.CounterflowError, match="|".join(errors)):
            trained(case)
        return
    trainings = trained(case)
    plain = OneProcess(case, trainings[0][2])
    begin = {name: value.clone() for name, value in plain.model.state_dict().items()}
    before, after = parts_of(case)
    expected = plain.training(plain.train(before) + plain.train(after), case.steps)
    for whole, parts, _, captured in trainings:
        same_numbers(whole, expected, begin, case.tolerance)
        same_numbers(parts, whole, begin, 0.0 if is_exact(case) else case.tolerance)
        assert all(report.units or report.reason for report in captured.values())


@pytest.mark.parametrize("case", cases([(feature,) for feature in FEATURES.values()]), ids=str)
def test_a_feature(case: Case) -> None:
    check(case)


PAIRS = [
    pair
    for pair in combinations(FEATURES.values(), 2)
    if WHOLE or FEATURES["compiled"] not in pair  # takes seconds
]


@pytest.mark.parametrize("case", cases(PAIRS, share=8), ids=str)
def test_a_pair(case: Case) -> None:
    check(case)
