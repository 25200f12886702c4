"""All schemes for one model: what is the same in each row, what is left out, and what is proved."""

from __future__ import annotations

import math
from typing import Any

import pytest

import counterflow as cf
from counterflow.planning.compared import COMPUTED
from counterflow.planning.task import load_example
from counterflow.schedule import registry
from counterflow.simulation.model_share import CostsOf, of_stages


def test_every_row_computes_the_same_model() -> None:
    found = cf.compare(4, 8, cf.Costs(forward=3.0, backward=5.0, p2p=0.25), moves=50)
    assert {row.scheme for row in found.rows} == {*registry.SCHEMES, COMPUTED}
    for row in found.rows:
        each = sum(row.simulation.busy) / len(row.simulation.schedule.orders)
        updates = row.schedule.micro_batches * row.schedule.periods
        assert each == pytest.approx(updates * (3.0 + 5.0)), row.name
        assert row.step >= 8 * (3.0 + 5.0) * (1 - 1e-9), row.name
    steps = [row.step for row in found.rows]
    assert steps == pytest.approx(sorted(steps), rel=1e-9)
    assert len(found.best) == len({row.scheme for row in found.rows}) + 1  # two computed orders
    assert all(min(r.step for r in found.rows if r.scheme == b.scheme) <= b.step for b in found.best)


def test_literal_rows() -> None:
    found = cf.compare(4, 8, schemes=["gpipe", "1f1b", "zb-v", "chimera", "pipedream-2bw"], stages_a_worker=2)
    rows = {row.name: row for row in found.rows}
    shown = {
        name: (rows[name].step, rows[name].activations, rows[name].weights)
        for name in ("gpipe", "1F1B (dapple)", "1F1B (dapple), split", "zb-v", "chimera", "pipedream-2bw")
    }
    assert shown == {
        "gpipe": (33.0, 8.0, 1.0),
        "1F1B (dapple)": (33.0, 4.0, 1.0),
        "1F1B (dapple), split": (30.0, 4.0, 1.0),
        "zb-v": (25.5, 4.0, 1.0),
        "chimera": (30.0, 4.0, 2.0),
        "pipedream-2bw": (24.0, 4.0, 2.0),
    }
    assert [rows[name].synchronous for name in ("1F1B (dapple)", "pipedream-2bw")] == [True, False]


def test_pipedream_is_counted_for_as_many_micro_batches() -> None:
    """It updates after each micro-batch: eight of its periods are one mini-batch of the others."""
    (row,) = cf.compare(4, 8, schemes=["pipedream"]).rows
    assert (row.schedule.micro_batches, row.step, row.weights) == (1, 24.0, 4.0)


def test_limits_leave_out_what_needs_more() -> None:
    costs = cf.Costs(memory=cf.ByteCosts(weights=100.0, optimizer=200.0, activations=10.0))
    names = ["gpipe", "dapple", "v-min", "chimera"]
    by_peak = cf.compare(4, 8, costs, schemes=names, peak=4)
    assert {row.scheme for row in by_peak.rows} == {"dapple", "v-min", "chimera"}
    assert by_peak.too_large[0].scheme == "chimera"  # forwards are doubled: 8
    assert max(row.activations for row in by_peak.rows) <= 4
    by_bytes = cf.compare(4, 8, costs, schemes=names, memory_bytes=430)
    assert {row.scheme for row in by_bytes.rows} == {"v-min"}
    assert all(row.peak_bytes is not None and row.peak_bytes <= 430 for row in by_bytes.rows)
    assert all(row.peak_bytes is not None and row.peak_bytes > 430 for row in by_bytes.too_large)


def test_weights_and_old_weights_are_limits_too() -> None:
    found = cf.compare(4, 8, copies=1, synchronous=True)
    assert {row.weights for row in found.rows} == {1.0}
    assert all(row.synchronous for row in (*found.rows, *found.too_large))
    assert {row.weights > 1 for row in found.too_large} == {True}


def test_plain_1f1b_is_listed_as_the_baseline() -> None:
    found = cf.compare(4, 8)
    assert found.baseline is not None
    assert found.baseline.step == 33.0
    assert [row.name for row in found.listed if row.scheme == "dapple"] == [
        "1F1B (dapple), split",
        "1F1B (dapple)",
    ]
    beyond = cf.compare(4, 8, peak=2)
    assert beyond.baseline in beyond.too_large
    assert beyond.baseline not in beyond.listed


