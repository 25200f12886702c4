"""The reproduced figures: descriptions that say what the papers say, and what is predicted of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.published import (
    TOLERANCE,
    Competitor,
    Figure,
    Published,
    Quantity,
    Run,
    Stated,
    Use,
)
from counterflow.papers.figures.reproduction import Reproduction, best_plan, reproduce
from counterflow.papers.figures.throughputs import scheme_bars
from counterflow.planning.task import load_example
from counterflow.schedule.modes import Recompute

PUBLISHED = {
    "chimera-fig14": {"PipeDream": 1.94, "PipeDream-2BW": 1.17, "GPipe": 1.32, "GEMS": 2.41, "DAPPLE": 1.19},
    "chimera-fig15": {
        "PipeDream": 2.01,
        "PipeDream-2BW": 1.16,
        "GPipe": 1.42,
        "GEMS": 2.34,
        "DAPPLE": 1.38,
        "Chimera": 0.914,
    },
    "chimera-fig17": {"PipeDream-2BW": 1.0, "GPipe": 1.13, "GEMS": 2.07, "DAPPLE": 1.06},
    "chimera-fig18": {"PipeDream-2BW": 1.13, "GPipe": 1.18, "GEMS": 2.60, "DAPPLE": 1.34},
    "mixpipe-fig8": {"GPipe": 1.46, "GEMS": 2.39, "DAPPLE": 1.34, "Chimera": 1.16},
    "mixpipe-fig9": {"GPipe": 1.38, "GEMS": 2.25, "DAPPLE": 1.33, "Chimera": 1.12},
    "wpipe-fig8": {"PipeDream": 7.1, "GPipe": 2.1, "PipeDream-2BW": 1.4},
    "chimera-fig16": {"PipeDream": 1.89, "PipeDream-2BW": 1.05, "GEMS": 2.39, "DAPPLE": 1.10},
    "mixpipe-fig10a": {"GPipe": 1.22, "GEMS": 2.01, "DAPPLE": 1.09, "Chimera": 1.18},
    "mixpipe-fig10b": {"GPipe": 1.10, "GEMS": 2.65, "DAPPLE": 1.16, "Chimera": 1.0},
}
"""The papers' headline ratios; in Figure 15 the last is the parallel efficiency."""

