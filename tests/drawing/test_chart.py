"""Contents of charts, and that they cover exactly the time workers are busy."""

from __future__ import annotations

import pytest

from counterflow.drawing import AmountUnit, Box, BoxKind, chart_of
from counterflow.drawing.chart import band_of, marks_input_gradients, ways
from counterflow.drawing.palette import Shade
from counterflow.schedule import schemes
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.registry import build
from counterflow.simulation import ByteCosts, Costs, Simulation, simulate


def simulated(name: str, costs: Costs | None = None, **options: OptionValue) -> Simulation:
    return simulate(build(name, options), costs)


SCHEMES: list[tuple[str, dict[str, OptionValue]]] = [
    ("gpipe", {"stages": 3, "micro_batches": 4, "groups": 2}),
    ("dapple", {"stages": 4, "micro_batches": 6}),
    ("interleaved", {"workers": 3, "micro_batches": 6, "chunks": 3}),
    ("gems", {"stages": 4, "micro_batches": 3}),
    ("chimera", {"stages": 4, "micro_batches": 8}),
    ("chimera", {"stages": 8, "micro_batches": 8, "pairs": 2}),
    ("chimera", {"stages": 4, "micro_batches": 12, "concat": "forward-doubling"}),
    ("chimera", {"stages": 4, "micro_batches": 8, "concat": "backward-halving"}),
    ("hanayo", {"workers": 4, "micro_batches": 4, "waves": 2}),
    ("pipedream", {"stages": 4, "periods": 9}),
    ("pipedream-2bw", {"stages": 3, "micro_batches": 3, "periods": 4}),
    ("wpipe", {"workers": 3, "micro_batches": 4, "periods": 4}),
]


def test_boxes_of_a_small_schedule() -> None:
    chart = chart_of(simulated("gems", stages=2, micro_batches=2))
    forward, backward = BoxKind.FORWARD, BoxKind.BACKWARD
    assert chart.boxes == (
        Box(0, 0.0, 1.0, forward, "0", stage=0, lane=0, pipe=0, micro_batches=(0,), op="F0.0", needs=()),
        Box(0, 4.0, 6.0, backward, "0", stage=0, lane=0, pipe=0, micro_batches=(0,), op="B0.0", needs=(0, 5)),
        Box(0, 6.0, 7.0, forward, "1", stage=1, lane=1, pipe=1, micro_batches=(1,), op="F1.1p1", needs=(6,)),
        Box(0, 7.0, 9.0, backward, "1", stage=1, lane=1, pipe=1, micro_batches=(1,), op="B1.1p1", needs=(2,)),
        Box(1, 1.0, 2.0, forward, "0", stage=1, lane=0, pipe=0, micro_batches=(0,), op="F0.1", needs=(0,)),
        Box(1, 2.0, 4.0, backward, "0", stage=1, lane=0, pipe=0, micro_batches=(0,), op="B0.1", needs=(4,)),
        Box(1, 4.0, 5.0, forward, "1", stage=0, lane=1, pipe=1, micro_batches=(1,), op="F1.0p1", needs=()),
        Box(
            1,
            9.0,
            11.0,
            backward,
            "1",
            stage=0,
            lane=1,
            pipe=1,
            micro_batches=(1,),
            op="B1.0p1",
            needs=(6, 3),
        ),
    )
    assert (chart.workers, chart.makespan, chart.memory, chart.steady) == (2, 11.0, None, None)
    assert chart.title == "gems  D=2, N=2 — makespan 11 F, bubble ratio 45.5 %, peak 1 activation"


@pytest.mark.parametrize(("name", "options"), SCHEMES)
def test_bubbles_stay_empty(name: str, options: dict[str, OptionValue]) -> None:
    result = simulate(build(name, options), Costs(p2p=0.25))
    chart = chart_of(result)
    assert sum(map(len, chart.rows())) == len(result.timeline)
    for worker, row in enumerate(chart.rows()):
        gaps, now = 0.0, 0.0
        for box in row:
            assert box.start >= now
            gaps += box.start - now
            now = box.end
        gaps += chart.makespan - now
        assert gaps == pytest.approx(result.idle[worker])


