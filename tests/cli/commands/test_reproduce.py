from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.reproduction import reproduce
from counterflow.papers.report import TableShown, figure_shown
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
    """What is printed, in JSON and drawn is what the planner finds, and what the paper publishes."""
    name = "chimera-fig10"
    found = reproduce(FIGURES[name])
    monkeypatch.setattr("counterflow.papers.figures.reproduction.reproduce", lambda *_: found)
    answer = run(f"reproduce {name} --out {tmp_path / 'a.png'} --out {tmp_path / 'a.svg'}")
    assert answer.code == 0
    assert answer.err.splitlines() == [f"Drew {tmp_path / 'a.png'}", f"Drew {tmp_path / 'a.svg'}"]
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[0] == FIGURES[name].title
    assert "GPipe 32 nodes D=4 W=8 B=4 R D=4 W=8 B=4 R the same fit" in lines
    assert "PipeDream 32 nodes D=4 W=8 B=32 R D=8 W=4 B=48 another fit" in lines
    for text in (*FIGURES[name].assumptions, *(f"{k}: {v}" for k, v in found.constants.items())):
        assert text in lines
    for row in found.rows:
        if not row.holds:
            assert f"{row.published.label}, 32 nodes: {row.published.miss}" in lines
    assert lines[-1] == found.summary() == "5 of 6 best configurations found"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert run(f"reproduce {name} --json").json == figure_shown(found).model_dump(mode="json")


def test_ratios_are_printed_with_their_difference(run: Run) -> None:
    lines = [" ".join(line.split()) for line in run("reproduce hanayo-fig11").out.splitlines()]
    assert "Chimera-wave 8 devices D=8 W=1 B=1 waves=1 1.080 1.082 -0.2% fit" in lines
    assert "GPipe 32 devices D=16 W=2 B=1 1.451 1.333 +8.8% test" in lines
    assert lines[-1].startswith("1 of 1 fit ratios within 10% ")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "chimera-table2 --out x.png",
            "chimera-table2 is a table, which cannot be drawn; leave out --out",
        ),
        (
            "chimera-fig10 --out x.html",
            "cannot tell what to draw from this name; legal endings: .png, .svg, .pdf",
        ),
    ],
)
def test_what_cannot_be_drawn(run: Run, line: str, told: str) -> None:
    answer = run(f"reproduce {line}")
    assert (answer.code, answer.out) == (2, "")
    assert told in answer.err
