from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import counterflow as cf
from counterflow.drawing.charting import chart_of
from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
from counterflow.planning.inputs import input_files
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads

from ..conftest import Run

STRAIGHT = "synthesize --placement straight --workers 4 --micro-batches 8"


def test_what_it_prints_as_json(run: Run) -> None:
    result = run(f"{STRAIGHT} --peak 4 --json").json
    assert result["makespan"] == result["steady"] == result["lower_bound"] == 27
    assert (result["gap"], result["proved"]) == (0, True)
    assert result["method"] == result["named"] == "zb-h1(stages=4, micro_batches=8)"
    assert (result["peak"], result["idle"]) == ([4] * 4, [3] * 4)
    assert result["reason"].startswith("worker 0 has 24 of work plus 3")


def test_a_stranger_reads_what_was_found_and_how_good_it_is(run: Run) -> None:
    answer = run(f"{STRAIGHT} --peak 5,4,4,4 --forward 1,1,1,2 --objective steady --moves 100 --replicas 1")
    assert answer.code == 0
    assert "Order for 4 workers, 4 stages (straight), 8 micro-batches" in answer.out
    assert "at most 5, 4, 4, 4 activations a worker" in answer.out
    for word in ("makespan", "steady step", "lower bound", "gap", "found by", "best scheme", "peak", "idle"):
        assert word in answer.out


@pytest.mark.parametrize(
    "placement",
    ["loop --chunks 2 --peak 6", "vee --peak 4", "wave --waves 2 --no-split", "two-way --pairs 1 --p2p 0.1"],
)
def test_the_file_is_one_that_other_commands_take(run: Run, tmp_path: Path, placement: str) -> None:
    path = str(tmp_path / "mine.json")
    result = run(
        f"synthesize --placement {placement} --workers 2 --micro-batches 4 --moves 50 --json --out", path
    ).json
    assert result["lower_bound"] <= result["makespan"] <= (result["named_value"] or float("inf"))
    assert run("check", path).code == 0
    p2p = "--p2p 0.1" if "--p2p" in placement else ""
    assert run(f"simulate {p2p} --json", path).json["makespan"] == result["makespan"]
    assert run("show", path).code == 0


@pytest.mark.parametrize("table", ["0,1,1,0,0,1", "0,1/1,0", "json", "schedule"])
def test_a_placement_of_the_users_own(run: Run, tmp_path: Path, table: str) -> None:
    path = str(tmp_path / "mine.json")
    argument = {"json": tmp_path / "table.json", "schedule": tmp_path / "old.json"}.get(table, table)
    if table == "json":
        Path(argument).write_text("[[0, 1, 1, 0, 2, 2]]")
    elif table == "schedule":
        Path(argument).write_text(dumps(schemes.chimera(4, 4)))
    assert run(f"synthesize --placement {argument} --micro-batches 4 --moves 0 --out", path).code == 0
    assert run("check", path).code == 0
    pipes = loads(Path(path).read_text(), path).placement.pipes_stages
    assert (
        pipes
        == {
            "0,1,1,0,0,1": ((0, 1, 1, 0, 0, 1),),
            "0,1/1,0": ((0, 1), (1, 0)),
            "json": ((0, 1, 1, 0, 2, 2),),
            "schedule": ((0, 1, 2, 3), (3, 2, 1, 0)),
        }[table]
    )


def test_a_placement_that_is_none_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    command = "synthesize --micro-batches 4 --placement"
    assert "worker 1 holds no stage" in refused(f"{command} 0,2,2,0")
    assert "pipes have 2 and 3 stages" in refused(f"{command} 0,1/0,1,1")
    assert "--workers 3: --placement 0,1 has 2" in refused(f"{command} 0,1 --workers 3")
    assert "--chunks 2: only for --placement loop; here it is 0,1" in refused(f"{command} 0,1 --chunks 2")
    assert "not a placement, table or file" in refused(f"{command} nowhere")
    assert "the number of workers is missing; give --workers" in refused(f"{command} vee")
    path = tmp_path / "table.json"
    for text, message in (
        ("[[0, -1]]", "not a table of workers"),
        ("{}", "not a table of workers"),
        ("[0,", "Expecting"),
    ):
        path.write_text(text)
        assert message in refused(f"{command} {path}")


