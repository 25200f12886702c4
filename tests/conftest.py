"""What holds for all tests.

One thread for these small tensors: more only wait for each other where the machine is busy. And examples
that are the same in every run, however long one takes.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .tables import left_out

# A worker that is alone has as many threads as cores. Where these are busy, one that spins until another gets
# a core takes most of a test's time. Torch reads this when it is loaded, in processes of tests too.
os.environ["OMP_WAIT_POLICY"] = "passive"
# What runs in the background may ignore interrupts and hang-ups, which processes of tests would inherit.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
# Hundreds of processes load the same modules: each of these is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
torch = import_module("torch")

_CACHE = tempfile.TemporaryDirectory()  # of datasets that tests read, and of profiles
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": _CACHE.name, "COUNTERFLOW_CACHE": _CACHE.name}
os.environ["TERMINAL_WIDTH"] = "200"
import_module("typer.rich_utils")  # it reads that once, and some test may have another width by then

settings.register_profile(
    "counterflow", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # a machine may be busy
settings.load_profile("counterflow")


_COMPILE = """
import fcntl, sys
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
import counterflow as cf
from counterflow.schedule.placement import wave
from counterflow.schedule.workload import plain
work = plain(wave(workers=4, waves=1), micro_batches=4, split=True)
cf.synthesize(work, cf.Costs(forward=3), peak=3, moves=300)
"""
_COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()
_COMPILED_NOW = "COUNTERFLOW_TESTS_COMPILING"
"""Variable with the file that is locked while that goes on."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile the loops of ``synthesize`` once; workers of pytest-xdist that need them wait for that."""
    if hasattr(config, "workerinput"):
        _compile_later(Path(os.environ[_COMPILED_NOW]))
    elif config.getoption("numprocesses", None):
        silent = subprocess.DEVNULL
        os.environ[_COMPILED_NOW] = lock = f"{_CACHE.name}/compiling"
        config.stash[_COMPILING] = subprocess.Popen(
            [sys.executable, "-c", _COMPILE, lock], stdin=silent, stdout=silent, stderr=silent
        )


def _compile_later(lock: Path) -> None:
    """Let this process compile, or load what is compiled, only when a file is no longer locked."""
    dispatcher: Any = import_module("numba.core.dispatcher").Dispatcher
    compiled = dispatcher.compile

    def wait(*args: Any) -> Any:
        if lock.exists():
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        return compiled(*args)

    dispatcher.compile = wait


def pytest_unconfigure(config: pytest.Config) -> None:
    """End it with the tests, however far it is."""
    compiling = config.stash.get(_COMPILING, None)
    if compiling is not None:
        compiling.kill()
        compiling.wait()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, but four at most: tests wait for threads, processes and signals."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what tests import out of all searches for garbage, which would go through it again and again."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_world_is_left() -> Iterator[None]:
    """A process group of one test would be another one's world."""
    yield
    assert not torch.distributed.is_initialized()


SLOW = Path(__file__).with_name("slow.txt")
"""Files that `make test-fast` leaves out, and tests of which `make test` takes some cases or none.

``benchmarks/fast_tests.py`` writes it from what a run took.
"""
_LINES = SLOW.read_text(encoding="utf-8").splitlines()
SLOW_FILES = {SLOW.parents[1] / line for line in _LINES if "::" not in line}
LIMITS = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in _LINES if "::" in line}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests their files are not loaded either: they import transformers, and take seconds."""
    fast = config.getoption("markexpr") == "not slow"
    return True if fast and collection_path in SLOW_FILES else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow, and take of tables what is taken of them."""
    for item in items:
        if item.path in SLOW_FILES:
            item.add_marker("slow")
    everything = [Path(arg).resolve() for arg in config.args] == [SLOW.parent.resolve()]
    omitted = left_out(items, LIMITS if everything else {})
    if omitted:
        config.hook.pytest_deselected(items=omitted)
        without = set(omitted)
        items[:] = [item for item in items if item not in without]
