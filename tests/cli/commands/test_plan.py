from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterflow.cli import application
from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
from counterflow.planning.inputs import input_files
from counterflow.planning.task import EXAMPLES, load_example
from counterflow.training import load_config

from ..conftest import ENVIRONMENT, Run

KEYS = [
    "model",
    "profile",
    "cluster",
    "mini_batch",
    "usable_bytes",
    "layout",
    "best",
    "schemes",
    "rejected",
    "omitted",
    "why",
    "synthesized",
    "by_length",
]


def layer(seconds: float, weights: float) -> LayerProfile:
    sizes = (1.0, 2.0, 4.0, 8.0)
    return LayerProfile(
        sizes,
        tuple(seconds * n for n in sizes),
        tuple(2 * seconds * n for n in sizes),
        tuple(4096.0 * n for n in sizes),
        weights,
        1024.0,
    )


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    """Flags for a small GPT on a machine with two workers."""
    shape: dict[str, str | int | float | bool]
    shape = {"kind": "gpt", "layers": 2, "hidden": 16, "heads": 2, "positions": 16}
    sections = {
        "model": Model("small gpt", ("embedding", "block", "block", "head"), train=shape),
        "profile": Profile(
            "p",
            "a processor",
            "2026-01-01",
            {"embedding": layer(1e-4, 2e4), "block": layer(1e-3, 1e4), "head": layer(1e-3, 2e4)},
        ),
        "cluster": Cluster("one machine", 1, 2, 1e9, Link(1e-5, 1e-9), Link(0.0, 0.0), cores=2),
    }
    for name, value in sections.items():
        assert isinstance(value, Model | Profile | Cluster)
        (tmp_path / f"{name}.toml").write_text(input_files.dumps(value), encoding="utf-8")
    return " ".join(f"--{name} {tmp_path / name}.toml" for name in sections) + " --mini-batch 16"


def test_json_is_one_object(run: Run, inputs: str) -> None:
    shown = run(f"plan {inputs} --json").json
    assert list(shown) == ["format", *KEYS]
    assert [plan["step_seconds"] for plan in shown["schemes"]] == sorted(
        plan["step_seconds"] for plan in shown["schemes"]
    )
    best = shown["best"][0]
    assert best == shown["schemes"][0]
    assert best["samples_per_second"] == pytest.approx(16 / best["step_seconds"])
    assert len(best["peak_bytes"]) == best["workers"]
    assert sum(shown["why"]["parts_seconds"].values()) == pytest.approx(best["step_seconds"])
    assert [
        sum(w[f"{name}_bytes"] for name in ("weights", "activations", "buffers")) for w in best["memory"]
    ] == (pytest.approx(best["peak_bytes"]))


def test_a_mini_batch_of_one_is_one_sample(run: Run, inputs: str) -> None:
    alone = inputs.replace("--mini-batch 16", "--mini-batch 1")
    assert "· mini-batch 1 sample ·" in run(f"plan {alone} --scheme gpipe").out
    assert "· mini-batch 16 samples ·" in run(f"plan {inputs} --scheme gpipe").out