def test_a_profile_prices_every_schedule_and_orders_computed_for_it() -> None:
    task = load_example("chimera-bert48")
    inputs: dict[str, Any] = {
        "model": task.model,
        "profile": task.profile,
        "cluster": task.cluster,
        "samples": 4,
    }
    names = ["1f1b", "zb-v", "pipedream-2bw", "chimera"]
    found = cf.compare(4, 8, schemes=names, moves=5, **inputs)
    assert found.profiled == "model bert-48 on Piz Daint, 32 nodes · micro-batches of 4"
    planned = cf.predict(
        task.model, task.profile, task.cluster, "zb-v", workers=4, micro_batches=8, samples=4
    )
    rows = {row.name: row for row in (*found.rows, *found.too_large)}
    assert rows["zb-v"].step == planned.step_seconds
    assert rows["zb-v"].peak_bytes == max(planned.peak_bytes)
    assert {row.step < 2 for row in rows.values()} == {True}, "seconds of one mini-batch"
    assert any(row.computed for row in found.rows)
    with pytest.raises(cf.ConfigError, match="need a model, a profile and a cluster"):
        cf.compare(4, 8, profile=task.profile)


def test_a_computed_order_is_within_the_limit_and_its_bound_holds() -> None:
    costs = cf.Costs(forward=3.0, input_gradient=4.0, weight_gradients=2.0, backward=6.0)
    found = cf.compare(4, 8, costs, peak=2, moves=2000)
    computed = [row for row in found.rows if row.scheme == COMPUTED]
    assert {row.schedule.stages for row in computed} == {4, 8}
    for row in computed:
        assert row.activations <= 2
        assert row.lower_bound is not None
        assert row.lower_bound <= row.step
        split = [r for r in found.rows if r.schedule.placement == row.schedule.placement and r.synchronous]
        assert row.step == min(r.step for r in split)


def test_a_scheme_without_a_schedule_of_this_size_is_named_with_the_reason() -> None:
    found = cf.compare(3, 4, schemes=["chimera", "dapple"])
    assert [row.scheme for row in found.best] == ["dapple"]
    ((name, reason),) = found.left_out
    assert name == "chimera"
    assert "even" in reason


def test_an_order_that_cannot_be_computed_is_named_with_the_reason() -> None:
    costs = cf.Costs(memory=cf.ByteCosts(weights=1.0))
    found = cf.compare(2, 2, costs, schemes=["dapple"], memory_bytes=1.0, moves=10)
    assert found.rows == ()
    names, reasons = zip(*found.left_out, strict=True)
    assert names == ("computed straight", "computed in a V")
    assert all("before its first op" in reason for reason in reasons)


def test_costs_of_the_whole_model_are_those_of_all_workers_shares() -> None:
    whole = cf.compare(4, 8, cf.Costs(4.0, 8.0), costs_of="model", schemes=["zb-v", "dapple"])
    share = cf.compare(4, 8, schemes=["zb-v", "dapple"])
    assert [(row.name, row.step) for row in whole.rows] == [(row.name, row.step) for row in share.rows]
    assert (whole.costs_of, share.costs_of) == (CostsOf.MODEL, CostsOf.WORKER)


def test_shares_of_a_forward_are_still_forwards() -> None:
    placement = cf.schemes.zb_v(4, 8).placement
    assert of_stages(cf.Costs(), placement, CostsOf.WORKER).time_unit == "F"
    assert of_stages(cf.Costs(forward=2.0), placement, CostsOf.WORKER).time_unit == "s"


@pytest.mark.parametrize(("field", "unit"), [("weights", "bytes"), ("casts", "bytes"), ("layers", "layers")])
def test_bytes_below_nothing_are_refused(field: str, unit: str) -> None:
    with pytest.raises(cf.ConfigError, match=f"{field}=-1.0: must be a finite number of {unit}, 0 or more"):
        cf.ByteCosts(**{field: -1.0})


