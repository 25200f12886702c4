"""The HTML page: whole, offline, and safe with any title."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from counterflow.drawing import Box, BoxKind, BoxLane, Chart, chart_of
from counterflow.drawing.page import page, page_data
from counterflow.schedule import schemes
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.registry import build
from counterflow.simulation import ByteCosts, Costs, Simulation, simulate


def simulated(name: str, costs: Costs | None = None, **options: OptionValue) -> Simulation:
    return simulate(build(name, options), costs)


def embedded(text: str) -> Any:
    match = re.search(r"^const DATA = (.*);$", text, re.MULTILINE)
    assert match
    return json.loads(match[1])


class Tags(HTMLParser):
    """Elements of a page, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "action"}]


def test_one_box_an_op() -> None:
    result = simulated("chimera", Costs(sync=1), stages=4, micro_batches=8, concat="backward-halving")
    data = embedded(page([chart_of(result)]))
    (chart,) = data["charts"]
    count = len(result.timeline) + len(result.syncs)
    for column in ("worker", "start", "end", "kind", "lane", "stage", "label", "what", "detail"):
        assert len(chart[column]) == count
    assert chart["kind"].count(data["syncKind"]) == len(result.syncs)
    shown = {chart["texts"][i] for i in chart["what"]}
    assert {"forward of micro-batch 3", "backward of micro-batch 3", "gradient sync of stage 2"} <= shown


def test_kinds_and_their_shades() -> None:
    data = embedded(page([chart_of(simulate(schemes.dualpipe_v(workers=2, micro_batches=4)))]))
    (chart,) = data["charts"]
    assert chart["ways"] == "forward | backward | input gradient | weight gradients"
    assert [data["shades"][kind] for kind in chart["kinds"]] == [0, 1, 1, 2]
    assert [data["bands"][kind] for kind in chart["kinds"]] == [None, None, 0, None]
    assert set(chart["kind"]) == set(chart["kinds"])
    assert all(len(hue) == 3 for hue in [*data["hues"], data["neutral"], data["ink"]])
    split = embedded(page([chart_of(simulate(schemes.zb_h1(stages=2, micro_batches=3)))]))
    assert [split["bands"][kind] for kind in split["charts"][0]["kinds"]] == [None] * 3
    recomputed = embedded(page([chart_of(simulate(schemes.gpipe(2, 2), Costs(recompute="stage")))]))
    assert [recomputed["bands"][kind] for kind in recomputed["charts"][0]["kinds"]] == [None, None, 1]


def test_needs_and_causes_reach_the_page() -> None:
    result = simulated("dapple", Costs(p2p=0.5), stages=2, micro_batches=2)
    (chart,) = embedded(page([chart_of(result)]))["charts"]
    ops = [(chart["texts"][what], stage) for what, stage in zip(chart["what"], chart["stage"], strict=True)]
    needed = chart["needs"][ops.index(("backward of micro-batch 1", 0))]
    assert [ops[need] for need in needed] == [
        ("forward of micro-batch 1", 0),
        ("backward of micro-batch 1", 1),
    ]
    bubbles = [[worker, start, end, chart["texts"][cause]] for worker, start, end, cause in chart["bubbles"]]
    assert bubbles == [[gap.worker, gap.start, gap.end, gap.cause.value] for gap in result.gaps]
    assert chart["split"].startswith("bubbles 40 %: ")


def test_boxes_come_in_the_order_the_page_searches() -> None:
    data = embedded(page([chart_of(simulated("chimera", Costs(sync=1), stages=4, micro_batches=8))]))
    (chart,) = data["charts"]
    syncs = (kind == data["syncKind"] for kind in chart["kind"])
    keys = list(zip(chart["worker"], syncs, chart["start"], chart["end"], strict=True))
    assert keys == sorted(keys)


def test_the_page_loads_nothing() -> None:
    text = page([chart_of(simulated("chimera", stages=4, micro_batches=4), memory=True)])
    tags = Tags()
    tags.feed(text)
    assert tags.links == ["data:,"]
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text


def test_titles_are_text() -> None:
    evil = "</script><img src=x onerror=alert(1)> & <!-- \u2028"
    box = Box(0, 0.0, 1.0, BoxKind.FORWARD, evil, stage=0, lane=0, detail=evil)
    text = page([Chart(evil, evil, 1, 1.0, (BoxLane(evil, 0),), (box,))])
    assert evil not in text
    tags = Tags()
    tags.feed(text)
    assert "img" not in tags.opened
    assert tags.opened.count("script") == 1
    assert embedded(text)["charts"][0]["heading"] == evil


def test_charts_share_the_end_and_the_scale_of_memory() -> None:
    costs = Costs(memory=ByteCosts(activations=2**30))
    dapple = simulated("dapple", costs, stages=4, micro_batches=8)
    chimera = simulated("chimera", costs, stages=4, micro_batches=8)
    data = embedded(page([chart_of(dapple, memory=True), chart_of(chimera, memory=True)]))
    assert data["end"] == dapple.makespan
    assert {chart["memory"]["most"] for chart in data["charts"]} == {4 * 2**30}
    assert data["charts"][0]["memory"]["peaks"] == ["4 GiB", "3 GiB", "2 GiB", "1 GiB"]


def test_page_of_many_ops_is_small() -> None:
    result = simulated("chimera", stages=32, micro_batches=128)
    assert len(result.timeline) == 8192
    assert len(page([chart_of(result)])) < 400_000


def test_steady_part_reaches_the_page() -> None:
    (chart,) = embedded(page([chart_of(simulated("pipedream", stages=2, periods=4))]))["charts"]
    assert chart["steady"] == [[4, 10], [2, 11]]


def test_what_is_no_number_is_refused() -> None:
    chart = Chart(
        "x", "", 1, 1.0, (BoxLane("", 0),), (Box(0, 0.0, float("nan"), BoxKind.FORWARD, "0", 0, 0),)
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        page([chart])
    assert page_data([])["charts"] == []
