"""The reproduced figures: descriptions that say what the papers say, and what is predicted of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.figure_entries import best_plan
from counterflow.papers.figures.lines import lines_of
from counterflow.papers.figures.published import (
    RATIOS,
    TOLERANCE,
    Competitor,
    Figure,
    Published,
    PublishedUse,
    Quantity,
    Run,
    Stated,
)
from counterflow.papers.figures.quantities import difference
from counterflow.papers.figures.reproduction import ReproductionVerdict, reproduce, total
from counterflow.papers.figures.throughputs import scheme_bars
from counterflow.planning.task import PlanningTask, load_example
from counterflow.schedule.modes import Recompute

from .reading import PRINTED

KEPT: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "reproduce.json").read_text(encoding="utf-8")
)


def _values(name: str, quantity: Quantity) -> tuple[float | None, ...]:
    return tuple(value.value for value in FIGURES[name].published if value.quantity is quantity)


def test_published_ratios_are_the_papers() -> None:
    ratios_by_figure, values_by_figure = PRINTED["published_ratios"], PRINTED["published_values"]
    for name, ratios in ratios_by_figure.items():
        figure = FIGURES[name].published
        assert {v.over: v.value for v in figure if v.quantity is Quantity.SPEEDUP} == ratios
    for name, by_quantity in values_by_figure.items():
        for quantity, values in by_quantity.items():
            assert _values(name, Quantity[quantity]) == tuple(values)
    named = ratios_by_figure.keys() | values_by_figure.keys()
    assert {n for n, f in FIGURES.items() if any(v.quantity in RATIOS for v in f.published)} <= named


def test_published_configurations_are_the_papers() -> None:
    figure = FIGURES["chimera-fig10"]
    assert {v.label: str(figure.competitor(v.label).stated) for v in figure.published} == PRINTED[
        "chimera_section_4_2_1"
    ]
    mixpipe = FIGURES["mixpipe-fig10a"]
    assert str(mixpipe.competitor("DAPPLE").statement("512 samples")) == "D=4 B=4 no recompute"
    assert str(mixpipe.competitor("DAPPLE").statement("1,024 samples")) == "D=4 B=8 no recompute"
    large = FIGURES["mixpipe-fig10b"]
    assert str(large.competitor("Chimera").stated) == "D=8 concat=forward-doubling recompute"


def test_descriptions_are_complete() -> None:
    """Every figure has its sentences, every value its section, every run a cluster with sources."""
    for name, figure in FIGURES.items():
        assert figure.name == name
        assert figure.setting
        assert figure.statements or not figure.runs
        assert all(value.source for value in figure.published)
        assert all(value.source for value in figure.missing)
        for run in figure.runs:
            task = run.task()
            assert task.cluster.sources
            assert all(any(task.cluster.size % d == 0 for d in each.depths) for each in figure.competitors)
        compared = {label for value in figure.published for label in value.labels}
        assert compared == {each.label for each in figure.competitors}


def test_settings_are_what_the_texts_say() -> None:
    """Devices, networks, batches and depths of the papers' experiment sections."""

    def task(name: str, run: int = 0) -> PlanningTask:
        return FIGURES[name].runs[run].task()

    # WPipe, section 4: Env-1 is one machine of eight V100; Env-2 has eight machines.
    assert [task(f"wpipe-fig8{part}").cluster.size for part in "abcd"] == [8, 8, 64, 64]
    assert len(task("wpipe-fig9").model.layers) == 96 + 2
    # Chimera, section 4: Gloo on both clusters; section 4.4: GPT-2 of 32 layers.
    daint, servers = task("chimera-fig10").cluster, task("chimera-fig16").cluster
    assert (servers.inside, servers.between, servers.reserve_bytes, servers.sync_slowdown) == (
        *(daint.inside, daint.between, daint.reserve_bytes, daint.sync_slowdown),
    )
    assert servers.allreduce_inside == servers.allreduce_between == daint.allreduce_between
    assert len(task("chimera-fig19").model.layers) == 32 + 2
    # MixPipe, section II: BERT of 24 layers, K from D to D/2 with twice the samples.
    assert len(task("mixpipe-fig2").model.layers) == 24 + 2
    # Hanayo, section 5.3: P=8 for all methods, two waves.
    for name in ("hanayo-fig11", "hanayo-fig12"):
        figure = FIGURES[name]
        stated = [each.statement("8 devices") for each in figure.competitors]
        assert [each and each.depth for each in stated] == [8] * 4
        assert figure.competitor("Hanayo").stated == Stated(8, options=(("waves", 2),))
        assert {run.micro_batches for run in figure.runs} == {8}
    # WPipe, Table 3: 3,328 samples on 4 x 16 devices; its arrangements differ.
    table = FIGURES["wpipe-table3"]
    assert task("wpipe-table3").mini_batch == 3328
    assert table.competitor("A").arrangements != table.competitor("B").arrangements