@pytest.mark.parametrize(
    ("name", "options", "lanes"),
    [
        ("dapple", {"stages": 2, "micro_batches": 2}, [("", 0)]),
        ("chimera", {"stages": 2, "micro_batches": 2}, [("down pipe", 0), ("up pipe", 1)]),
        (
            "chimera",
            {"stages": 4, "micro_batches": 4, "pairs": 2},
            [("down pipe 0", 0), ("down pipe 1", 2), ("up pipe 0", 1), ("up pipe 1", 3)],
        ),
        ("hanayo", {"workers": 2, "micro_batches": 2}, [("leg 0", 0), ("leg 1", 1)]),
        ("wpipe", {"workers": 2, "micro_batches": 2}, [("group 0", 0), ("group 1", 1)]),
        (
            "interleaved",
            {"workers": 2, "micro_batches": 2, "chunks": 3},
            [("chunk 0", 0), ("chunk 1", 1), ("chunk 2", 2)],
        ),
    ],
)
def test_lanes(name: str, options: dict[str, OptionValue], lanes: list[tuple[str, int]]) -> None:
    chart = chart_of(simulate(build(name, options)))
    assert [(lane.name, lane.hue) for lane in chart.lanes] == lanes


def test_directions_never_share_a_hue() -> None:
    chart = chart_of(simulated("chimera", stages=32, micro_batches=32, pairs=16))
    assert len(chart.lanes) == 32
    assert {lane.hue % 2 for lane in chart.lanes if lane.name.startswith("down")} == {0}
    assert {lane.hue % 2 for lane in chart.lanes if lane.name.startswith("up")} == {1}
    assert chart.legend()[0] == (0, "down pipe 0, 4, …, 12")


def test_lane_of_a_stage_is_the_chunk_of_its_worker() -> None:
    result = simulated("hanayo", workers=3, micro_batches=2, waves=2)
    placement = result.schedule.placement
    for box in chart_of(result).boxes:
        assert box.lane == placement.chunk(0, box.stage)


def test_labels_and_details() -> None:
    halved = chart_of(simulated("chimera", stages=2, micro_batches=4, concat="backward-halving"))
    assert {"0", "0a", "0b"} <= {box.label for box in halved.boxes}
    assert {box.detail for box in halved.boxes} == {"", "half 1 of 2", "half 2 of 2"}
    doubled = chart_of(simulated("chimera", stages=2, micro_batches=4, concat="forward-doubling"))
    assert "0,1" in {box.label for box in doubled.boxes}
    late = chart_of(simulated("pipedream", stages=2, periods=4))
    assert late.boxes[-1].detail == "period 3, weights of version 3"


def test_split_backwards_are_kinds_of_their_own() -> None:
    split = chart_of(simulate(schemes.zb_h1(stages=2, micro_batches=2)))
    last = [(box.kind, box.what) for box in split.rows()[0]][-2:]
    assert last == [
        (BoxKind.INPUT_GRADIENT, "input gradient of micro-batch 1"),
        (BoxKind.WEIGHT_GRADIENTS, "weight gradients of micro-batch 1"),
    ]
    assert ways(split) == "forward | input gradient | weight gradients"
    plain = chart_of(simulated("dapple", stages=2, micro_batches=2))
    assert ways(plain) == "forward | backward"
    recomputed = chart_of(simulated("dapple", Costs(recompute="stage"), stages=2, micro_batches=2))
    assert ways(recomputed) == "forward | backward | recomputation"
    bands = {kind: band_of(kind, marked=False) for kind in BoxKind}
    assert {kind for kind, band in bands.items() if band is not None} == {BoxKind.RECOMPUTATION}
    assert band_of(BoxKind.INPUT_GRADIENT, marked=True) is Shade.LIGHT
    assert [marks_input_gradients(charts) for charts in ([split], [plain], [split, plain])] == [
        False,
        False,
        True,
    ]


