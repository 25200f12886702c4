"""Every command that is printed for users runs: in the help, in the README and in docs/.

Those of one page run in their order in one new folder, so that each finds what those before it made; a page's
files are there, and nothing else. What would take minutes is made smaller by words after it (``SMALLER``),
torchrun by fewer processes (``FEWER``); ``profile`` starts threads here, and one figure stands for all that
``reproduce`` draws. What is not run at all has its reason in ``EXCUSED``.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from counterflow import drawing
from counterflow.papers.figures import FIGURES, reproduction
from counterflow.runtime.workers.launch import launch
from counterflow.training.folder import PICTURE

from ..forked import torchrun
from .conftest import Run

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = [
    "compare",
    "layout",
    "lint",
    "mesh",
    "convert",
    *("train", "schemes", "simulate", "profile", "plan", "check", "show", "export", "verify", "reproduce"),
    "synthesize",
    "doctor",
    "explore",
]

EXCUSED = {
    "make test": "it runs this test",
    "pip install": "it needs the network",
    "counterflow explore": "it serves until Ctrl-C; tests/explore/test_command.py runs it",
    "torchrun --nnodes": "it needs several machines",
    "python benchmarks/convergence.py --keep": "45 minutes, and it writes kept results",
}
"""Commands that are not run, and why."""

ELSEWHERE = {
    # by test_from_a_profile_to_a_plan_to_a_run in tests/docs/test_pages.py, which takes them from the page
    "docs/planning.md": [
        *("counterflow profile", "counterflow plan", "counterflow plan", "counterflow train"),
        *("torchrun --nnodes", "counterflow plan", "torchrun --nnodes"),
    ],
    # by test_long_sequences in tests/docs/test_pages.py
    "docs/long-sequences.md": [
        f"counterflow {command}" for command in ("plan", "simulate", "check", "verify", "train")
    ],
    # by test_ten_minutes in tests/docs/test_pages.py, on threads
    "docs/ten-minutes.md": ["python own.py", "python own.py"],
    # by tests/docs/test_hugging_face.py
    "docs/hugging-face.md": ["pip install", "python make.py", "counterflow train tune.toml"],
    # by tests/runtime/mesh/cases.py, in four processes of its own
    # and by tests/training/test_mesh.py
    "docs/more-dimensions.md": [
        *("torchrun --nproc-per-node 4 train.py", "counterflow mesh", "counterflow train"),
    ],
    # by expert_cases.py and context_cases.py of tests/runtime/mesh, which take their programs from the pages,
    # and by test_the_plan_of_the_page_of_experts_runs in tests/cli/commands/test_plan.py
    "docs/experts.md": [
        *("python experts.py", "torchrun --nproc-per-node 4 experts.py"),
        *("counterflow plan", "counterflow train"),
    ],
    "docs/long-contexts.md": ["python contexts.py", "torchrun --nproc-per-node 4 contexts.py"],
    # by tests/docs/test_plan_your_own_model.py
    "docs/plan-your-own-model.md": ["counterflow profile own.py:make_model", "counterflow plan --model"],
    # by tests/docs/test_transformers_trainer.py, which takes it from the page
    "docs/transformers-trainer.md": ["torchrun --standalone --nproc-per-node 2 tune.py"],
}
"""Pages whose commands another test runs, and how these begin: one that is new needs a test as well."""

_MODEL = "--set model.layers=6 --set model.hidden=16 --set model.heads=2 --set model.positions=16"
_SMALL = f"{_MODEL} --set train.samples=16 --set train.threads=1"
SMALLER = {
    r"torchrun .* counterflow train my.toml": f"{_SMALL} --set pipeline.replicas=1 --steps 1",  # processes
    r"torchrun .* counterflow train": f"{_SMALL} --workers 1 --scheme gpipe --steps 1",
    r"counterflow train --scheme wpipe": f"{_SMALL} --set pipeline.transport=local --steps 8",
    r"counterflow train --set train.resume=from-titan": f"{_SMALL} --set pipeline.transport=local --steps 4",
    r"counterflow train --set train.resume": f"{_SMALL} --set pipeline.transport=local --steps 3",
    r"counterflow train --max-restarts .*resume": f"{_SMALL} --set pipeline.transport=local --steps 3",
    r"counterflow train": f"{_SMALL} --set pipeline.transport=local --steps 2",
    r"counterflow profile": f"{_MODEL} --set model.layers=2 --sizes 1 --repeats 1",
    r"counterflow plan --example \S+ --stale$": "--scheme chimera --scheme dapple --workers 8",
    r"counterflow synthesize .* --moves 20000": "--moves 0",
    r"counterflow doctor": "--no-test",  # which its own tests run
    r"counterflow compare --workers 8 --micro-batches 32": "--micro-batches 8",
    r"counterflow verify mine.json": "--transport local --steps 1",
    r"counterflow verify": "--transport local",
}
"""What is put behind a command, which takes the last of two values: by how it begins, the first that fits.

