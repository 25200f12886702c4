"""What workers tell each other travels as numbers and is the same afterwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterflow.runtime.mini_batch.told import (
    PART_WIDTH,
    TOLD_WIDTH,
    Call,
    Counts,
    Form,
    Part,
    Told,
    Weighed,
)

COUNTS = st.none() | st.integers(0, 2**40)
FINITE = st.floats(allow_nan=False)
TOLD = st.builds(
    Told,
    call=st.sampled_from(Call),
    step=st.integers(0, 2**40),
    outputs=st.booleans(),
    follows=st.booleans(),
    inputs=COUNTS,
    targets=COUNTS,
    kind=st.integers(0, 2**53),
    form=st.sampled_from(Form),
    digests=st.tuples(FINITE, FINITE),
    begins=st.booleans(),
    ways=st.integers(0, 2**53),
)
WEIGHED = st.builds(
    Weighed,
    weight=FINITE,
    counted=st.sampled_from(Counts),
    has_metrics=st.booleans(),
    least=FINITE,
    most=FINITE,
    has_graph=st.booleans(),
)
PART = st.builds(Part, loss=FINITE, squared_norm=FINITE, non_finite=COUNTS, weighed=WEIGHED)


@given(told=TOLD, part=PART, more=st.lists(FINITE, max_size=3))
def test_a_row_has_what_was_packed(told: Told, part: Part, more: list[float]) -> None:
    row = [float(number) for number in (*told.pack(), *part.pack(), *more)]  # as a gather gives them
    width = TOLD_WIDTH + PART_WIDTH
    assert (Told.unpack(row), Part.unpack(row[TOLD_WIDTH:width]), row[width:]) == (told, part, more)


def test_calls_are_told_in_words() -> None:
    shown = {
        Told(Call.STEP, 3): "step, after 3 steps",
        Told(Call.KEEP, 0): "step without an update, after 0 steps",
        Told(Call.EVALUATE, 1, outputs=True): "evaluate with outputs, after 1 steps",
        Told(Call.PREDICT, 1, outputs=True): "predict, after 1 steps",
        Told(Call.FLUSH, 2, follows=True): "flush without a barrier, after 2 steps",
    }
    assert {told: str(told) for told in shown} == shown


def test_only_the_call_has_to_be_the_same_on_all() -> None:
    one = Told(Call.STEP, 3, inputs=8, kind=5, form=Form.WHOLE)
    assert one.same_on_all == Told(Call.STEP, 3, targets=8).same_on_all
    assert one.same_on_all != Told(Call.STEP, 3, outputs=True).same_on_all
    assert one.same_on_all != Told(Call.STEP, 4).same_on_all
