"""Slack: how much later an op could end. A literal case, and each op of some schedules made longer."""

from __future__ import annotations

import pytest

from counterflow.schedule import schemes
from counterflow.schedule.registry import build
from counterflow.simulation import Costs, simulate
from counterflow.simulation.timed_cache import timed


def test_of_a_small_case() -> None:
    """Worker 0: F0 0–1, F1 1–2, B0 4–6, B1 7–9; worker 1: F0 1–2, B0 2–4, F1 4–5, B1 5–7."""
    assert simulate(schemes.dapple(stages=2, micro_batches=2)).slack == (0, 2, 1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("costs", [Costs(), Costs(p2p=0.3, forward=1.1), Costs(p2p=0.7, overlap=False)])
@pytest.mark.parametrize("scheme", ["chimera", "zb-h1", "dapple"])
def test_an_op_may_last_longer_by_its_slack_and_no_more(scheme: str, costs: Costs) -> None:
    schedule = build(scheme, {"stages": 4, "micro_batches": 4})
    found, model = simulate(schedule, costs), timed(schedule)
    assert found.slack is not None
    lasts = found.end - found.start
    for op, slack in enumerate(found.slack):
        for more in (0.0, 0.25):
            longer = lasts.copy()
            longer[op] += slack + more
            times = model.played(model.ready(costs, longer))
            assert times is not None
            assert times.end.max() == pytest.approx(found.end.max() + more)


def test_where_ops_wait_for_syncs_it_is_not_known() -> None:
    schedule = schemes.pipedream(stages=2, periods=4)
    assert simulate(schedule, Costs(sync=1.0, replicas=2)).slack is None
    assert simulate(schedule).slack is not None