def test_the_plan_is_a_file_that_train_runs(run: Run, inputs: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    answer = run(f"plan {inputs} --scheme chimera --workers 2 --micro-batch-size 4 --out", str(out))
    assert answer.code == 0
    assert f"counterflow train {out}" in answer.err
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    assert written["schedule"] == {
        "scheme": "chimera",
        "stages": 2,
        "micro_batches": 4,
        "pairs": 1,
        "concat": written["schedule"]["concat"],
    }
    assert written["train"]["samples"] == 16
    assert written["plan"]["micro_batch"] == 4
    assert written["plan"]["devices"] == [0, 1]
    assert written["pipeline"]["transport"] == "gloo"
    folder = tmp_path / "run"
    local = "--set pipeline.transport=local --set train.threads=1 --steps 2 --json --out"
    trained = run(f"train {out} {local}", str(folder))
    assert trained.code == 0, trained.err
    assert trained.json["steps"] == 2
    # What was expected stays with the run, and its config is read back.
    run_config = load_config(folder / "config.toml")
    assert run_config.plan.step_seconds == written["plan"]["step_seconds"]
    assert list(run_config.pipeline.cuts or ()) == written["pipeline"]["cuts"]


def test_the_plan_of_the_page_of_experts_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "experts.md").read_text(encoding="utf-8")
    plan, train = re.findall(r"^\$ counterflow (.+)$", page, re.MULTILINE)
    planned = run(plan)
    assert planned.code == 0, planned.err
    assert "experts over 2, weights sharded over 2" in planned.out
    assert load_config(tmp_path / "plan.toml").mesh.values()["ep"] == 2
    trained = run(f"{train} --json")
    assert trained.code == 0, trained.err
    assert (trained.json["steps"], trained.json["mesh"]) == (3, {"dp_shard": 2})


def test_a_computed_order_that_wins_is_written_and_runs(run: Run, inputs: str, tmp_path: Path) -> None:
    out, order = tmp_path / "plan.toml", tmp_path / "plan.schedule.json"
    line = f"plan {inputs} --scheme dapple --workers 2 --micro-batch-size 4 --recompute none"
    named = run(f"{line} --json").json
    assert named["synthesized"] is None
    shown = run(f"{line} --synthesize --moves 0 --json --out", str(out)).json
    orders = shown["synthesized"]
    best = orders["orders"][0]
    assert orders["named"] == named["best"][0]
    assert orders["gain"] == pytest.approx(1 - best["step_seconds"] / named["best"][0]["step_seconds"])
    assert orders["gain"] > 0.02
    assert best["lower_bound_seconds"] <= best["step_seconds"] == shown["best"][0]["step_seconds"]
    assert [plan["scheme"] for plan in shown["schemes"]] == ["synthesized", "dapple"]
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    assert written["schedule"] == {"file": str(order)}
    assert written["plan"]["step_seconds"] == best["step_seconds"]
    assert run(f"check {order}").code == 0
    assert run(f"simulate {order} --json").json["workers"] == 2
    local = "--set pipeline.transport=local --set train.threads=1 --steps 2 --json --out"
    trained = run(f"train {out} {local}", str(tmp_path / "run"))
    assert trained.code == 0, trained.err
    assert trained.json["steps"] == 2
    text = run(f"{line} --synthesize --moves 0").out
    assert f"Computed orders: the best saves {orders['gain']:.1%} of 1F1B (dapple" in text


def test_an_example_as_files_plans_the_same(run: Run, tmp_path: Path) -> None:
    limits = "--scheme dapple --workers 8 --micro-batch-size 4 --json"
    saved = run("plan --example chimera-bert48 --save-inputs", str(tmp_path / "mine"))
    assert (saved.code, saved.out) == (0, "")
    command = saved.err.split("counterflow ")[1].strip()
    assert run(f"{command} {limits}").json == run(f"plan --example chimera-bert48 {limits}").json


def test_the_table_says_what_the_json_says(run: Run) -> None:
    line = "plan --example chimera-bert48 --scheme dapple --scheme gems --workers 4 --workers 8 --cuts even"
    shown, text = run(f"{line} --json").json, run(line).out
    for plan in shown["schemes"]:
        assert f"{plan['step_seconds']:.4g} s" in text
    assert "peak memory by worker   0: " in text
    assert "The second-best plan, gems" in text
    assert "slower by bound" in text


@pytest.mark.parametrize(("columns", "is_noted"), [(80, True), (132, False)])
def test_a_narrow_terminal_is_told_what_it_is_not_shown(inputs: str, columns: int, is_noted: bool) -> None:
    answer = CliRunner(env=ENVIRONMENT | {"COLUMNS": str(columns)}).invoke(
        application(), ["plan", *inputs.split(), "--scheme", "dapple"], prog_name="counterflow"
    )
    assert answer.exit_code == 0, answer.stderr
    note = "Columns sync and devices are hidden (needs a terminal of 132 columns, or --json)"
    assert (note in " ".join(answer.stdout.split())) is is_noted  # its lines are wrapped


