"""The examples run: scripts on threads here, files for other machines as far as their commands go."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hatchling.build import build_wheel

import counterflow as cf
from counterflow.program.actions import Compute, Matching
from counterflow.runtime.pipeline_properties import PipelineProperties
from counterflow.training import load_config
from counterflow.training.folder import read_metrics

from ..cli.conftest import Run, run
from ..forked import launching
from ..models.hf import tiny

__all__ = ["run"]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_the_table_names_every_file() -> None:
    named = re.findall(r"^\| \[(.+?)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert set(named) == files - {"README.md"}


def test_own_model_trains_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(cf, "launch", partial(cf.launch, transport="local"))
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", first)
    assert found, first
    assert float(found[2]) < 0.9 * float(found[1])
    assert second == "all 30 steps are made"


def test_only_the_first_and_the_last_stage_read_data() -> None:
    """And the losses are those of workers that all read it."""
    scope = runpy.run_path(str(EXAMPLES / "data_loader.py"))
    (losses, *others), reads = zip(*cf.launch(scope["work"], workers=4, transport="local"), strict=True)
    assert reads == (512, 0, 0, 512)
    assert all(other == losses for other in others)
    with mock.patch.object(PipelineProperties, "reads_inputs", True):
        (all_read, *_), reads = zip(*cf.launch(scope["work"], workers=4, transport="local"), strict=True)
    assert reads == (512, 512, 512, 512)
    assert all_read == losses


def test_irregular_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """It compares with one process by itself."""
    runpy.run_path(str(EXAMPLES / "irregular_batches.py"), run_name="__main__")
    assert re.fullmatch(r"boxes:( \d\.\d{4}){3}\ngraphs:( \d\.\d{4}){3}\n", capsys.readouterr().out)


def test_a_trace_names_every_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes: a profiler sees the threads of its own."""
    monkeypatch.chdir(tmp_path)
    launching(EXAMPLES / "trace_of_a_step.py")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    program = cf.lower(cf.schemes.zb_v(2, 4), matching=Matching.TAG)
    for worker, actions in enumerate(program.actions):
        its = [e for e in events if e["pid"] == worker and e.get("cat") == "user_annotation"]
        names = [event["name"] for event in sorted(its, key=lambda event: event["ts"])]
        computed = [str(action) for action in actions if isinstance(action, Compute)]
        assert [name for name in names if name in computed] == computed
        assert set(map(str, actions)) <= set(names)
        assert any(
            e.get("cat") == "cpu_op" and e["name"] == "aten::addmm" and e["pid"] == worker for e in events
        )


def test_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"a text, number {number}, that says nothing." for number in range(60)]
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer(texts).save_pretrained(tmp_path / "base")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    small = ["pipeline.transport=local", "train.samples=8", "train.threads=1", "train.steps=3"]
    words = ["base", "texts.jsonl", "out", *small, "model.positions=16", "optimizer.warmup_steps=0"]
    monkeypatch.setattr(sys, "argv", ["hugging_face.py", *words])
    runpy.run_path(str(EXAMPLES / "hugging_face.py"), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "zb-h1 with 2 workers, on the CPU, messages by local"
    assert shown[-1].endswith("the model is in out/model")
    assert len([line for line in read_metrics(Path("out")) if "loss" in line]) == 3
    assert (tmp_path / "out" / "model" / "config.json").exists()


def stubbed(tmp_path: Path, script: str, *, code: int = 0, **variables: str) -> tuple[int, list[list[str]]]:
    """Run a script with stand-ins for what starts workers; its exit code, and how these were called."""
    for name in ("torchrun", "srun", "scontrol"):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" "" >> {tmp_path}/calls\nexit {code}\n')
        stub.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", str(EXAMPLES / script)],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables,
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    calls = tmp_path / "calls"
    shown = calls.read_text() if calls.exists() else ""
    return done.returncode, [call.split("\n") for call in shown.split("\n\n") if call]


def takes(run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``counterflow`` says that it would train; it is refused if it is wrong."""
    monkeypatch.chdir(ROOT)
    answer = run("", *words, "--dry-run")
    assert answer.code == 0, answer.err
    return answer.out


def test_torchrun(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stubbed(tmp_path, "torchrun.sh", HEAD="")[0] != 0
    code, calls = stubbed(tmp_path, "torchrun.sh", HEAD="node0", OUT=str(tmp_path / "out"))
    assert code == 0
    (call,) = calls
    assert call[:7] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    assert call[7:9] == ["--rdzv-endpoint", "node0:29400"]
    module = call.index("-m")
    assert call[module + 1] == "counterflow"
    assert "4 workers · 2 replicas" in takes(run, call[module + 2 :], monkeypatch)


def test_slurm(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    workers = int(settings["nodes"]) * int(settings["ntasks-per-node"])
    load_config(EXAMPLES / "gpt.toml", out=tmp_path / "out").expect_processes(workers)

    assert stubbed(tmp_path, "slurm.sbatch", OUT="")[0] != 0
    code, calls = stubbed(tmp_path, "slurm.sbatch", OUT=str(tmp_path / "out"))
    assert code == 0
    (call,) = calls
    takes(run, call[call.index("counterflow") + 1 :], monkeypatch)
    code, calls = stubbed(tmp_path, "slurm.sbatch", code=75, OUT="out", SLURM_JOB_ID="7")
    assert code == 75
    assert calls[-1] == ["scontrol", "requeue", "7"]


def test_the_dockerfile(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of its lines needs is there, and what it copies is enough for a wheel; no image is built."""
    lines = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    kinds = [kind for kind, _ in steps]
    assert kinds == ["FROM", "RUN", "COPY", "COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"]
    source = tmp_path / "source"
    source.mkdir()
    for kind, rest in steps:
        if kind == "COPY":
            *names, place = rest.split()
            assert place.startswith("/source/")
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(
                        ROOT / name, tmp_path / place[1:], ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / name, tmp_path / place[1:])
    monkeypatch.chdir(source)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        (told,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
        (started,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
        assert "counterflow = " in wheel.read(started).decode()
        assert "counterflow/drawing/page.html" in wheel.namelist()
    runs = [rest for kind, rest in steps if kind == "RUN"]
    (extras,) = re.findall(r"^pip install --no-cache-dir \"/source\[(.*)\]\"$", runs[1])
    assert set(extras.split(",")) <= set(re.findall(r"^Provides-Extra: (.*)$", told, re.MULTILINE))
    for text in runs:
        subprocess.run(["sh", "-n", "-c", text], check=True)
    (version,) = (rest.split(":")[1].split("-")[0] for kind, rest in steps if kind == "FROM")
    assert tuple(map(int, version.split("."))) >= (3, 11)
    words = dict(steps)
    assert json.loads(words["ENTRYPOINT"]) == ["counterflow"]
    assert run("", *json.loads(words["CMD"]), "--help").code == 0
    shown = next(line for line in lines if "docker run" in line)
    assert run("", *shlex.split(shown.partition(" counterflow ")[2]), "--dry-run").code == 0


def test_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """It compares with one process by itself."""
    runpy.run_path(str(EXAMPLES / "long_sequences.py"), run_name="__main__")
    found = re.fullmatch(
        r"as one process: True\nsaved: ([\d.]+) MB whole, ([\d.]+) MB in 8 slices\n", capsys.readouterr().out
    )
    assert found
    assert float(found[2]) < 0.65 * float(found[1])