def test_bytes_are_shared_out_and_messages_are_not() -> None:
    costs = cf.Costs(
        p2p=0.5, sync=4.0, memory=cf.ByteCosts(weights=8.0, inputs=3.0, activations=4.0, layers=12.0)
    )
    stages = of_stages(costs, cf.schemes.zb_v(4, 8).placement, CostsOf.WORKER)
    assert (stages.forward, stages.backward, stages.sync, stages.p2p) == (0.5, 1.0, 2.0, 0.5)
    assert stages.memory == cf.ByteCosts(weights=4.0, inputs=3.0, activations=2.0, layers=6.0)
    assert of_stages(costs, cf.schemes.zb_v(4, 8).placement, CostsOf.STAGE) is costs
    one = of_stages(cf.Costs(memory=cf.ByteCosts()), cf.schemes.zb_v(4, 8).placement, CostsOf.WORKER).memory
    assert isinstance(one, cf.ByteCosts)
    assert one.layers == 1  # no stage has half a layer


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"workers": 0}, "workers=0: must be 1 or more"),
        ({"micro_batches": 0}, "micro_batches=0: must be 1 or more"),
        ({"stages_a_worker": 0}, "stages_a_worker=0: must be 1 or more"),
        ({"workers": 2_000_000}, "workers=2000000: must be 1 or more, and at most 1,000,000"),
        ({"workers": 100_000}, "schedules of this size have at least .* ops, and at most 20,000,000 are"),
        ({"stages_a_worker": 4097}, "stages_a_worker=4097: must be 1 or more, and at most 1,024"),
        ({"peak": 0}, "peak=0: must be above 0"),
        ({"schemes": ["nothing"]}, "nothing"),
        ({"memory_bytes": 1.0}, "a limit in bytes needs bytes of weights and activations"),
        ({"costs_of": "stage"}, "stages of different schemes differ in size"),
        ({"costs_of": "mile"}, "legal: stage, worker, model"),
        ({"costs": cf.Costs(forward=(1.0, 2.0))}, "forward: 2 numbers are those of one placement's stages"),
    ],
)
def test_what_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(cf.ConfigError, match=said):
        cf.compare(**({"workers": 2, "micro_batches": 4} | asked))  # type: ignore[arg-type]


def test_it_reports_progress_and_shows_itself_in_a_line_and_a_table() -> None:
    told: list[tuple[int, int, str]] = []
    found = cf.compare(2, 4, schemes=["dapple"], moves=10, report=lambda *what: told.append(what))
    assert [number for number, _, _ in told] == list(range(4))
    assert {total for _, total, _ in told} == {4}
    assert repr(found) == (
        "Comparison(2 workers, 4 micro-batches, 4 of 4 schedules within the limits, "
        "best computed in a V: 12.5)"
    )
    assert "<td>1F1B (dapple), split</td><td>14</td>" in found._repr_html_()


def test_without_a_steady_state_the_step_is_not_told() -> None:
    schedule = cf.schemes.pipedream(stages=4, periods=1)
    row = cf.compare(4, 8, schemes=["pipedream"]).rows[0]
    short = type(row)(cf.simulate(schedule), 8)
    assert short.step == math.inf


def test_equal_steps_are_ranked_by_memory_not_by_the_rounding_of_their_sums() -> None:
    found = cf.compare(2, 4, cf.Costs(forward=0.1, backward=0.2), schemes=["gpipe", "1f1b", "chimera"])
    steps = {row.name: row.step for row in found.rows}
    assert 0 < steps["1F1B (dapple)"] - steps["gpipe"] < 1e-12  # 15 tenths, added in two orders
    names = [row.name for row in found.rows]
    assert names.index("1F1B (dapple)") < names.index("gpipe")
    best = next(row for row in found.best if row.scheme == "chimera")
    assert best.step == pytest.approx(1.2)
    assert best.activations == 2.0


def test_a_schedule_fits_into_its_own_memory_whatever_the_order_of_the_sum() -> None:
    costs = cf.Costs(memory=cf.ByteCosts(weights=0.1, optimizer=0.2, activations=0.3))
    (row,) = cf.compare(2, 4, costs, schemes=["zb-h1"]).rows
    assert row.peak_bytes is not None
    less = row.peak_bytes * (1 - 1e-12)
    assert len(cf.compare(2, 4, costs, schemes=["zb-h1"], memory_bytes=less).rows) == 1
    assert not cf.compare(2, 4, costs, schemes=["zb-h1"], memory_bytes=row.peak_bytes * 0.999).rows