def test_what_is_told_of_a_box() -> None:
    chart = chart_of(simulated("hanayo", workers=2, micro_batches=2))
    box = next(box for box in chart.boxes if box.op == "B1.2")
    assert box.what == "backward of micro-batch 1"
    assert dict(chart.facts(box)) | {"needs": ""} == {
        "op": "B1.2",
        "stage": "2",
        "worker": "1",
        "leg": "leg 1",
        "needs": "",
        "start": f"{box.start:g} F",
        "end": f"{box.end:g} F",
    }
    assert [text for name, text in chart.facts(box) if name == "needs"] == [
        "forward of micro-batch 1, stage 2, worker 1",
        "backward of micro-batch 1, stage 3, worker 0",
    ]


def test_bubbles_fill_what_ops_leave_free_and_are_split_by_cause() -> None:
    chart = chart_of(simulated("dapple", Costs(p2p=0.5), stages=2, micro_batches=2))
    assert [(b.worker, b.start, b.end, b.cause) for b in chart.bubbles] == [
        (0, 2.0, 4.5, "dependency"),
        (0, 4.5, 5.0, "message"),
        (0, 7.0, 7.5, "dependency"),
        (0, 7.5, 8.0, "message"),
        (1, 0.0, 1.5, "warm-up"),
        (1, 7.5, 10.0, "drain"),
    ]
    assert chart.split == "bubbles 40 %: warm-up 7.5 %, dependency 15 %, message 5 %, drain 12.5 %"


def test_syncs_are_boxes_of_their_own() -> None:
    chart = chart_of(simulated("chimera", Costs(sync=1.5), stages=2, micro_batches=2))
    syncs = [box for row in chart.sync_rows() for box in row]
    assert {(box.kind, box.lane, box.end - box.start) for box in syncs} == {(BoxKind.SYNC, None, 1.5)}
    assert syncs[0].what.startswith("gradient sync of stage ")
    assert chart.has_syncs
    assert all(box.kind is not BoxKind.SYNC for row in chart.rows() for box in row)


def test_memory_in_activations_or_bytes() -> None:
    plain = chart_of(simulated("dapple", stages=2, micro_batches=4), memory=True)
    assert plain.memory is not None
    assert (plain.memory.unit, plain.memory.peak) == (AmountUnit.ACTIVATIONS, 2.0)
    costs = Costs(memory=ByteCosts(weights=2**30, activations=2**29))
    heavy = chart_of(simulated("dapple", costs, stages=2, micro_batches=4), memory=True)
    assert heavy.memory is not None
    assert (heavy.memory.unit, heavy.memory.peak) == (AmountUnit.BYTES, 3 * 2**30)
    assert heavy.summary.endswith("peak 3 GiB")


def test_steady_part_of_an_asynchronous_schedule() -> None:
    result = simulated("pipedream", stages=3, periods=6)
    steady = chart_of(result).steady
    assert steady is not None
    assert result.schedule.steady is not None
    for row, (begin, stop), (start, end) in zip(
        chart_of(result).rows(), result.schedule.steady, steady, strict=True
    ):
        assert (start, end) == (row[begin].start, row[stop - 1].end)


def test_heading_tells_options_that_change_something() -> None:
    costs = Costs(replicas=2, recompute="stage")
    chart = chart_of(simulated("chimera", costs, stages=4, micro_batches=4, pairs=2))
    assert chart.heading == "chimera  D=4, N=4, f=2, direct, W=2, recompute stage"
    chart = chart_of(simulated("wpipe", workers=2, micro_batches=2, periods=3))
    assert chart.heading == "wpipe  P=2, N=2, 3 periods"
    assert "(steady 0 %)" in chart.summary


def test_short_times_get_a_short_unit() -> None:
    chart = chart_of(simulated("dapple", Costs(0.001, 0.002), stages=2, micro_batches=2))
    assert chart.summary.startswith("makespan 9 ms")
