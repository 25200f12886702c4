from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.reproduction import ReproductionVerdict, reproduce
from counterflow.papers.reproduction_report import TableShown, figure_shown
from counterflow.papers.tables import TABLES

from ..conftest import Run


@pytest.mark.parametrize("line", ["reproduce", "reproduce --list"])
def test_list(run: Run, line: str) -> None:
    answer = run(line)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines() == [*TABLES, *FIGURES]


def test_list_as_json(run: Run) -> None:
    assert run("reproduce --json").json == {"format": 1, "tables": list(TABLES), "figures": list(FIGURES)}


@pytest.mark.parametrize("name", TABLES)
def test_a_table(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES[name]()
    monkeypatch.setitem(TABLES, name, lambda: table)  # it takes seconds to reckon, three times
    answer = run(f"reproduce {name}")
    assert (answer.code, answer.err) == (0, "")
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[0] == table.title
    for row in table.rows:
        cells = dict(zip(table.columns, row.cells(), strict=True))
        del cells["quantity"], cells["source"]
        assert " ".join(filter(None, cells.values())) in lines
        assert f"{row.quantity} ({row.source})" in lines
    for key, note in table.notes.items():
        assert f"{key}: {note}" in " ".join(answer.out.split())
    assert run(f"reproduce {name} --json").json == TableShown.model_validate(table).model_dump(mode="json")


def test_unknown_table(run: Run) -> None:
    answer = run("reproduce chimera-tabel2")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(
        "Error: unknown table or figure 'chimera-tabel2'; did you mean 'chimera-table2'? Known: chimera-"
    )
    assert answer.err.rstrip().endswith(", ".join([*TABLES, *FIGURES]))


def test_a_figure(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed, in JSON and drawn is what the planner predicts, and what the paper publishes."""
    name = "chimera-fig10"
    reproduction = reproduce(FIGURES[name])
    monkeypatch.setattr("counterflow.papers.figures.reproduction.reproduce", lambda *_: reproduction)
    answer = run(f"reproduce {name} --out {tmp_path / 'a.png'} --out {tmp_path / 'a.svg'}")
    assert answer.code == 0
    assert answer.err.splitlines() == [f"Drew {tmp_path / 'a.png'}", f"Drew {tmp_path / 'a.svg'}"]
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    figure = FIGURES[name]
    assert lines[0] == figure.title
    assert "GPipe, best configuration 32 nodes D=4 W=8 B=4 R D=4 W=8 B=4 R hit fit 4.2.1" in lines
    constants = (f"{k}: {v}" for k, v in reproduction.constants.items())
    for text in (*figure.statements, *figure.assumptions, *constants):
        assert text in lines
    (miss,) = [row.published.cause for row in reproduction.rows if row.verdict is not ReproductionVerdict.HIT]
    assert miss is not None
    assert f"PipeDream, best configuration, 32 nodes: {miss.text}; {miss.change}: as published" in lines
    assert lines[-1] == reproduction.summary() == "6 published values: 5 hit; 1 miss, cause shown"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert run(f"reproduce {name} --json").json == figure_shown(reproduction).model_dump(mode="json")


def test_ratios_are_printed_with_their_difference(run: Run) -> None:
    lines = [" ".join(line.split()) for line in run("reproduce hanayo-fig12").out.splitlines()]
    assert "GPipe, fits 8 devices out of memory out of memory hit fit 5.5" in lines
    assert any(line.startswith("Hanayo over GPipe 16 devices 1.3") for line in lines)
    assert lines[-1] == "12 published values: 12 hit"


def test_a_paper(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a paper's figures, and their number."""
    figures = {name: figure for name, figure in FIGURES.items() if name in ("hanayo-fig9", "hanayo-fig10")}
    monkeypatch.setattr("counterflow.papers.figures.FIGURES", figures)
    lines = [" ".join(line.split()) for line in run("reproduce hanayo").out.splitlines()]
    for figure in figures.values():
        assert figure.title in lines
    assert lines[-1].startswith("15 published values: 13 hit; ")
    shown = run("reproduce all --json").json
    assert [entry["name"] for entry in shown["figures"]] == ["hanayo-fig9", "hanayo-fig10"]
    assert shown["figures"][1]["missing"][0]["needs"] == "its tokens and batch"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "chimera-table2 --out x.png",
            "chimera-table2 is a table, which cannot be drawn; leave out --out",
        ),
        (
            "chimera-fig10 --out x.html",
            "cannot tell what to draw from this name; legal endings: .png, .svg, .pdf",
        ),
        ("hanayo --out x.png", "hanayo is several figures; give one of them to draw"),
        ("wpipe-convergence --out x.png", "wpipe-convergence has no predictions, so it cannot be drawn"),
    ],
)
def test_what_cannot_be_drawn(run: Run, line: str, message: str) -> None:
    answer = run(f"reproduce {line}")
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