def test_a_computed_order_says_what_it_is_for(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "mine.json")
    options = "--placement vee --workers 2 --micro-batches 4 --peak 4 --objective steady --moves 0"
    run(f"synthesize {options} --out", path)
    schedule = loads(Path(path).read_text(), path)
    assert str(schedule) == "synthesized(workers=2, micro_batches=4, peak=4, objective=steady)"
    assert [lane.name for lane in chart_of(cf.simulate(schedule)).lanes] == ["leg 0", "leg 1"]


def test_slices_are_ordered_within_a_memory(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "mine.json")
    options = "--placement straight --workers 4 --micro-batches 8 --no-split --slices 4 --moves 0"
    result = run(f"synthesize {options} --peak 1.75 --json --out", path).json
    assert (result["makespan"], result["lower_bound"], result["proved"]) == (26.25, 26.25, True)
    assert result["method"] == "dapple(stages=4, micro_batches=8, slices=4)"
    assert result["peak"] == [1.75, 1.5, 1.25, 1]
    assert str(loads(Path(path).read_text(), path)) == (
        "synthesized(workers=4, micro_batches=8, slices=4, peak=1.75)"
    )
    assert run("check", path).code == 0
    assert run("simulate --json", path).json["makespan"] == 26.25
    assert "8 micro-batches of 4 slices" in run(f"synthesize {options} --peak 1.75").out


def test_what_does_not_go_together_is_refused(refused: Callable[..., str]) -> None:
    assert "--chunks 2: only for --placement loop" in refused(f"{STRAIGHT} --chunks 2")
    assert "--micro-batches 0: must be 1 or more" in refused(
        "synthesize --placement vee --workers 2 --micro-batches 0"
    )
    assert "--workers 99999999" in refused("synthesize --placement vee --workers 99999999 --micro-batches 1")
    assert "24,000,000 ops" in refused("synthesize --placement vee --workers 4 --micro-batches 1000000")
    too_many = "synthesize --placement vee --workers 4 --micro-batches 1000 --slices 1000"
    assert "1,000 micro-batches of 1000 slices are 24,000,000 ops" in refused(too_many)
    assert "--slices 2: a profile has times of whole" in refused(f"{STRAIGHT} --slices 2 --profile p.toml")
    assert "--peak x: cannot read 'x'; give a number" in refused(f"{STRAIGHT} --peak x")
    assert "--peak: 2 numbers for 4 workers" in refused(f"{STRAIGHT} --peak 4,4")
    assert "--memory: needs the bytes of each stage" in refused(f"{STRAIGHT} --memory 1GiB")
    assert "also give --profile, --cluster, --micro-batch-size" in refused(f"{STRAIGHT} --model m.toml")


def layer(seconds: float) -> LayerProfile:
    return LayerProfile((1.0, 2.0), (seconds, 2 * seconds), (2 * seconds, 4 * seconds), (1e6, 2e6), 1e5, 1e3)


def test_measured_costs_take_the_place_of_given_ones(
    run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    inputs: dict[str, Model | Profile | Cluster] = {
        "model": Model("small", ("embedding", *("block",) * 6, "head")),
        "profile": Profile(
            "p", "d", "2026-01-01", {"embedding": layer(1.5), "block": layer(1), "head": layer(3)}
        ),
        "cluster": Cluster("c", 1, 4, 7e6, Link(0.01, 1e-9), Link(0.0, 0.0)),
    }
    for name, value in inputs.items():
        (tmp_path / f"{name}.toml").write_text(input_files.dumps(value), encoding="utf-8")
    flags = " ".join(f"--{name} {tmp_path / f'{name}.toml'}" for name in inputs)
    line = f"{STRAIGHT} {flags} --micro-batch-size 1 --moves 50 --json"
    result = run(line).json
    assert result["time_unit"] == "s"
    assert result["lower_bound"] >= 8 * 3 * 3
    assert max(result["peak"]) < 8  # of the cluster's memory
    assert "--forward: the profile has all costs" in refused(f"{line} --forward 2")
    assert "need 8 devices" in refused(f"{line} --replicas 2")
