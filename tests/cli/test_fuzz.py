"""Files with a senseless value: read, or refused. benchmarks/fuzz.py tries thousands."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterflow.errors import ConfigError
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps
from counterflow.training import RunConfig, load_config

from .conftest import Run

SENSELESS = [
    *(-1, 0, 10**9, 2**63 - 1, 0.5, 1e308, True, "", "x" * 30_000, "a\0b", "/etc", "1e999"),
    *([], [0], [[[1]]], [7] * 100, {}, {"a": 1}),
]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to the values of a file."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path_ for key, part in items for path_ in [(*path, key), *places(part, (*path, key))]]


def put(data: Any, place: tuple[Any, ...], value: object) -> Any:
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return data


SCHEDULE = dumps(schemes.chimera(2, 2))
CONFIG = RunConfig().to_toml()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(places(json.loads(SCHEDULE))), value=st.sampled_from(SENSELESS))
def test_schedules(run: Run, tmp_path_factory: pytest.TempPathFactory, place: Any, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "schedule.json"
    path.write_text(json.dumps(put(json.loads(SCHEDULE), place, value)))
    answer = run("check", str(path))
    assert answer.code in (0, 1, 2)
    assert "bug" not in answer.err
    assert len(answer.err) < 1_500


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(places(tomllib.loads(CONFIG))), value=st.sampled_from(SENSELESS))
def test_configs(tmp_path_factory: pytest.TempPathFactory, place: Any, value: object) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_text(tomlkit.dumps(put(tomllib.loads(CONFIG), place, value)))
    with contextlib.suppress(ConfigError):
        load_config(path)