def test_the_examples_are_listed(run: Run) -> None:
    assert [line.split()[0] for line in run("plan --list").out.splitlines()] == list(EXAMPLES)
    assert [e["name"] for e in run("plan --list --json").json["examples"]] == list(EXAMPLES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "nothing to plan: give --example NAME (see --list), or also --model, --profile, --cluster,"),
        ("plan --example chimera", "unknown example 'chimera'"),
        ("plan --example chimera-bert48 --workers 7", "--workers 7: must divide the 32 devices"),
        ("plan --example chimera-bert48 --scheme chimra", "did you mean 'chimera'"),
        ("plan --example chimera-bert48 --seconds 5", "Error: --seconds: only with --synthesize\n"),
        ("plan --example chimera-bert48 --mini-batch 0", "--mini-batch 0: must be 1 or more"),
        ("plan --example chimera-bert48 --micro-batch-size 0", "--micro-batch-size 0: must be 1 or more"),
        (
            "plan --example chimera-bert48 --option chimera.pears=1",
            "Error: --option chimera.pears: chimera has no option 'pears'; options that can be constrained: "
            "micro_batches, pairs, concat, split\n",
        ),
        (
            "plan --example chimera-bert48 --option chimera.pairs=x",
            "Error: --option chimera.pairs=x: must be a whole number (a divisor of stages/2)\n",
        ),
        (
            "plan --example chimera-bert48 --option concat=x",
            "Error: --option concat=x: unknown; legal: direct, forward-doubling, backward-halving\n",
        ),
        (
            "plan --example chimera-bert48 --option pairs",
            "Error: --option pairs: must be NAME=VALUE or SCHEME.NAME=VALUE, as in chimera.pairs=1\n",
        ),
        ("plan --example chimera-bert48 --option chimra.pairs=1", "did you mean 'chimera'"),
        (
            "plan --example chimera-bert48 --scheme dapple --option chimera.pairs=1",
            "Error: --option chimera.pairs: chimera is not among the chosen schemes (dapple)\n",
        ),
        (
            "plan --example chimera-bert48 --option chimera.stages=4",
            "Error: --option chimera.stages: the depth has a constraint of its own; give --workers 4\n",
        ),
        (
            "plan --example chimera-bert48 --option periods=4",
            "Error: --option periods: a plan simulates as many updates as needed; omit it\n",
        ),
        (
            "plan --example chimera-bert48 --cuts odd",
            "Error: --cuts odd: must be balanced or even, or the layers at which stages begin after the",
        ),
        ("plan --example chimera-bert48 --cuts 3,2", "Error: --cuts [3, 2]: stage 2 begins at layer 2; cuts"),
        (
            "plan --example chimera-bert48 --arrangement inside",
            "Error: --arrangement 'inside': unknown; legal: pipeline-inside, replicas-inside, ",
        ),
        (
            "plan --example hanayo-bert64 --tensor-parallel 3",
            "Error: --tensor-parallel 3: must divide the 8 devices of a node of cluster 8 A100, NVLink",
        ),
        ("plan --example chimera-bert48 --top 0", "Invalid value for '--top'"),
        ("plan --example chimera-bert48 --model none.toml", "none.toml: no such file"),
    ],
)
def test_wrong_requests_are_refused(refused: Callable[..., str], line: str, message: str) -> None:
    assert message in refused(line)


def test_options_arrangements_and_cuts_are_kept(run: Run) -> None:
    line = "plan --example mixpipe-bert48 --workers 4 --micro-batch-size 8 --json"
    wanted = "--scheme dapple --scheme chimera --option chimera.concat=direct --option pairs=2 --top 8"
    best = run(f"{line} {wanted} --arrangement replicas-inside --cuts 5,10,20").json["best"]
    assert {plan["scheme"] for plan in best} == {"dapple", "chimera"}
    for plan in best:
        assert (plan["arrangement"], plan["cuts"]) == ("replicas-inside", [5, 10, 20])
        if plan["scheme"] == "chimera":
            assert (plan["options"]["pairs"], plan["options"]["concat"]) == (2, "direct")


