from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from counterflow.cli.output.screen import Screen
from counterflow.cli.output.train_progress import TrainProgress, introduction
from counterflow.training import RunConfig, step_memory
from counterflow.training.folder import read_metrics
from counterflow.training.training_report import About

from ...forked import torchrun
from ..conftest import ENVIRONMENT, Run

SMALL = (
    "train --workers 2 --set model.layers=2 --set model.hidden=16 --set model.positions=16 "
    "--set train.samples=16 --set train.threads=1 "
)
LOCAL = SMALL + "--set pipeline.transport=local "
PLANNED = "--set plan.mini_batch=16 --set plan.samples_per_second=5"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two threads."""
    from typer.testing import CliRunner

    from counterflow.cli import application

    folder = tmp_path_factory.mktemp("runs") / "run"
    result = CliRunner(env=ENVIRONMENT).invoke(
        application(),
        [
            *LOCAL.split(),
            *PLANNED.split(),
            "--steps",
            "6",
            "--set",
            "train.evaluate_every=3",
            "--out",
            str(folder),
        ],
    )
    assert result.exit_code == 0, result.stderr
    (folder / "stdout").write_text(result.stdout, encoding="utf-8")
    (folder / "stderr").write_text(result.stderr, encoding="utf-8")
    return folder


def test_what_is_trained_comes_first(trained: Path) -> None:
    lines = (trained / "stdout").read_text().splitlines()
    assert lines[0] == "gpt, 2 blocks, hidden 16, heads 4, positions 16: 15,040 parameters"
    assert lines[1].startswith("the help text that ships with Python: ")
    assert lines[1].endswith("nats a byte")
    assert lines[2:6] == [
        "chimera stages=2 micro_batches=4 pairs=1 concat=direct",
        "2 workers · 2 stages (layers 0–2, 3)",
        "6 steps, each 16 samples of 16 bytes in 4 micro-batches",
        "workers compute on the CPU, messages by local",
    ]


def test_then_what_came_of_it(trained: Path) -> None:
    out = (trained / "stdout").read_text()
    rows = {line.strip() for line in out.splitlines()}
    assert any(row.startswith("Trained 6 steps in ") and row.endswith(" samples/s") for row in rows)
    for begin in (
        "loss",
        "ops of a step",
        "bubble ratio",
        "whole step",
        "saved for backward",
        "timeline.png",
    ):
        assert any(row.startswith(begin) for row in rows), begin
    assert "measured   predicted   planned" in out
    assert "measured in this run; predicted from ops timed at its start; planned from the profile" in out
    (step,) = [line.split()[-2:] for line in out.splitlines() if "whole step" in line]
    assert step == ["3200", "ms"]  # 16 samples at 5 a second
    (speed,) = [line.split()[-2:] for line in out.splitlines() if "samples/s of these steps" in line]
    summary = json.loads((trained / "summary.json").read_text())
    assert speed == [f"{16 / summary['step_seconds']:.4g}", "5"]
    assert f"counterflow show {trained}" in out


def test_the_page_of_the_first_run_shows_the_same_rows(trained: Path) -> None:
    """But for those of a plan and of ops that were slower, and whichever workers share one."""

    def rows(text: str) -> list[str]:
        table = (
            text.partition("measured   predicted")[2]
            .partition("\n")[2]
            .strip()
            .partition("\n")[2]
            .partition("\n\n")[0]
        )
        labels = [re.split(r",? workers? \d|  ", line.strip())[0] for line in table.splitlines()]
        often = ("samples/s of these steps", "measured in this run", "the same, for ops as in the run")
        return list(dict.fromkeys(row for row in labels if row and not any(part in row for part in often)))

    page = (Path(__file__).parents[3] / "docs" / "first-run.md").read_text(encoding="utf-8")
    assert rows((trained / "stdout").read_text()) == rows(page)


def test_progress_is_on_stderr(trained: Path) -> None:
    lines = (trained / "stderr").read_text().splitlines()
    lines = [line for line in lines if "no step yet after" not in line]  # where a start takes long
    assert lines[0] == f"starting 2 workers; results go to {trained}"
    assert lines[1].startswith("step 1/6  loss ")
    assert lines[1].endswith(" left")
    assert [line.split("  ")[0] for line in lines[2:]] == ["step 3", "step 6"]
    assert all("validation loss" in line for line in lines[2:])


def test_the_picture_is_one(trained: Path) -> None:
    assert (trained / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object(run: Run, tmp_path: Path) -> None:
    answer = run(f"{LOCAL} --scheme dapple --steps 2 --json --out {tmp_path / 'run'}")
    assert answer.code == 0
    result = answer.json
    assert (result["scheme"], result["workers"], result["steps"], result["stopped"]) == (
        "dapple",
        2,
        2,
        False,
    )
    assert result["folder"] == str(tmp_path / "run")
    assert result["training_loss"] == pytest.approx(
        sum(line["loss"] for line in read_metrics(tmp_path / "run")[:2]) / 2
    )
    assert {"ops_seconds", "bubble_ratio", "saved_bytes", "step_seconds", "validation_loss"} <= result.keys()
    assert answer.err.splitlines()[0].startswith("starting 2 workers")


def test_a_dry_run_starts_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run(f"{LOCAL} --steps 6 --dry-run")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0] == "gpt, 2 blocks, hidden 16, heads 4, positions 16: 15,040 parameters"
    assert lines[-1] == "results would go to runs/chimera-1, which can be written; nothing was started"
    assert "worker    weights gradients optimizer activations  messages workspace     total" in lines
    result = run(f"{LOCAL} --steps 6 --dry-run --json").json
    assert (result["steps"], result["folder"], result["stage_layers"]) == (
        6,
        "runs/chimera-1",
        [[0, 2], [3, 3]],
    )
    assert sum(result["least_bytes"]) == 2 * 4 * 4 * result["parameters"]  # in both directions
    parts = "weights", "gradients", "optimizer"
    for worker, least in zip(result["memory"], result["least_bytes"], strict=True):
        assert 0 <= sum(worker[part] for part in parts) - least < 512  # Adam counts steps of each weight
    assert all(worker["activations"] for worker in result["memory"])
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tries_the_folder_and_the_memory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, message in (
        ("file", "is, or lies in, a file; results need a folder"),
        ("file/run", "is, or lies in, a file; results need a folder"),
        ("/proc/none/run", "cannot be written"),
    ):
        answer = run(f"{LOCAL} --dry-run --out {tmp_path / folder}")
        assert answer.code == 2
        assert message in answer.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    answer = run(f"{LOCAL} --dry-run --out {tmp_path / 'run'}")
    assert (answer.code, "contains a run already (summary.json)" in answer.err) == (2, True)
    large = run("train --dry-run --set model.hidden=400000 --set pipeline.transport=local").out
    assert "Warning: worker 0 needs 111.8 TiB at least, and " in large


def test_a_dry_run_warns_of_activations(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "available_bytes_on", lambda *_: 2**18)
    lines = run(f"{LOCAL} --dry-run").out.splitlines()
    assert "256 KiB available to a worker: does not fit" in lines
    (warning,) = (line for line in lines if line.startswith("Warning"))
    assert warning.endswith(" in a step, and 256 KiB are available to it")


def test_a_dry_run_says_why_activations_were_not_counted(run: Run) -> None:
    lines = run(f"{SMALL} --dry-run --set mesh.dp_shard=2").out.splitlines()
    assert "activations were not counted: the mesh divides the weights" in lines
    many = run(f"{LOCAL} --dry-run --set schedule.micro_batches=1000 --set train.samples=1000")
    assert "activations were not counted: there are too many layers" in many.out
    assert run(f"{SMALL} --dry-run --set mesh.dp_shard=2 --json").json["memory"] is None


def test_every_key_is_listed(run: Run) -> None:
    lines = run("train --keys").out.splitlines()
    assert (
        "train.steps = 400  # mini-batches to train on, one update each; a whole number, 1 to 1,000,000,000"
        in lines
    )
    assert any(line.startswith("schedule.micro_batches  # ") for line in lines)
    names = [line.partition(" ")[0] for line in lines]
    assert [key["key"] for key in run("train --keys --json").json["keys"]] == names
    sections = [name.partition(".")[0] for name in names]
    assert list(dict.fromkeys(sections)) == list(RunConfig.model_fields)


def test_show_a_run(run: Run, trained: Path, tmp_path: Path) -> None:
    answer = run(f"show {trained}")
    assert (answer.code, answer.err) == (0, "")
    headings = [line for line in answer.out.splitlines() if "chimera" in line]
    assert headings[0].startswith("measured, step ")
    assert headings[1] == "predicted: chimera  D=2, N=4, direct"
    assert run(f"show {trained} --compare predicted").out == answer.out
    twice = run(f"show {trained} --compare {trained}").out
    assert twice.count("measured, step") == 2
    path = tmp_path / "run.trace.json"
    assert run(f"show {trained} --memory --out {path}").err == f"Wrote {path}\n"
    json.loads(path.read_text())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--compare chimera",
            "--compare chimera: a run is compared with 'predicted' or with the folder of another",
        ),
        ("--stages 4", "is a run, whose schedule and costs are known: leave out --stages"),
        ("--forward 2", "is a run, whose schedule and costs are known: leave out --forward"),
    ],
)
def test_show_a_run_refuses(refused: Callable[..., str], trained: Path, more: str, message: str) -> None:
    assert message in refused(f"show {trained} {more}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps 0", "--steps: train.steps = 0: must be a whole number, 1 to 1,000,000,000"),
        ("--workers 3", "schedule.stages = 3: "),
        ("--scheme chimra", 'schedule.scheme: unknown scheme "chimra"'),
        (
            "--set layers=3",
            "--set layers=3: must have the form section.key=value, as in --set train.steps=100",
        ),
        ("--set model.layer=3", "--set model.layer: unknown key; did you mean model.layers?"),
        ("--set data.path=nowhere", "nowhere: no such file or folder"),
        (
            "--set pipeline.transport=nccl --set pipeline.replicas=99",
            "396 workers need a GPU each, but this machine",
        ),
        ("nowhere.toml", "nowhere.toml: no such file"),
    ],
)
def test_wrong_requests(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(f"train {line}").replace("'", '"')
    assert not list(tmp_path.iterdir())


def test_a_run_that_dies_is_one_line_and_exit_1(run: Run, tmp_path: Path) -> None:
    answer = run(
        f"{LOCAL} --steps 50 --set optimizer.learning_rate=1e30 --set pipeline.clip_norm=0 "
        f"--set optimizer.warmup_steps=0 --out {tmp_path / 'run'}"
    )
    assert answer.code == 1
    *_, last = answer.err.splitlines()
    assert last.startswith("Error: in step ")
    assert "the loss is " in last
    assert last.endswith(f"are in {tmp_path / 'run'}")
    assert answer.err.count("Error") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_processes_end_at_a_signal_with_what_was_reached(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "counterflow", *SMALL.split(), "--steps", "1000000"]
    with subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 100
        while not _grown(folder / "metrics.jsonl"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, number)  # to all, as a terminal or Slurm does
        out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert "Traceback" not in err
    steps = max(int(line["step"]) for line in read_metrics(folder))
    assert f"Stopped after {steps:,} of 1,000,000 steps" in out
    (resume,) = [line.removeprefix("Go on: ") for line in out.splitlines() if line.startswith("Go on: ")]
    assert resume == f"counterflow train {folder}/config.toml --set train.resume={folder} --set train.out="
    monkeypatch.chdir(tmp_path)
    assert f"resumes from step {steps:,}" in run(f"{resume.removeprefix('counterflow ')} --dry-run").out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (steps, True)
    assert {"checkpoint", "timeline.json", "timeline.png"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("number", "code", "times"), [(signal.SIGINT, 130, 1), (signal.SIGINT, 130, 2), (signal.SIGTERM, 75, 1)]
)
def test_a_signal_while_workers_start_ends_all(
    tmp_path: Path, number: signal.Signals, code: int, times: int
) -> None:
    """As soon as it says that they start; benchmarks/signals.py has more moments."""
    command = [sys.executable, "-m", "counterflow", *SMALL.split(), "--steps", "1000000"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("starting 2 workers")
        for _ in range(times):
            os.killpg(process.pid, number)
        _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (code, "Stopped\n")
    assert not (tmp_path / "run").exists()
    deadline = time.monotonic() + 100
    while _alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(group: int) -> bool:
    """Check that a group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_signal_before_it_begins_asks_to_be_resubmitted(tmp_path: Path) -> None:
    """While torch is imported: here a file stands in for the module that does."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'counterflow.training.run':\n"
        "            os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "counterflow", "train", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, "Stopped by SIGUSR1\n")
    assert not (tmp_path / "run").exists()


def test_as_the_only_worker_of_torchrun(tmp_path: Path) -> None:
    line = SMALL.replace("--workers 2", "--workers 1 --scheme gpipe --set schedule.micro_batches=2")
    words = *line.split(), "--steps", "2", "--out", str(tmp_path / "run")
    printed = torchrun(tmp_path / "logs", "--standalone", "-m", "counterflow", *words)
    assert "Trained 2 steps" in printed
    assert len(read_metrics(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (SMALL, "3 processes were started, but 2 workers per replica and 1 replica need 2: start 2"),
        (LOCAL, 'pipeline.transport = "local": runs in one process, but torchrun started several'),
    ],
)
def test_refused_under_torchrun(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert message in refused(line)


ABOUT = About(
    model="gpt",
    parameters=1,
    text="text",
    text_bytes=1,
    unigram_entropy=1.0,
    scheme="chimera",
    options={"stages": 2},
    workers=2,
    replicas=2,
    pipes=2,
    stage_layers=((0, 0), (1, 3)),
    micro_batches=4,
    samples=32,
    positions=8,
    steps=40,
    first_step=10,
    workers_here=4,
    cores=2,
    on_cpu=True,
)


@pytest.mark.parametrize("width", [50, 120])
def test_a_bar_on_a_terminal(width: int) -> None:
    written = io.StringIO()
    progress = TrainProgress(introduces=False)
    progress.console = Screen(file=written, force_terminal=True, width=width, color_system=None)
    progress.begun(ABOUT, Path("run"))
    progress.recorded([])
    assert "time their ops" not in written.getvalue()  # it has just been started
    progress.started -= 60
    progress.recorded([])
    progress.bar.refresh()  # type: ignore[union-attr]
    assert (
        "make their stages and time their ops, 1 min" in written.getvalue().replace("\n", " ") or width < 100
    )
    step = {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 0.1, "samples_per_second": 1.0}
    progress.recorded([step | {"step": 11, "seconds": 1.0}, step | {"step": 13, "seconds": 2.0}])
    progress.recorded([])
    progress.recorded([{"step": 13, "validation_loss": 3.25, "seconds": 2.5}])
    assert progress.bar is not None
    progress.bar.refresh()
    progress.ended()
    shown = written.getvalue()
    assert shown.startswith("starting 4 workers; results go to run\nCtrl-C ends it after the step in flight")
    assert "starting workers" in shown
    assert "13/40" in shown
    assert "loss 2.500  64 samples/s" in shown
    assert "step 13  validation loss 3.250  training loss 2.500" in shown
    assert ("━" in shown) is (width > 100)
    assert "\x1b[?25h" in shown  # the cursor is back


def test_introduction() -> None:
    assert introduction(ABOUT)[2:] == [
        "chimera stages=2",
        "2 workers · 2 replicas · 2 stages (layers 0, 1–3)",
        "40 steps, resumes from step 10, each 32 samples of 8 bytes in 8 micro-batches",
        "workers compute on the CPU",
    ]


def _grown(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 500
