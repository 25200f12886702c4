"""``counterflow layout``, and layouts where cuts are given as text."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import counterflow as cf
from counterflow.schedule.layouts import Layout

from ..conftest import Run


def test_a_layout_is_shown_by_rank(run: Run) -> None:
    answer = run("layout --pp 16", "Et*3|(tt|)*29,m|L")
    assert answer.code == 0
    lines = [line.rstrip() for line in answer.out.splitlines() if line.strip() and "─" not in line]
    assert lines == [
        "Et*3|(tt|)*29,m|L",
        "61 transformer layers, 1 MTP layer; pp 16, vpp 2: 32 stages",
        " rank   chunk 0                    chunk 1",
        " 0      embedding, 3 transformer   2 transformer",
        " 1–13   2 transformer              2 transformer",
        " 14     2 transformer              mtp",
        " 15     2 transformer              loss",
    ]


def test_a_layout_is_rederived(run: Run) -> None:
    answer = run("layout --layers 48 --pp 8 --vpp 2", "Et*3|(tt|)*29,m|L")
    assert answer.out.splitlines()[0] == "Et*4|(t*3|)*9,(t*4|)*4,tm|L"
    assert "(embedding -1, loss 2, MTP 2)" in answer.out
    empty = run("layout", "E||t|L")
    assert " 1      empty" in empty.out


def test_every_stage_is_in_json(run: Run) -> None:
    result = run("layout --pp 4 --json", "E|t*3|(t|)*3tt|m|L").json
    assert (result["pp"], result["vpp"], result["layers"], result["mtp"], result["changed"]) == (
        4,
        2,
        8,
        1,
        False,
    )
    assert [(stage["rank"], stage["chunk"], stage["layers"]) for stage in result["stages"]] == [
        *((rank, 0, layers) for rank, layers in enumerate(["E", "ttt", "t", "t"])),
        *((rank, 1, layers) for rank, layers in enumerate(["t", "tt", "m", "L"])),
    ]
    assert run("layout --json", "E||t|L").json["cuts"] is None


def test_what_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("layout").startswith("Error: no layout: give one, as in counterflow layout 'Et*3|")
    assert "at character 4 expected a whole number after *, got '*'" in refused("layout", "Ett*x")
    assert refused("layout --pp 5", "Et|tL").startswith("Error: --pp 5: 2 stages do not divide by it")
    assert refused("layout --layers 2 --stages 9", "Et|tL").startswith("Error: --layers 2: leaves ")
    job = tmp_path / "job.toml"
    assert "no such file" in refused(f"layout --torchtitan {job}")
    job.write_text("", encoding="utf-8")
    assert "leave out LAYOUT, --pp" in refused(f"layout --pp 2 --torchtitan {job}", "EtL")


def test_a_job_of_torchtitan(run: Run, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedul = 'GPipe'", encoding="utf-8"
    )
    answer = run(f"layout --torchtitan {job} --layers 6")
    assert answer.code == 0
    sections = tomllib.loads(answer.out)
    assert sections["pipeline"] == {"cuts": "Et*3|t*3,L"}
    assert "pipeline_parallel_schedul: no such key of torchtitan is known" in answer.err
    result = run(f"layout --torchtitan {job} --layers 6 --json").json
    assert (result["sections"], result["layout"], len(result["notes"])) == (sections, "Et*3|t*3,L", 2)


@given(st.text("EtmL|()*123, x-", max_size=16), st.integers(-1, 6), st.integers(-1, 4), st.integers(-1, 20))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_given_is_answered_or_refused(
    run: Run, text: str, pp: int, vpp: int, layers: int
) -> None:
    answer = run(f"layout --pp {pp} --vpp {vpp} --layers {layers}", "--", text)
    assert answer.code in (0, 2)
    assert bool(answer.out) == (answer.code == 0)


# --- Cuts as text ----------------------------------------------------------------------------------------


def test_plan_takes_and_prints_layouts(run: Run, tmp_path: Path) -> None:
    line = "plan --example chimera-bert48 --scheme dapple --workers 4"
    best = run(f"{line} --json").json
    shown = run(f"{line} --layout")
    assert (shown.out.strip(), shown.err) == (best["layout"], "")
    assert list(Layout.read(best["layout"]).cuts(50)) == best["best"][0]["cuts"]
    replanned = run(f"{line} --json --cuts", best["layout"]).json
    assert (replanned["best"][0]["cuts"], replanned["layout"]) == (best["best"][0]["cuts"], best["layout"])
    assert f"  layout                  {best['layout']}" in run(line).out
    out = tmp_path / "plan.toml"
    assert run(f"{line} --out {out}").code == 0
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    assert written["plan"]["layout"] == best["layout"]
    assert written["pipeline"]["cuts"] == best["best"][0]["cuts"]
    assert (
        cf.plan(example="chimera-bert48", schemes=("dapple",), depths=(4,), cuts=best["layout"])
        .best[0]
        .layout
        == best["layout"]
    )


def test_a_layout_of_another_model_is_refused(refused: Callable[..., str]) -> None:
    line = "plan --example chimera-bert48 --scheme dapple --cuts"
    assert refused(line, "Et*24|t*23,L").startswith(
        "Error: layout 'Et*24|t*23,L': has 47 transformer layers (t), expected 48: the model has 50 layers"
    )
    assert "has 1 MTP layer (m), expected none, as the model has none" in refused(line, "Et*24|t*24,mL")
    assert "stage 1 is empty, and here each stage has one layer" in refused(line, "Et*24||t*24,L")
    assert refused(line, "thirds").startswith("Error: --cuts thirds: must be balanced or even, or the layers")


def test_where_megatron_places_stages_elsewhere_a_note_says_so(run: Run) -> None:
    answer = run("plan --example chimera-bert48 --scheme chimera --workers 4 --layout")
    assert answer.code == 0
    assert len(Layout.read(answer.out.strip()).stages) == 4
    assert answer.err.startswith(
        "chimera places stages in its own way; Megatron-LM places stage k on rank k % 4"
    )


def test_a_model_without_an_embedding_has_no_layout(
    run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    assert run(f"plan --example chimera-bert48 --save-inputs {tmp_path}").code == 0
    model = tmp_path / "model.toml"
    text = model.read_text(encoding="utf-8")
    begin, end = text.index("[[layers]]"), text.index('kind = "block"')
    model.write_text(text[:begin] + "[[layers]]\n" + text[end:], encoding="utf-8")
    line = f"plan --example chimera-bert48 --model {model} --scheme dapple --workers 4"
    assert run(f"{line} --json").json["layout"] is None
    assert "has no layout, as its first and last layer are not each" in refused(f"{line} --layout")


@pytest.mark.parametrize("cuts", ["Et*3|tt|tt|tL", [4, 6, 8]])
def test_a_config_takes_layouts(run: Run, cuts: object) -> None:
    line = "train --dry-run --set model.layers=8 --set schedule.scheme=dapple --set schedule.stages=4"
    answer = run(line, "--set", f"pipeline.cuts={cuts}", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["stage_layers"] == [[0, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("cuts", "reason"),
    [
        ("Et*3|tt|ttt|tL", "has 9 transformer layers (t), expected 8: the model has 10 layers"),
        (
            "Et*3|tt|t*3,L",
            "has 3 stages, expected 4; counterflow layout 'Et*3|tt|t*3,L' --stages 4 re-derives it",
        ),
        ("halves", "layout 'halves': at character 1 expected E, t, m, L, | or (, got 'h'"),
    ],
)
def test_a_config_refuses_other_layouts(refused: Callable[..., str], cuts: str, reason: str) -> None:
    line = "train --dry-run --set model.layers=8 --set schedule.scheme=dapple --set schedule.stages=4"
    message = refused(line, "--set", f"pipeline.cuts={cuts}")
    assert "pipeline.cuts: layout" in message
    assert reason in message
