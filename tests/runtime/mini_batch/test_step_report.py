"""Reports of workers travel as numbers and is the same afterwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterflow.runtime.mini_batch.step_report import (
    CALL_WIDTH,
    WORKER_WIDTH,
    BatchForm,
    CallKind,
    CallReport,
    LossWeights,
    Normaliser,
    WorkerReport,
)

COUNTS = st.none() | st.integers(0, 2**40)
FINITE = st.floats(allow_nan=False)
REPORTS = st.builds(
    CallReport,
    call=st.sampled_from(CallKind),
    step=st.integers(0, 2**40),
    outputs=st.booleans(),
    follows=st.booleans(),
    inputs=COUNTS,
    targets=COUNTS,
    kind=st.integers(0, 2**53),
    form=st.sampled_from(BatchForm),
    digests=st.tuples(FINITE, FINITE),
    begins=st.booleans(),
    ways=st.integers(0, 2**53),
)
WEIGHTS = st.builds(
    LossWeights,
    weight=FINITE,
    normaliser=st.sampled_from(Normaliser),
    has_metrics=st.booleans(),
    least=FINITE,
    most=FINITE,
    has_graph=st.booleans(),
)
PARTS = st.builds(WorkerReport, loss=FINITE, squared_norm=FINITE, non_finite=COUNTS, weights=WEIGHTS)


@given(report=REPORTS, part=PARTS, more=st.lists(FINITE, max_size=3))
def test_a_row_has_what_was_packed(report: CallReport, part: WorkerReport, more: list[float]) -> None:
    row = [float(number) for number in (*report.pack(), *part.pack(), *more)]  # as a gather gives them
    width = CALL_WIDTH + WORKER_WIDTH
    assert (CallReport.unpack(row), WorkerReport.unpack(row[CALL_WIDTH:width]), row[width:]) == (
        report,
        part,
        more,
    )


def test_calls_are_described_in_words() -> None:
    shown = {
        CallReport(CallKind.STEP, 3): "step, after 3 steps",
        CallReport(CallKind.KEEP, 0): "step without an update, after 0 steps",
        CallReport(CallKind.EVALUATE, 1, outputs=True): "evaluate with outputs, after 1 steps",
        CallReport(CallKind.PREDICT, 1, outputs=True): "predict, after 1 steps",
        CallReport(CallKind.FLUSH, 2, follows=True): "flush without a barrier, after 2 steps",
    }
    assert {report: str(report) for report in shown} == shown


def test_only_the_call_has_to_be_the_same_on_all() -> None:
    report = CallReport(CallKind.STEP, 3, inputs=8, kind=5, form=BatchForm.UNSPLIT)
    assert report.same_on_all == CallReport(CallKind.STEP, 3, targets=8).same_on_all
    assert report.same_on_all != CallReport(CallKind.STEP, 3, outputs=True).same_on_all
    assert report.same_on_all != CallReport(CallKind.STEP, 4).same_on_all
