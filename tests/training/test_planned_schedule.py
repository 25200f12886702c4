"""``scheme = "auto"`` of a config: measured once, planned, and trained with what the plan decides."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from counterflow.errors import ConfigError
from counterflow.measure import profile_cache
from counterflow.runtime.workers import world
from counterflow.training import RunConfig, load_config
from counterflow.training.auto_config import with_plan
from counterflow.training.run import run

SMALL = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.positions=8", "train.samples=4"]


def test_a_planned_schedule_has_no_options_but_workers(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[schedule]\nscheme = "chimera"\nstages = 2\nmicro_batches = 6\n', encoding="utf-8")
    config = load_config(path, scheme="auto")
    assert config.schedule.values() == {"scheme": "auto", "workers": 2}
    assert load_config(scheme="auto", workers=3).schedule.options() == {"workers": 3}
    assert load_config(sets=["schedule.scheme=auto"]).processes == 4
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path) == config
    path.write_text('[schedule]\nscheme = "auto"\nmicro_batches = 6\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r'schedule.scheme = "auto": decides schedule.micro_batches; leave'):
        load_config(path)


def test_a_named_schedule_is_not_planned() -> None:
    config = RunConfig()
    assert with_plan(config) is config


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["pipeline.cuts=[1,2,3]"], "decides pipeline.cuts; leave it out"),
        (["mesh.dp_shard=2"], r"plans no \[mesh\]; leave it out"),
    ],
)
def test_what_cannot_be_planned_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_plan(load_config(None, sets, scheme="auto"))


def test_workers_of_a_launcher_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "started_by", lambda: "torchrun")
    with pytest.raises(ConfigError, match="torchrun has started them; run counterflow profile under it"):
        run(load_config(scheme="auto"))


def test_the_planned_run_is_the_config_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(profile_cache.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(profile_cache, "REPEATS", 1)
    sets = [*SMALL, "train.steps=2", "train.threads=1", "optimizer.name=sgd", "pipeline.recompute=layer"]
    config = load_config(None, sets, scheme="auto", workers=2, out=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "counterflow.auto"):
        result = run(config)
        again = with_plan(config)
    assert result is not None
    ran = load_config(tmp_path / "run" / "config.toml")
    assert ran == again  # the profile is that of the first
    assert ran.schedule.scheme != "auto"
    assert (ran.processes, ran.train.samples, ran.train.steps) == (2, 4, 2)
    assert (ran.pipeline.recompute, ran.optimizer.name, ran.plan.mini_batch) == ("layer", "sgd", 4)
    changed = {name for name in type(config).model_fields if getattr(config, name) != getattr(ran, name)}
    assert changed <= {"schedule", "pipeline", "plan", "train"}
    lines = [record.message for record in caplog.records if record.name == "counterflow.auto"]
    assert lines[0].startswith("measuring 4 of 4 layers on 2 workers, once")
    assert lines[1:] == [lines[1]] * 2
    assert lines[1].startswith(f'schedule="auto": {ran.schedule.scheme}(')
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["planned_samples_per_second"] > 0