def test_what_was_fitted_is_marked_and_little() -> None:
    """The best configurations of Figure 10 and six more values; their constants say so."""
    fitted = {
        (name, value.over, value.runs)
        for name, figure in FIGURES.items()
        for value in figure.published
        if value.use is PublishedUse.FIT and name != "chimera-fig10"
    }
    assert fitted == {
        ("mixpipe-fig8", "GPipe", ("32 devices",)),
        ("mixpipe-fig8", "DAPPLE", ("32 devices",)),
        ("chimera-fig13", "", ("BERT-48",)),
        ("hanayo-fig11", "Chimera-wave", ("8 devices",)),
        ("hanayo-fig12", "", ("8 devices",)),
        ("hanayo-fig9", "Chimera-wave", ("TACC, P=8",)),
    }
    assert all(value.use is PublishedUse.FIT for value in FIGURES["chimera-fig10"].published)
    daint = load_example("chimera-bert48").cluster.sources
    for name in ("between", "allreduce_between", "reserve_bytes"):
        assert daint[name].startswith("fit on the")
    block = load_example("mixpipe-bert48").profile.layer("block").sources
    assert "fit on MixPipe's Figure 8" in block["forward_seconds"]
    assert daint["sync_slowdown"].startswith("assumed, not fitted")
    assert (
        "fit on Figure 11's Chimera-wave" in FIGURES["hanayo-fig11"].runs[0].task().cluster.sources["between"]
    )


QUICK = (
    "chimera-fig9",
    "chimera-fig10",
    "chimera-fig12",
    "chimera-fig13",
    "chimera-fig14",
    "chimera-fig16",
    "chimera-fig19",
    "mixpipe-fig2",
    "mixpipe-fig7",
    "mixpipe-fig10b",
    "hanayo-fig8",
    "hanayo-fig9",
    "hanayo-fig10",
    "hanayo-fig11",
    "hanayo-fig12",
    "wpipe-fig8a",
    "wpipe-fig8d",
    "wpipe-fig9",
    "wpipe-fig9-resnext",
    "wpipe-table3",
    "wpipe-convergence",
)
"""Figures that take a second or two."""


@pytest.mark.parametrize("name", QUICK)
def test_figures_are_predicted_as_kept(name: str) -> None:
    lines = lines_of(reproduce(FIGURES[name]))
    kept = [(row["predicted"], row["verdict"], row["cause"]) for row in KEPT["figures"][name]]
    assert [(line.predicted, line.verdict, line.cause) for line in lines] == kept


def test_every_figure_is_kept() -> None:
    """More than half of all ratios are predicted, and no unexplained miss is above 20 %."""
    assert list(KEPT["figures"]) == list(FIGURES)
    rows = [(name, row) for name, each in KEPT["figures"].items() for row in each]
    assert len(rows) == sum(len(figure.published) + len(figure.missing) for figure in FIGURES.values())
    for name, row in rows:
        if row["verdict"] == "miss" and row["difference"]:
            assert abs(float(row["difference"].rstrip("%"))) <= 20, (name, row)
    hits = sum(row["verdict"] == "hit" for _, row in rows)
    assert f"{len(rows)} published values: {hits} hit; " in KEPT["summary"]


def test_the_largest_micro_batch_that_fits() -> None:
    """PipeDream-2BW of Figure 10 would be quicker with B=8, which needs no recomputation."""
    task = load_example("chimera-bert48")
    largest = FIGURES["chimera-fig10"].competitor("PipeDream-2BW")
    run = FIGURES["chimera-fig10"].runs[0]
    greedy = best_plan(largest, run, task)
    free = best_plan(replace(largest, largest=False), run, task)
    assert greedy is not None
    assert free is not None
    assert greedy.play.configuration.samples == 16
    assert (free.play.configuration.samples, free.play.configuration.recompute) == (8, Recompute.NONE)
    assert free.seconds < greedy.seconds


def test_gpt_2_without_recomputation_fits_as_in_section_4_2_3() -> None:
    """Of the schemes that stash several micro-batches only Chimera's D=32 fits without."""
    figure = FIGURES["chimera-fig15"]
    run = figure.runs[0]
    task = run.task()

    def depths(label: str) -> list[int]:
        only = replace(figure.competitor(label), recompute=(Recompute.NONE,))
        return [d for d in only.depths if best_plan(replace(only, depths=(d,)), run, task) is not None]

    assert depths("Chimera") == [32]
    assert depths("DAPPLE") == depths("GPipe") == []
    assert depths("GEMS") == [8, 16, 32]


