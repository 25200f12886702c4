"""Settings of a scheme that only change the order, in the same memory."""

from __future__ import annotations

import pytest

from counterflow.schedule.schemes import dapple, mixpipe
from counterflow.simulation import Costs, order_options, simulate
from counterflow.simulation.order_options import shorter


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        # D = 8: idle 51, 39, 26 and 23 for K = 2; 23, 19 and 17 for K = 4; 15 and 14 for K = 6.
        # Asymmetric 34 for K = 2, Γ = 1.
        ((2, 0), None),
        ((2, 1), "asymmetric"),
        ((2, 2), (4, 0)),
        ((2, 3), (4, 1)),
        ((4, 0), None),
        ((4, 2), (6, 0)),
        ((6, 1), None),
        ((8, 0), None),
        (("max", 0), None),
    ],
)
def test_mixpipe_at_depth_8(setting: tuple[int | str, int], other: tuple[int, int] | str | None) -> None:
    found = shorter(simulate(mixpipe(8, 8, *setting)))
    asymmetric = mixpipe(8, 8, 2, 1, asymmetric=True)
    expected = asymmetric if other == "asymmetric" else other and mixpipe(8, 8, *other)
    assert (found and found.schedule) == expected
    assert shorter(simulate(asymmetric)) is None


def test_costs_are_those_of_the_simulation() -> None:
    costs = Costs(forward=2.0, backward=4.0)
    found = shorter(simulate(mixpipe(8, 8, 2, 2), costs))
    assert found is not None
    assert found.makespan == 2 * 47


def test_an_asymmetric_order_several_times_may_be_longer() -> None:
    found = shorter(simulate(mixpipe(10, 40, 4, 1, asymmetric=True)))
    assert (found and found.schedule) == mixpipe(10, 40, 4, 1)


def test_schemes_without_such_options_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shorter(simulate(dapple(4, 4))) is None
    monkeypatch.setattr(order_options, "MOST_OPS", 100)  # a schedule has 128 ops
    assert shorter(simulate(mixpipe(8, 8, 2, 2))) is None
