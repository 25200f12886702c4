from __future__ import annotations

import pytest

from counterflow.plan.tables import TABLES

from .conftest import Run


@pytest.mark.parametrize("line", ["reproduce", "reproduce --list"])
def test_list(run: Run, line: str) -> None:
    answer = run(line)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines() == list(TABLES)


def test_list_as_json(run: Run) -> None:
    assert run("reproduce --json").json == {"tables": list(TABLES)}


@pytest.mark.parametrize("name", TABLES)
def test_a_table(run: Run, name: str) -> None:
    table = TABLES[name]()
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
    assert run(f"reproduce {name} --json").json == table.to_json()


def test_unknown_table(run: Run) -> None:
    answer = run("reproduce chimera-tabel2")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(
        "Error: unknown table 'chimera-tabel2'; did you mean 'chimera-table2'? Known: chimera-table2, "
    )