BEST = {
    "PipeDream": "D=8 W=4 B=48",
    "PipeDream-2BW": "D=4 W=8 B=16 recompute",
    "GPipe": "D=4 W=8 B=4 recompute",
    "GEMS": "D=4 W=8 B=32",
    "DAPPLE": "D=4 W=8 B=4",
    "Chimera": "D=4 W=8 B=8",
}
"""Chimera, section 4.2.1."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ratios_are_the_papers(name: str) -> None:
    values = {value.label: value.value for value in FIGURES[name].published}
    assert values == PUBLISHED[name]


def test_published_configurations_are_the_papers() -> None:
    figure = FIGURES["chimera-fig10"]
    assert {v.label: str(figure.competitor(v.label).stated) for v in figure.published} == BEST


def test_hanayo_publishes_three_ratios_at_three_scales() -> None:
    values = {(v.label, v.runs): v.value for v in FIGURES["hanayo-fig11"].published}
    assert len(values) == 9
    assert values["Chimera-wave", ("8 devices",)] == 1.0819
    assert [values["GPipe", (f"{n} devices",)] for n in (8, 16, 32)] == [1.334, 1.333, 1.333]
    assert [values["DAPPLE", (f"{n} devices",)] for n in (8, 16, 32)] == [1.337, 1.332, 1.331]


@pytest.mark.parametrize("name", FIGURES)
def test_descriptions_are_complete(name: str) -> None:
    figure = FIGURES[name]
    assert figure.name == name
    assert figure.setting
    assert figure.assumptions
    for run in figure.runs:
        task = run.task()
        assert task.cluster.sources
        for competitor in figure.competitors:
            assert any(task.cluster.size % depth == 0 for depth in competitor.depths)
    told = {value.label for value in figure.published}
    assert told | {figure.subject} == {each.label for each in figure.competitors}


def test_what_was_fitted_is_marked_and_little() -> None:
    """Six configurations, and two of all the ratios; their constants say so."""
    fitted = {
        (name, value.label, value.runs)
        for name, figure in FIGURES.items()
        for value in figure.published
        if value.use is Use.FIT and value.quantity is not Quantity.BEST
    }
    assert fitted == {
        ("mixpipe-fig8", "GEMS", ("32 devices",)),
        ("hanayo-fig11", "Chimera-wave", ("8 devices",)),
    }
    assert all(value.use is Use.FIT for value in FIGURES["chimera-fig10"].published)
    daint = load_example("chimera-bert48").cluster.sources
    for name in ("between", "allreduce_between", "reserve_bytes"):
        assert daint[name].startswith("fit on the")
    assert "fit on Figure 8's GEMS" in load_example("mixpipe-bert48").cluster.sources["between"]
    assert (
        "fit on Figure 11's Chimera-wave" in FIGURES["hanayo-fig11"].runs[0].task().cluster.sources["between"]
    )


def _shown(found: Reproduction) -> dict[str, tuple[str, float | None]]:
    return {
        row.published.label: (row.found[-1], row.predicted and round(row.predicted, 3)) for row in found.rows
    }


def test_chimera_figure_10() -> None:
    found = reproduce(FIGURES["chimera-fig10"])
    assert _shown(found) == {
        "PipeDream": ("D=4 W=8 B=32 recompute stage", None),  # the paper's is D=8 W=4 B=48
        "PipeDream-2BW": ("D=4 W=8 B=16 recompute stage", None),
        "GPipe": ("D=4 W=8 B=4 recompute stage", None),
        "GEMS": ("D=4 W=8 B=32", None),
        "DAPPLE": ("D=4 W=8 B=4", None),
        "Chimera": ("D=4 W=8 B=8", None),
    }
    assert [row.published.label for row in found.rows if not row.holds] == ["PipeDream"]
    pipedream = found.entry("PipeDream", "32 nodes")
    best, published = pipedream.throughput(), pipedream.throughput(at_stated=True)
    assert best is not None
    assert published is not None
    assert best / published == pytest.approx(1.016, abs=0.001)


def test_chimera_figure_14() -> None:
    """Four of five test ratios within 10 %."""
    found = reproduce(FIGURES["chimera-fig14"])
    assert _shown(found) == {
        "PipeDream": ("D=4 W=16 B=32 recompute stage", 1.233),
        "PipeDream-2BW": ("D=4 W=16 B=16 recompute stage", 1.096),
        "GPipe": ("D=4 W=16 B=4 recompute stage", 1.439),
        "GEMS": ("D=4 W=16 B=32", 2.182),
        "DAPPLE": ("D=4 W=16 B=4", 1.098),
    }
    assert found.summary() == (
        "4 of 5 test ratios within 10% (4 with the configurations that the paper states)"
    )
    bars = {each.label: each for each in scheme_bars(found)}
    chimera = bars["Chimera"].throughputs[-1]
    assert chimera is not None
    assert bars["GEMS"].published == (None, None, chimera / 2.41)
    assert bars["PipeDream-2BW"].texts[-1] == "D=4\nB=16\nR"
    _every_miss_has_a_reason(found)


@pytest.mark.parametrize("name", ["chimera-fig17", "mixpipe-fig9", "hanayo-fig11"])
def test_every_miss_has_a_reason_and_only_misses_have(name: str) -> None:
    figure = FIGURES[name]
    needed = {run for value in figure.published for run in value.runs}
    _every_miss_has_a_reason(
        reproduce(replace(figure, runs=tuple(run for run in figure.runs if run.label in needed)))
    )


def _every_miss_has_a_reason(found: Reproduction) -> None:
    for row in found.rows:
        assert row.holds == (row.published.miss == ""), row.published.label
        assert row.holds == (row.difference is not None and abs(row.difference) <= TOLERANCE)


def test_the_largest_micro_batch_that_fits() -> None:
    """PipeDream-2BW of Figure 10 would be quicker with B=8, which needs no recomputation."""
    task = load_example("chimera-bert48")
    largest = FIGURES["chimera-fig10"].competitor("PipeDream-2BW")
    greedy, _ = best_plan(largest, task)
    free, _ = best_plan(replace(largest, largest=False), task)
    assert greedy is not None
    assert free is not None
    assert greedy.play.configuration.samples == 16
    assert (free.play.configuration.samples, free.play.configuration.recompute) == (8, Recompute.NONE)
    assert free.seconds < greedy.seconds


def test_gpt_2_without_recomputation_fits_as_in_section_4_2_3() -> None:
    """Of the schemes that stash several micro-batches only Chimera's D=32 fits without."""
    figure = FIGURES["chimera-fig15"]
    task = figure.runs[0].task()

    def depths(label: str) -> list[int]:
        only = replace(figure.competitor(label), recompute=(Recompute.NONE,))
        return [d for d in only.depths if best_plan(replace(only, depths=(d,)), task)[0] is not None]

    assert depths("Chimera") == [32]
    assert depths("DAPPLE") == depths("GPipe") == []
    assert depths("GEMS") == [8, 16, 32]


