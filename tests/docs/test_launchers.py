"""The page on launchers: its programs are those that tests of the launchers run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")


def program(title: str) -> str:
    """The first program of a part of the page."""
    part = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_kubeflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="kubeflow-trainer-api is missing")
    monkeypatch.chdir(tmp_path)
    Path("my.toml").touch()
    exec(program("Kubeflow Trainer"), {})
    made, job = map(json.loads, capsys.readouterr().out.splitlines())
    assert made["kind"] == "ClusterTrainingRuntime"
    assert job["spec"]["trainer"]["numNodes"] == 2
    assert job["metadata"]["name"] == "first"


@pytest.mark.parametrize(
    ("title", "file", "calls"),
    [
        ("submitit", "submitit_job.py", ["AutoExecutor(", "update_parameters(", "executor.submit(Task("]),
        ("Ray Train", "ray_train.py", ["TorchTrainer(", "Loop(load_config(", "num_workers=(", "RunConfig("]),
        ("Monarch", "monarch_train.py", ["= train(load_config(", "max_restarts=3)"]),
    ],
)
def test_programs_are_those_of_the_examples(title: str, file: str, calls: list[str]) -> None:
    """The tests of the launchers run the examples."""
    example = (ROOT / "examples" / file).read_text(encoding="utf-8")
    lines = program(title).splitlines()
    names = {line.replace("Callback, ", "") for line in example.splitlines()}
    assert {line for line in lines if "import" in line} <= names
    for call in calls:
        assert call in example
        assert call in "\n".join(lines)
