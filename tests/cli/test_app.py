from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

import counterflow
from counterflow.cli import application
from counterflow.errors import WorkerError

from .conftest import ENVIRONMENT, Run

COMMANDS = ["train", "schemes", "simulate", "check", "show", "export", "verify", "reproduce"]
SIMULATE = "simulate chimera --stages 4 --micro-batches 8"


def test_version(run: Run) -> None:
    answer = run("--version")
    assert (answer.code, answer.out) == (0, f"counterflow {counterflow.__version__}\n")


def test_help_lists_the_commands_with_an_example(run: Run) -> None:
    answer = run("--help")
    assert answer.code == 0
    places = [answer.out.index(f" {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert "Example: counterflow simulate chimera" in answer.out
    assert "Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 130 Ctrl-C." in answer.out


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("spelled", ["--help", "-h"])
def test_help_of_a_command_has_an_example(run: Run, name: str, spelled: str) -> None:
    answer = run(f"{name} {spelled}")
    assert answer.code == 0
    assert "Example" in answer.out
    assert f"counterflow {name}" in answer.out.split("Example")[1]


def test_unknown_command(run: Run) -> None:
    answer = run("simulte")
    assert (answer.code, answer.out) == (2, "")
    assert "No such command 'simulte'. Did you mean 'simulate'?" in answer.err


@pytest.mark.parametrize(
    ("words", "completion"),
    [("simulate --mi", "--micro-batches"), ("show chim", "chimera"), ("train --scheme han", "hanayo")],
)
def test_a_shell_completes_commands_flags_and_schemes(words: str, completion: str) -> None:
    shell = {
        "_COUNTERFLOW_COMPLETE": "complete_bash",
        "COMP_WORDS": f"counterflow {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    answer = CliRunner(env=shell).invoke(application(), [], prog_name="counterflow")
    assert answer.stdout.split() == [completion]


def _fail(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


def test_a_bug_is_one_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.cli.commands.simulate.play", _fail(KeyError("a\nb")))
    answer = run(SIMULATE)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("Error: KeyError: 'a\\nb'\n")
    assert "run again with --debug" in answer.err


@pytest.mark.parametrize("line", [f"--debug {SIMULATE}", f"{SIMULATE} --debug"])
def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("counterflow.cli.commands.simulate.play", _fail(KeyError("key")))
    answer = run(line)
    assert (answer.code, answer.out) == (1, "")
    assert "Traceback" in answer.err
    assert answer.err.index("KeyError: 'key'") < answer.err.index("Error: KeyError: 'key'")


def test_debug_of_a_wrong_request_keeps_the_exit_code(run: Run) -> None:
    answer = run("simulate chimra --debug")
    assert answer.code == 2
    assert "Traceback" in answer.err


def test_failed_work_is_exit_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.cli.commands.simulate.play", _fail(WorkerError("worker 2 died")))
    answer = run(SIMULATE)
    assert (answer.code, answer.out, answer.err) == (1, "", "Error: worker 2 died\n")


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("counterflow.cli.commands.simulate.play", interrupted)
    result = CliRunner(env=ENVIRONMENT).invoke(application(), SIMULATE.split())
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted\n")


def _python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | more,
    )


def test_python_m_counterflow() -> None:
    for module in ("counterflow", "counterflow.cli"):
        done = _python("-m", module, *SIMULATE.split())
        assert (done.returncode, done.stderr) == (0, "")
        assert "makespan" in done.stdout
    assert _python("-m", "counterflow", "simulate", "chimra").returncode == 2


@pytest.mark.parametrize(
    ("line", "unwanted"),
    [
        ("--help", ("torch", "matplotlib", "numba")),
        ("schemes", ("torch", "matplotlib", "numba")),
        (SIMULATE, ("torch", "matplotlib", "numba")),
        (f"{SIMULATE} --json", ("torch", "matplotlib", "numba", "rich.table")),
        ("check chimera --stages 4 --micro-batches 8", ("torch", "matplotlib", "numba")),
        ("export chimera --stages 4 --micro-batches 8", ("torch", "matplotlib", "numba")),
        ("show chimera --stages 4 --micro-batches 8", ("torch", "matplotlib", "numba")),
        ("reproduce --list", ("torch", "matplotlib", "numba")),
        ("train --help", ("torch", "matplotlib", "numba")),
        ("verify --help", ("torch", "matplotlib", "numba")),
    ],
)
def test_start_up_leaves_out_what_a_command_does_not_need(line: str, unwanted: tuple[str, ...]) -> None:
    program = f"""
import sys
from counterflow.cli import main
sys.argv = ["counterflow", *{line.split()!r}]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
loaded = [name for name in {unwanted!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = _python("-W", "error", "-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_without_torch() -> None:
    program = "import sys, counterflow; assert not {'torch', 'typer', 'rich'} & sys.modules.keys()"
    assert _python("-W", "error", "-c", program).returncode == 0


def test_a_reader_that_stops_early_is_no_error() -> None:
    reader = "import sys; sys.stdin.readline()"
    command = [sys.executable, "-m", "counterflow", "schemes"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer,
        subprocess.Popen([sys.executable, "-c", reader], stdin=writer.stdout) as _,
    ):
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert writer.stderr.read() == b""


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    program = (
        f"import os, sys; os.close(sys.{closed}.fileno()); "
        "os.execv(sys.executable, [sys.executable, '-m', 'counterflow', *sys.argv[1:]])"
    )
    done = _python("-c", program, *SIMULATE.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert ("makespan" in done.stdout) is (closed == "stderr")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")  # noqa: PTH110
@pytest.mark.parametrize("line", [SIMULATE, "schemes --json", "--help"])
def test_output_without_space_is_one_message(line: str) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "counterflow", *line.split()],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
    message = "Error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_output_that_cannot_show_a_sign() -> None:
    done = _python("-m", "counterflow", "check", *SIMULATE.split()[1:], PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok every op exactly once" in done.stdout


def test_no_colours_where_there_is_no_terminal() -> None:
    for line in ("schemes", SIMULATE, "show chimera --stages 4 --micro-batches 4"):
        assert "\x1b" not in _python("-m", "counterflow", *line.split(), TERM="xterm").stdout
