"""A test that hangs fails under its own name, and the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

HANGS = """
import ctypes
import threading


def test_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_a_thread():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, daemon=True)
    thread.start()
    thread.join()


def test_native_code():
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def test_that_is_fine():
    pass
"""


def test_hangs_are_failures_with_a_name(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS, encoding="utf-8")
    quick = ["-o", "timeout=1", "-o", "faulthandler_timeout=2"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(PROJECT),
        "--rootdir",
        str(tmp_path),
        *quick,
        "-n",
        "1",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    for name in ("test_a_lock", "test_a_thread"):
        assert any(line.startswith("FAILED") and f"::{name} - Failed: Timeout" in line for line in lines), (
            lines
        )
    native = [line for line in lines if line.startswith("FAILED") and "::test_native_code - " in line]
    assert len(native) == 1, lines
    assert "crashed" in native[0]
    assert "3 failed, 1 passed" in lines[-1]
    assert "in test_native_code" in done.stderr  # the stacks say where


def test_every_test_has_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) < float(pytestconfig.getini("faulthandler_timeout"))
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


def test_what_is_slow_is_there() -> None:
    lines = (PROJECT.parent / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, case = line.partition("::")
        assert (PROJECT.parent / path).is_file(), path
        if case:
            test, count = case.partition("[")[0].split()[0], line.rpartition(" ")[2]
            text = (PROJECT.parent / path).read_text(encoding="utf-8")
            assert f"def {test.rpartition('::')[2]}(" in text, line
            assert int(count) >= 0, line
