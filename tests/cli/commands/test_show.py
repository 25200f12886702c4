from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import counterflow as cf
from counterflow.simulation import Simulation

from ..conftest import Run

CHIMERA = "show chimera --stages 4 --micro-batches 4"


def test_terminal(run: Run) -> None:
    answer = run(CHIMERA)
    assert (answer.code, answer.err) == (0, "")
    # Chimera, Figure 3: worker 0 of D=4, N=4.
    (first,) = [line for line in answer.out.splitlines() if line.startswith("P0")]
    assert "".join(first.split()[1:]).replace(".", "").startswith("012c")


def test_terminal_with_memory(run: Run) -> None:
    assert "memory of each worker" in run(f"{CHIMERA} --memory").out


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "html", "trace.json"])
def test_files(run: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"chimera.{suffix}"
    answer = run(f"{CHIMERA} --out {path}")
    assert (answer.code, answer.out, answer.err) == (0, "", f"Wrote {path}\n")
    assert path.stat().st_size > 100
    if suffix == "trace.json":
        json.loads(path.read_text(encoding="utf-8"))


def test_several_files(run: Run, tmp_path: Path) -> None:
    page, trace = tmp_path / "a.html", tmp_path / "b.trace.json"
    answer = run(f"{CHIMERA} --memory --compare dapple --out {page} --out {trace}")
    assert answer.err == f"Wrote {page}\nWrote {trace}\n"
    assert page.exists()
    assert trace.exists()


Drawn = list[tuple[Simulation, Simulation | None, bool]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Arguments of the terminal's drawing."""

    calls: Drawn = []

    def draw_terminal(
        result: Simulation, console: object, *, compare: Simulation | None, memory: bool
    ) -> None:
        calls.append((result, compare, memory))

    monkeypatch.setattr(importlib.import_module("counterflow.drawing"), "draw_terminal", draw_terminal)
    return calls


@pytest.mark.parametrize(
    ("line", "compared"),
    [
        ("chimera --stages 8 --micro-batches 16 --compare dapple", "dapple(stages=8, micro_batches=16)"),
        (
            "chimera --stages 8 --micro-batches 8 --pairs 2 --compare hanayo",
            "hanayo(workers=8, micro_batches=8, waves=1)",
        ),
        (
            "hanayo --workers 4 --micro-batches 8 --waves 2 --compare chimera",
            "chimera(stages=4, micro_batches=8, pairs=1, concat=direct)",
        ),
        (
            "chimera --stages 4 --micro-batches 8 --compare pipedream",
            "pipedream(stages=4, periods=8)",
        ),
        (
            "wpipe --workers 4 --micro-batches 4 --periods 3 --compare pipedream-2bw",
            "pipedream-2bw(stages=4, micro_batches=4, periods=3)",
        ),
    ],
)
def test_compare_takes_the_same_options(run: Run, drawn: Drawn, line: str, compared: str) -> None:
    assert run(f"show {line}").code == 0
    ((first, second, memory),) = drawn
    assert first.schedule.scheme == line.split(maxsplit=1)[0]
    assert second is not None
    assert str(second.schedule) == compared
    assert memory is False


def test_compare_with_the_same_costs_or_its_own(run: Run, drawn: Drawn) -> None:
    run(f"{CHIMERA} --forward 3 --p2p 1 --compare dapple")
    run(f"{CHIMERA} --forward 3 --p2p 1 --compare", "dapple --stages 2 --micro-batches 8 --p2p 2")
    (_, same, _), (_, overridden, _) = drawn
    assert same is not None
    assert same.costs == cf.Costs(forward=3, p2p=1)
    assert overridden is not None
    assert overridden.costs == cf.Costs(forward=3, p2p=2)
    assert str(overridden.schedule) == "dapple(stages=2, micro_batches=8)"


def test_compare_points_out_another_cut(run: Run, drawn: Drawn) -> None:
    answer = run(f"{CHIMERA} --compare hanayo")
    assert answer.err.startswith("Note: chimera has 4 stages, hanayo 8, ")


def test_compare_with_a_file(run: Run, drawn: Drawn, exported: Callable[[str], Path]) -> None:
    path = exported("gems --stages 4 --micro-batches 4")
    assert run(f"{CHIMERA} --compare {path}").code == 0
    # A file's own options are what the other scheme takes over.
    assert run(f"show {path} --compare dapple").code == 0
    (_, gems, _), (first, dapple, _) = drawn
    assert gems is not None
    assert dapple is not None
    assert gems.schedule == first.schedule == cf.schemes.gems(stages=4, micro_batches=4)
    assert dapple.schedule == cf.schemes.dapple(stages=4, micro_batches=4)


@pytest.mark.parametrize(
    ("line", "compared", "message"),
    [
        (CHIMERA, "dapel", "Error: unknown scheme 'dapel'; did you mean 'dapple'?"),
        (CHIMERA, "", "Error: --compare '': name a scheme or a file"),
        (CHIMERA, "dapple '", 'Error: --compare "dapple \'": No closing quotation'),
        (CHIMERA, "nowhere.json", "Error: nowhere.json: no such file"),
        (CHIMERA, "dapple --stages 4", "Error: dapple needs --micro-batches"),
        (CHIMERA, "dapple --out x.png", "Error: --compare 'dapple --out x.png': --out belongs outside"),
        ("show pipedream --stages 4", "dapple", "Error: --compare dapple: dapple needs --micro-batches"),
        (
            "show dapple --stages 3 --micro-batches 4",
            "gems",
            "Error: --compare gems: --stages 3: two directions need an even number",
        ),
    ],
)
def test_compare_refused(refused: Callable[..., str], line: str, compared: str, message: str) -> None:
    assert refused(f"{line} --compare", compared).startswith(message)


def test_compare_with_a_wrong_flag(refused: Callable[..., str]) -> None:
    message = refused(f"{CHIMERA} --compare", "dapple --stage 4")
    assert "No such option: --stage" in message
    assert "counterflow show --compare" in message


def test_unknown_suffix(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "chimera.jpeg"
    message = refused(f"{CHIMERA} --out {path}")
    assert str(path) in message
    for suffix in (".png", ".svg", ".pdf", ".html", ".trace.json", ".csv"):
        assert suffix in message
    assert not path.exists()


def test_wrong_place(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "chimera.svg"
    assert str(path.parent) in refused(f"{CHIMERA} --out {path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(refused: Callable[..., str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "ermission denied" in refused(f"{CHIMERA} --out {tmp_path / 'x.svg'}")


def test_messages_need_a_file(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused(f"{CHIMERA} --messages")
    assert message.startswith("Error: --messages: the terminal draws no arrows; add --out FILE")
    assert run(f"{CHIMERA} --p2p 0.5 --messages --out {tmp_path / 'x.svg'}").code == 0