def test_what_does_not_fit_has_no_ratio() -> None:
    tiny = Competitor("DAPPLE", "dapple", depths=(4,), recompute=(Recompute.NONE,), samples=(32,))
    other = Competitor("GEMS", "gems", depths=(4,), stated=Stated(4, samples=32))
    run = Run("32 nodes", lambda: load_example("chimera-bert48"))
    value = Published("GEMS", Quantity.SPEEDUP, ("32 nodes",), 1.0, "DAPPLE")
    figure = Figure("x", "x", "x", (tiny, other), (run,), (value,))
    reproduction = reproduce(figure)
    row = reproduction.rows[0]
    assert row.predicted is None
    assert row.configurations[1] == "nothing fits"
    assert row.verdict is ReproductionVerdict.MISS
    assert scheme_bars(reproduction)[0].texts == ("does\nnot fit",)
    with pytest.raises(ValueError, match="no such competitor or run"):
        replace(figure, published=(replace(value, runs=("64 nodes",)),))
    with pytest.raises(ValueError, match="nothing is published there"):
        replace(figure, published=(replace(value, quantity=Quantity.BEST, label="DAPPLE", over=""),))


def test_what_the_paper_states_restricts_the_prediction() -> None:
    """DAPPLE with 64 samples does not fit, and the planner's own choice has a value of its own."""
    small = Competitor("DAPPLE", "dapple", depths=(4,), stated=Stated(4, samples=64, recompute=False))
    subject = Competitor("Chimera", "chimera", depths=(4,), samples=(8,))
    run = Run("32 nodes", lambda: load_example("chimera-bert48"))
    value = Published("Chimera", Quantity.SPEEDUP, ("32 nodes",), 1.1, "DAPPLE")
    row = reproduce(Figure("x", "x", "x", (small, subject), (run,), (value,))).rows[0]
    assert row.predicted is None
    assert row.free is not None


def test_a_ratio_on_the_other_side_of_one_is_a_miss() -> None:
    """0.962 is within 10 % of 1.017, but the other depth is ahead."""
    reproduction = reproduce(FIGURES["chimera-fig13"])
    row = next(row for row in reproduction.rows if row.published.value == 1.017)
    assert row.difference is not None
    assert abs(row.difference) < TOLERANCE
    assert row.verdict is not ReproductionVerdict.HIT


def test_fits_is_about_memory_alone() -> None:
    """A space without any candidate does not count as out of memory."""
    value = Published("DAPPLE", Quantity.FITS, ("32 nodes",), 0)
    for samples, predicted in ((5, None), (128, 0.0), (1, 1.0)):
        large = Competitor("DAPPLE", "dapple", depths=(4,), samples=(samples,), recompute=(Recompute.NONE,))
        run = Run("32 nodes", lambda: load_example("chimera-bert48"), 4 if samples == 128 else None)
        row = reproduce(Figure("x", "x", "x", (large,), (run,), (value,))).rows[0]
        assert row.predicted == predicted


def test_efficiencies_are_compared_by_what_is_lost() -> None:
    """91.4 and 99.8 % are 9 % apart by what is left; by what is lost they are 8.6 and 0.2 %."""
    value = Published("Chimera", Quantity.EFFICIENCY, ("512 nodes", "2,048 nodes"), 0.914)
    assert difference(value, 0.998) == pytest.approx(0.084)
    saved = Published("WPipe", Quantity.SAVING, ("8 samples",), 0.65, "2BW")
    assert difference(saved, 0.65) == 0
    assert difference(saved, 0.79) == pytest.approx(-0.4)


def test_equal_values_are_no_order() -> None:
    first = Competitor("first", "dapple", depths=(4,), samples=(4,), recompute=(Recompute.STAGE,))
    second = replace(first, label="second")
    run = Run("32 nodes", lambda: load_example("chimera-bert48"))
    order = Published("first", Quantity.FASTER, ("32 nodes",), order=("first", "second"))
    row = reproduce(Figure("x", "x", "x", (first, second), (run,), (order,))).rows[0]
    assert (row.order, row.verdict) == ("first = second", ReproductionVerdict.MISS)


def test_several_figures_are_counted_together() -> None:
    names = ("hanayo-fig10", "wpipe-convergence")
    text = total([reproduce(FIGURES[name]) for name in names])
    assert text == (
        "7 published values: 4 hit; 0 miss, cause shown; 0 miss; 3 without inputs. "
        "0 of 0 ratios are within 10%."
    )
    assert f"{TOLERANCE:.0%}" in text


def test_progress_is_reported() -> None:
    reports: list[tuple[int, int, str]] = []
    figure = FIGURES["hanayo-fig11"]
    figure = replace(figure, runs=figure.runs[:1], published=figure.published[:1])
    reproduce(figure, lambda done, of, what: reports.append((done, of, what)))
    assert reports[0] == (0, 4, "GPipe, 8 devices")
    assert reports[-1] == (4, 4, "")
