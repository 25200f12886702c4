"""Programs that tests run as forked processes: importing torch anew takes most of a short one's time.

Invariant: each is ``__main__`` of a new process, and prints into files. ``torchrun`` is torch's own agent, in
this process: it reads the command's words, and gives workers its variables. The command itself is started by
tests/runtime/workers/test_gpu_environment.py and tests/integrations/launchers. ``launching`` is for programs
that launch processes themselves, which are forked as those of this one; tests/runtime/workers/test_launch.py
starts such programs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from unittest import mock

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from counterflow.runtime.workers.processes import start_method
from counterflow.runtime.workers.world import Defaults


def python(logs: Path, script: str, *words: str) -> str:
    """What ``python SCRIPT WORDS`` prints; it must not fail. ``logs`` is a folder for that."""
    with _found_from(script):
        started = start_processes(
            name="python",
            entrypoint=run.run_script_path,
            args={0: (script, *words)},
            envs={0: {"OMP_NUM_THREADS": "1"}},
            logs_specs=DefaultLogsSpecs(str(logs), redirects=Std.ALL),
            start_method="forkserver",
        )
        done = started.wait()
    assert done is not None
    assert not done.failures, _printed(logs, "stderr")
    return _printed(logs, "stdout")


def launching(script: Path) -> None:
    """Run what ``python SCRIPT`` runs, in this process; those that it launches find it as a module."""
    main = script.read_text(encoding="utf-8").partition('if __name__ == "__main__":\n')[2]
    assert main
    with mock.patch.object(sys, "path", [str(script.parent), *sys.path]):
        module = import_module(script.stem)
        try:
            exec(dedent(main), vars(module))
        finally:
            del sys.modules[script.stem]


def torchrun(logs: Path, *words: str) -> str:
    """What the workers of ``torchrun WORDS`` print, one rank after the other; none must fail."""
    here = ["--run-path", "--start-method", "forkserver", "--redirects", "3", "--log-dir", str(logs)]
    arguments = run.get_args_parser().parse_args([*here, *words])
    if arguments.module:
        found = find_spec(f"{arguments.training_script}.__main__")
        assert found is not None
        assert found.origin is not None
        arguments.module, arguments.training_script = False, found.origin
    one_thread = mock.patch.dict(os.environ, OMP_NUM_THREADS="1")
    own_name = mock.patch("torch.multiprocessing._set_thread_name")  # of this process, which goes on
    try:
        with _found_from(arguments.training_script), one_thread, own_name:
            run.run(arguments)
    except ChildFailedError as error:
        raise AssertionError(_printed(logs, "stderr")) from error
    return _printed(logs, "stdout")


@contextmanager
def _found_from(script: str) -> Iterator[None]:
    """Programs may import what is beside them; what they are forked from has the large modules."""
    start_method(Defaults())
    with mock.patch.object(sys, "path", [str(Path(script).absolute().parent), *sys.path]):
        yield


def _printed(logs: Path, stream: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(logs.rglob(f"{stream}.log")))