def test_tensor_parallelism_is_planned_where_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    line = "plan --example hanayo-bert64 --scheme gpipe --workers 2"
    (plan,) = run(f"{line} --tensor-parallel 4 --json").json["best"]
    assert (plan["replicas"], plan["workers"], plan["tensor_parallel"]) == (1, 2, 4)
    assert plan["mesh"] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    text = run(f"{line} --tensor-parallel 4").out
    assert "1 replica, tensor parallelism over 4, micro-batches of" in text
    assert "  mesh                    [[[0, 1, 2, 3], [4, 5, 6, 7]]] (replica, worker, tp)\n" in text
    (plain,) = run(f"{line} --json").json["best"]
    assert (plain["tensor_parallel"], plain["mesh"]) == (1, None)
    out = tmp_path / "plan.toml"
    (divided,) = run(f"{line} --tensor-parallel 2 --out {out} --json").json["best"]
    config = load_config(out)
    assert (config.mesh.tp, config.processes) == (2, 8)
    devices = [device for replica in divided["mesh"] for worker in replica for device in worker]
    assert list(config.plan.devices or ()) == devices


def test_wanted_values_that_leave_no_candidate(run: Run) -> None:
    line = "plan --example chimera-bert48 --workers 4 --micro-batch-size 8 --scheme"
    answer = run(f"{line} chimera --option chimera.pairs=3")
    assert (answer.code, answer.out) == (1, "")
    assert "chimera: no candidate at depth 4 with pairs 3 (tried: 1, 2)\n" in answer.err
    assert "dapple: no candidate at depth 4 with split true (tried: false)\n" in (
        run(f"{line} dapple --option split=true").err
    )
    message = "no candidate at depth 4 with 3 stages, which the cuts make"
    assert message in run(f"{line} dapple --cuts 5,10").err


def test_where_nothing_fits_the_work_has_failed(run: Run, tmp_path: Path) -> None:
    cluster = load_example("chimera-bert48").cluster
    text = input_files.dumps(cluster).replace(
        f"memory_bytes = {cluster.memory_bytes!r}", "memory_bytes = 6.5e9"
    )
    path = tmp_path / "small.toml"
    path.write_text(text, encoding="utf-8")
    answer = run(f"plan --example chimera-bert48 --scheme gems --cluster {path}")
    assert (answer.code, answer.out) == (1, "")
    assert "no plan fits" in answer.err
    assert "gems: needs at least" in answer.err


def test_a_model_without_a_train_table_has_no_plan_file(run: Run, inputs: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(path.read_text(encoding="utf-8").split("[train]")[0], encoding="utf-8")
    answer = run(f"plan {inputs} --scheme dapple --out", str(tmp_path / "plan.toml"))
    assert answer.code == 2
    assert "has no [train] table" in answer.err
    text = path.read_text(encoding="utf-8") + '[train]\nkind = "gpt"\nlayers = 9\n'
    path.write_text(text, encoding="utf-8")
    answer = run(f"plan {inputs} --scheme dapple --workers 2 --out", str(tmp_path / "plan.toml"))
    assert answer.code == 2
    assert "its [train] table makes 11 layers (embedding, blocks, head), but the model lists 4" in answer.err


def test_planning_starts_without_torch() -> None:
    code = (
        "import sys; from counterflow.planning.task import load_example;"
        "from counterflow.planning.search import search;"
        "from counterflow.planning.inputs import input_files;"
        "e = load_example('chimera-bert48');"
        "search.search(e.model, e.profile, e.cluster, 512,"
        " search.Constraints(schemes=('dapple',), depths=(4,), samples=(4,)));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