def test_what_does_not_fit_has_no_ratio() -> None:
    tiny = Competitor("DAPPLE", "dapple", depths=(4,), recompute=(Recompute.NONE,), samples=(32,))
    other = Competitor("GEMS", "gems", depths=(4,), stated=Stated(4, samples=32))
    run = Run("32 nodes", lambda: load_example("chimera-bert48"))
    value = Published("DAPPLE", Quantity.SPEEDUP, 1.0, ("32 nodes",))
    figure = Figure("x", "x", "x", "GEMS", (tiny, other), (run,), (value,))
    found = reproduce(figure)
    assert found.rows[0].predicted is None
    assert found.rows[0].found == ("nothing fits",)
    assert not found.rows[0].holds
    assert scheme_bars(found)[0].texts == ("does\nnot fit",)
    with pytest.raises(ValueError, match="no such competitor or run"):
        replace(figure, published=(replace(value, runs=("64 nodes",)),))
    with pytest.raises(ValueError, match="nothing is published there"):
        replace(figure, published=(replace(value, quantity=Quantity.BEST),))
    with pytest.raises(ValueError, match="no competitor 'Hanayo'"):
        replace(figure, subject="Hanayo")


def test_a_stated_configuration_that_does_not_fit_has_no_ratio_of_its_own() -> None:
    small = Competitor("DAPPLE", "dapple", depths=(4,), stated=Stated(4, samples=64, recompute=False))
    subject = Competitor("Chimera", "chimera", depths=(4,), samples=(8,))
    run = Run("32 nodes", lambda: load_example("chimera-bert48"))
    value = Published("DAPPLE", Quantity.SPEEDUP, 1.1, ("32 nodes",))
    found = reproduce(Figure("x", "x", "x", "Chimera", (small, subject), (run,), (value,)))
    row = found.rows[0]
    assert row.predicted is not None
    assert row.at_stated is None
    assert (
        found.entry("Chimera", "32 nodes").throughput(at_stated=True) is not None
    )  # nothing is stated of it
    assert found.summary().endswith("(0 with the configurations that the paper states)")


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    figure = FIGURES["hanayo-fig11"]
    figure = replace(figure, runs=figure.runs[:1], published=figure.published[:1])
    reproduce(figure, lambda done, of, what: told.append((done, of, what)))
    assert told[0] == (0, 4, "GPipe, 8 devices")
    assert told[-1] == (4, 4, "")