WPipe plays 8 periods.
"""


FEWER = {
    "--nproc-per-node 4 --max-restarts": "--nproc-per-node 1 --max-restarts",
    "--nproc-per-node 4": "--nproc-per-node 2",
    "stages=4": "stages=2",
}
"""What commands of torchrun, and the programs on their pages, say here: a process takes long to start."""


def commands_of(text: str) -> list[str]:
    """The commands in the code blocks of a page; a line that goes on ends with a backslash."""
    blocks = re.findall(r"^```(?:console|bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines]
    return [line for line in commands if re.match(r"(counterflow|torchrun|python|make|pip) ", line)]


def _fewer(text: str) -> str:
    for printed, here in FEWER.items():
        text = text.replace(printed, here)
    return text


def examples_of(shown: str) -> list[str]:
    """The examples that a help text shows."""
    return [line.strip() for line in shown.partition("Example")[2].splitlines() if "counterflow " in line]


def words_of(line: str) -> list[str]:
    """The words of a command, with those that make it smaller; ``make train`` is what the Makefile says."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["make", "train"]:
        target = re.search(r"^train:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert target is not None
        words = target[1].split()
    plain = " ".join(words)
    more = next((extra for start, extra in SMALLER.items() if re.match(start, plain)), "")
    return words + more.split()


@functools.cache
def _a_figure() -> Any:
    """A quick one; ``tests/papers`` has them all."""
    return reproduction.reproduce(FIGURES["hanayo-fig11"])


@pytest.fixture(autouse=True)
def _quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(*arguments: Any, **options: Any) -> Any:
        return launch(*arguments, **options | {"transport": "local"})

    monkeypatch.setattr("counterflow.measure.survey.launch", threads)
    draw = drawing.draw_charts

    def drawn(charts: Any, path: str | Path, *look: Any) -> Any:
        """All pictures but those of runs, of which tests/cli/commands/test_train.py draws one."""
        return None if Path(path).name == PICTURE else draw(charts, path, *look)

    monkeypatch.setattr(drawing, "draw_charts", drawn)
    monkeypatch.setattr("counterflow.training.loop._VALIDATION_SAMPLES", 16)
    monkeypatch.setattr("counterflow.training.loop._REPEATS", 1)
    figure = _a_figure()
    monkeypatch.setattr("counterflow.papers.figures.reproduction.reproduce", lambda *_: figure)


def run_all(run: Run, lines: Sequence[str], folder: Path) -> None:
    """Each of them once, in ``folder``, which is where this process is."""
    for line in dict.fromkeys(line.partition("#")[0].strip() for line in lines):
        if any(line.startswith(excused) for excused in EXCUSED):
            continue
        program, *arguments = words_of(_fewer(line) if line.startswith("torchrun") else line)
        if program == "counterflow":
            answer = run("", *arguments)
            assert answer.code == 0, f"{line}\n{answer.err}"
            continue
        assert program == "torchrun", f"{line}: nothing runs it here; run it, or excuse it with a reason"
        torchrun(Path(tempfile.mkdtemp(dir=folder)), *arguments)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_examples_in_the_help(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line.partition(": ")[2] or line for line in examples_of(run(f"{command} --help").out)]
    assert lines
    assert all(line.startswith("counterflow ") for line in lines)
    run_all(run, lines, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_commands_on_the_pages(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = commands_of(text)
    if page in ELSEWHERE:
        for line, begin in zip(lines, ELSEWHERE[page], strict=True):
            assert line.startswith(begin)
        return
    if not lines:
        pytest.skip("it prints no commands")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    if page == "docs/first-run.md":
        (config,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        (tmp_path / "my.toml").write_text(config, encoding="utf-8")
    files = re.findall(
        r"^```(?:python|toml)\n# (\w+\.(?:py|toml))\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    for name, program in files:
        (tmp_path / name).write_text(_fewer(program), encoding="utf-8")
    run_all(run, lines, tmp_path)


def test_every_excuse_is_of_a_command_that_is_printed() -> None:
    printed = [line for page in PAGES for line in commands_of((ROOT / page).read_text(encoding="utf-8"))]
    for excused in EXCUSED:
        assert any(line.startswith(excused) for line in printed), excused


def test_every_command_has_an_example(run: Run) -> None:
    listed = re.findall(r"^│ (\w+) ", run("--help").out.partition("Commands")[2], re.MULTILINE)
    assert set(listed) == set(COMMANDS)


def test_no_command_is_overlooked() -> None:
    """Lines of other kinds in blocks of commands are output, or commands that this test knows nothing of."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        prompts = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        assert set(prompts) <= set(commands_of(text)), page
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in filter(None, block.splitlines()):
                assert line in commands_of(text) or line.startswith("#"), f"{page}: {line}"
