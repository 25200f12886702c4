"""PNG, SVG and PDF: the right colours in the right places, one shape an op."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba_array
from matplotlib.image import imread
from matplotlib.patches import Patch
from matplotlib.text import Text

from counterflow import ConfigError
from counterflow.drawing import Box, BoxKind, BoxLane, Chart, chart_of, draw, draw_charts, palette
from counterflow.drawing.figure import make_figure
from counterflow.schedule import schemes
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.registry import build
from counterflow.simulation import Costs, Simulation, simulate

PATH = "{http://www.w3.org/2000/svg}path"
TITLE = "{http://www.w3.org/2000/svg}title"


def simulated(name: str, costs: Costs | None = None, **options: OptionValue) -> Simulation:
    return simulate(build(name, options), costs)


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def groups(path: Path) -> dict[str, int]:
    """Number of paths of each named group of an SVG."""
    tree = ET.parse(path)
    named = [element for element in tree.iter() if element.get("id", "").startswith("chart-")]
    return {element.get("id", ""): len(element.findall(PATH)) for element in named}


@pytest.mark.parametrize(
    "schedule",
    [
        build("chimera", {"stages": 4, "micro_batches": 4}),
        schemes.zb_h1(stages=4, micro_batches=4),
        schemes.dualpipe_v(workers=4, micro_batches=8),
    ],
    ids=str,
)
def test_boxes_and_bubbles_have_their_colours(schedule: Schedule) -> None:
    chart = chart_of(simulate(schedule))
    figure = make_figure([chart])
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    pixels = np.rint(imread(file)[:, :, :3] * 255).astype(int)
    (axes,) = (axes for axes in figure.axes if axes.get_label() == "timeline 0")

    def at(seconds: float, worker: int, down: float = 0.2) -> tuple[int, ...]:
        # A quarter of a row down, above the numbers.
        x, y = axes.transData.transform((seconds, worker + down))
        return tuple(pixels[pixels.shape[0] - 1 - round(y), round(x)].tolist())

    for box in chart.boxes:
        assert box.lane is not None
        hue = palette.hue(chart.lanes[box.lane].hue)
        wanted = {
            BoxKind.FORWARD: hue.forward,
            BoxKind.BACKWARD: hue.backward,
            BoxKind.INPUT_GRADIENT: hue.backward,
            BoxKind.WEIGHT_GRADIENTS: hue.weights,
        }[box.kind]
        assert at((box.start + box.end) / 2, box.worker) == rgb(wanted)
        if box.kind is not BoxKind.FORWARD:
            # Input gradients have a light foot where there are backwards too.
            marked = BoxKind.BACKWARD in chart.kinds and box.kind is BoxKind.INPUT_GRADIENT
            foot = at((box.start + box.end) / 2, box.worker, 0.85)
            assert (foot == rgb(hue.forward)) is marked
    for worker, row in enumerate(chart.rows()):
        for before, after in pairwise(row):
            if after.start > before.end:
                assert at((before.end + after.start) / 2, worker) == rgb(palette.BACKGROUND)


def test_svg_has_one_shape_an_op(tmp_path: Path) -> None:
    result = simulated("chimera", Costs(sync=1), stages=4, micro_batches=8)
    draw(result, tmp_path / "x.svg")
    paths = groups(tmp_path / "x.svg")
    assert paths == {
        "chart-0-forward-0": 16,
        "chart-0-backward-0": 16,
        "chart-0-forward-1": 16,
        "chart-0-backward-1": 16,
        "chart-0-sync": len(result.syncs),
        "chart-0-bubbles": len(result.gaps),
    }


def test_svg_tells_of_each_op_and_bubble(tmp_path: Path) -> None:
    draw(simulated("hanayo", workers=2, micro_batches=2), tmp_path / "x.svg")
    titles = [title.text or "" for title in ET.parse(tmp_path / "x.svg").iter(TITLE)]
    assert (
        "backward of micro-batch 1\nop B1.3\nstage 3\nworker 0\nleg leg 1\n"
        "needs forward of micro-batch 1, stage 3, worker 0\nstart 7 F\nend 9 F"
    ) in titles
    assert "bubble: warm-up\nworker 1\nfrom 0 F to 1 F" in titles


def test_same_file_each_time(tmp_path: Path) -> None:
    result = simulated("wpipe", workers=2, micro_batches=2, periods=4)
    for suffix in ("svg", "pdf", "png"):
        first, second = tmp_path / f"one.{suffix}", tmp_path / f"other.{suffix}"
        draw(result, first)
        draw(result, second)
        assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("memory", [False, True])
def test_charts_share_the_time_axis(memory: bool) -> None:
    results = [simulated(name, stages=4, micro_batches=8) for name in ("gems", "chimera")]
    figure = make_figure([chart_of(result, memory=memory) for result in results])
    axes = [a for a in figure.axes if str(a.get_label()).startswith(("timeline", "memory"))]
    assert len(axes) == (4 if memory else 2)
    assert {a.get_xlim() for a in axes} == {(0.0, results[0].makespan)}
    assert len({(a.get_position().x0, a.get_position().x1) for a in axes}) == 1
    texts = [text.get_text() for text in figure.texts]
    assert "makespan 30 F, bubble ratio 20 %, peak 4 activations" in texts


@pytest.mark.parametrize(("workers", "pairs"), [(2, 1), (4, 2), (12, 1), (16, 2)])
def test_nothing_overlaps_and_all_is_on_the_sheet(workers: int, pairs: int) -> None:
    result = simulated("chimera", Costs(sync=1), stages=workers, micro_batches=workers, pairs=pairs)
    figure = make_figure([chart_of(result, memory=True)] * 2)
    canvas: Any = FigureCanvasAgg(figure)  # its methods are not typed
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = [
        text.get_window_extent(renderer)
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_visible() and text.get_text().strip()
    ]
    legends = [axes.get_legend() for axes in figure.axes]
    assert sum(legend is not None for legend in legends) == 2
    left, bottom, right, top = np.array([box.extents for box in shown]).T
    assert left.min() >= 0
    assert bottom.min() >= 0
    assert right.max() <= figure.bbox.x1
    assert top.max() <= figure.bbox.y1
    wide = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    tall = np.minimum.outer(top, top) - np.maximum.outer(bottom, bottom)
    # Boxes of text include room for letters that reach lower than digits.
    overlap = (wide > 1) & (tall > 2.5)
    assert overlap.sum() == len(shown)  # each with itself


def test_numbers_are_left_out_where_most_do_not_fit() -> None:
    roomy = make_figure([chart_of(simulated("chimera", stages=4, micro_batches=4))])
    assert sum(len(axes.texts) for axes in roomy.axes) == 32
    tight = make_figure([chart_of(simulated("chimera", stages=8, micro_batches=256))])
    assert sum(len(axes.texts) for axes in tight.axes) == 0


def test_a_chart_that_comes_from_no_simulation(tmp_path: Path) -> None:
    box = Box(0, 0.0, 0.25, BoxKind.FORWARD, "$x^", stage=0, lane=0, pipe=0, micro_batches=(0,))
    chart = Chart("measured $1 <run>", "", 2, 0.5, (BoxLane("", 0),), (box,))
    empty = Chart("nothing ran", "", 1, 0.0, (BoxLane("", 0),), ())
    for suffix in ("png", "svg", "html", "trace.json"):
        draw_charts([chart, empty], tmp_path / f"x.{suffix}")
    # One box, and no letter of what stands in it or above is taken for a formula or a tag.
    titles = [title.text or "" for title in ET.parse(tmp_path / "x.svg").iter(TITLE)]
    assert [title for title in titles if title.startswith("forward")] == [
        "forward of micro-batch 0\nstage 0\nworker 0\nstart 0 ms\nend 250 ms"
    ]
    pixels = np.rint(imread(tmp_path / "x.png")[:, :, :3] * 255).astype(int)
    forward = palette.HUES[0].forward
    assert (pixels == rgb(forward)).all(axis=2).sum() > 1000
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<run>" not in page
    assert "measured $1 " in page
    assert "nothing ran" in page
    events = json.loads((tmp_path / "x.trace.json").read_text(encoding="utf-8"))["traceEvents"]
    (op,) = [event for event in events if event["ph"] == "X"]
    assert (op["ts"], op["dur"]) == (0, 250_000)  # microseconds


def test_pyplot_is_not_used(tmp_path: Path) -> None:
    code = (
        "import sys; from counterflow import draw; from counterflow.schedule.schemes import dapple\n"
        "from counterflow.simulation import simulate\n"
        "assert not {'matplotlib', 'rich', 'torch'} & set(sys.modules), 'imported early'\n"
        f"draw(simulate(dapple(2, 2)), {str(tmp_path / 'x.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_timeline_on_axes_of_ones_own() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_axes((0.1, 0.2, 0.85, 0.5))
    result = simulated("chimera", stages=4, micro_batches=4)
    assert draw(result, ax=axes, title="mine") is figure
    assert axes.get_title(loc="left") == "mine"
    assert axes.get_xlim() == (0, result.makespan)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "1", "2", "3"]
    boxes = sum(
        len(collection.get_paths())
        for collection in axes.collections
        if "chart-0-bub" not in str(collection.get_gid())
    )
    assert boxes >= len(list(result.schedule.ops()))
    legend = axes.get_legend()
    assert legend is not None
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    top = axes.get_window_extent().y1
    assert legend.get_window_extent().y0 >= top - 1  # above the rows, on top of none


def test_a_figure_without_a_file_in_a_width_a_font_and_grey() -> None:
    result = simulated("zb-v", workers=4, micro_batches=8)
    figure = draw(result, width=5.0, grey=True, font="DejaVu Serif")
    assert figure is not None
    assert figure.get_size_inches()[0] == pytest.approx(5.0)
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert {text.get_fontfamily()[0] for text in texts} == {"DejaVu Serif"}
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)  # type: ignore[attr-defined]
    assert int(np.ptp(pixels, axis=2).max()) <= 1
    summary = next(text for text in texts if text.get_text().startswith("makespan"))
    assert summary.get_window_extent().x1 <= figure.bbox.x1


def test_hatches_tell_the_lanes_of_a_grey_picture_apart() -> None:
    figure = draw("interleaved", workers=2, chunks=5, micro_batches=4, grey=True)
    assert figure is not None
    drawn = {}
    for artist in figure.axes[0].collections:
        name = str(artist.get_gid()).split("-")
        if "forward" in name or "backward" in name:
            drawn[name[-1], name[2]] = (artist.get_hatch(), tuple(to_rgba_array(artist.get_facecolor())[0]))
    assert len(drawn) == len(set(drawn.values())) == 10
    legend = figure.axes[0].get_legend()
    assert legend is not None
    explained = {patch.get_hatch() for patch in legend.findobj(Patch)}
    assert {hatch for hatch, _ in drawn.values()} <= explained


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 1.0}, "width=1: must be 1.8 inches or more"),
        ({"path": "x.html", "grey": True}, "are those of figures"),
        ({"path": "x.png", "ax": object()}, "accepts one timeline"),
    ],
)
def test_looks_that_cannot_be(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        draw(simulated("dapple", stages=2, micro_batches=2), **options)
    assert list(tmp_path.iterdir()) == []
