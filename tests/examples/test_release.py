"""The files of a release: their metadata agree; the workflow tries before it publishes."""

from __future__ import annotations

import email.message
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.build import prepare_metadata_for_build_wheel

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def metadata(folder: Path) -> email.message.Message:
    """METADATA of the wheel."""
    name = prepare_metadata_for_build_wheel(str(folder))
    return email.message_from_bytes((folder / name / "METADATA").read_bytes())


def test_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    fields = metadata(tmp_path)
    assert (fields["Name"], fields["Version"]) == ("counterflow", PROJECT["version"])
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Description-Content-Type"] == "text/markdown"
    text = fields.get_payload(decode=True)
    assert text == (ROOT / "README.md").read_bytes()
    assert sorted(fields.get_all("Provides-Extra", [])) == sorted(PROJECT["optional-dependencies"])
    plain = {
        re.split(r"[<>=\[ ;]", line)[0]
        for line in fields.get_all("Requires-Dist", [])
        if "extra ==" not in line
    }
    assert plain == {re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]}


def test_links_of_the_readme_are_absolute_on_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REF_NAME", "v0.1.0")
    text = str(metadata(tmp_path).get_payload())
    place = "https://github.com/owner/name"
    assert f"]({place}/raw/v0.1.0/docs/pictures/explore-schedules.png)" in text
    assert f"]({place}/blob/v0.1.0/docs/gpus.md)" in text
    assert f"[grid]: {place}/blob/v0.1.0/benchmarks/results/agreement_grid.txt" in text
    links = re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: (.*)", text, re.MULTILINE)
    assert all("".join(link).startswith(("https://", "#")) for link in links)


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == PROJECT["version"]


def test_the_workflow_tries_the_wheel_before_it_publishes() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert jobs["try"]["needs"] == "build"
    assert jobs["publish"]["needs"] == "try"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "tag" in jobs["publish"]["if"]
    versions = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert set(jobs["try"]["strategy"]["matrix"]["python"]) == versions
    build = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert ".ci/release" in build
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "release")], check=True)
