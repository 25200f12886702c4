"""Damaged and senseless input: files and command lines, each of which succeeds or is refused in a few words.

    python benchmarks/fuzz.py [inputs, of all kinds together] [--seed 0] [--kind NAME ...] [--keep]

Right inputs are changed at random places: numbers without end, other types, texts with NUL, missing parts,
cut or flipped bytes. Each is given to a command in a process forked from one that has run each command
before; those of the kind ``fresh`` to a new Python. Held: exit code 0, 1 or 2, no traceback and no "bug", at
most 1,500 characters of errors, 5 s of processor time, 500 MiB more than a command that does nothing takes.
``train``, ``profile`` and ``verify`` end where workers would start, but for the kind ``resume``. What breaks
a rule is printed with its input, and the command fails. ``--keep`` puts the rows of these kinds into
benchmarks/results/fuzz.txt.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer.main
from kit import arguments, machine_line

from counterflow.cli import application
from counterflow.measure import survey
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps
from counterflow.training import RunConfig
from counterflow.training import run as training
from counterflow.verification import training_agreement

RESULTS = Path(__file__).parent / "results" / "fuzz.txt"

MOST_SECONDS = 5.0
MOST_BYTES = 500 * 2**20
MOST_CHARACTERS = 1_500
LONG_CHARACTERS = 1_000

_PATIENCE_SECONDS = 60.0

NUMBERS = [0, -1, 1, 3, 7, 1000, 10**6, 10**9, 2**31, 2**63, 10**19, 10**40, -(10**19), 0.5, 1e308, -1e-308]
TEXTS = ["", "x", "a\0b", "é" * 50, "x" * 30_000, "/etc", "/dev/null", "..", "nan", "inf", "1e999", "chimera"]
OTHERS = [True, False, [], [0], [[[[1]]]], list(range(20_000)), [10**19] * 3, {}, {"a": 1}, ["x", 1, None]]
"""What is put in the place of a right value."""

TINY = (
    "--set model.layers=2 --set model.hidden=8 --set model.heads=2 --set model.positions=8 "
    "--set train.samples=8 --set pipeline.transport=local --set train.threads=1 --scheme dapple --workers 2"
)


@dataclass(frozen=True)
class Input:
    """What is given to the command: its arguments, and what files are to be there."""

    line: list[str]
    files: dict[str, bytes]
    started: bool = False
    """Whether its workers are started too."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    text: str
    seconds: float
    more_bytes: float

    def broken(self) -> str:
        """The rule that it breaks, or nothing."""
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        for word in ("Traceback", "This is a bug"):
            if word in self.text:
                return word
        if len(self.text) > MOST_CHARACTERS:
            return f"{len(self.text):,} characters"
        if self.seconds > MOST_SECONDS:
            return f"{self.seconds:.1f} s"
        if self.more_bytes > MOST_BYTES:
            return f"{self.more_bytes / 2**20:,.0f} MiB"
        return ""


# -- changes


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a file are."""
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, part in items:
        found += places(part, (*path, key))
    return found


def changed(data: Any, draw: random.Random) -> Any:
    """The data with a value or some of them replaced, removed or doubled."""
    data = deepcopy(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.choice(places(data) or [()])
        if not at:
            return draw.choice(OTHERS)
        holder = data
        for key in at[:-1]:
            holder = holder[key]
        what = draw.randrange(10)
        if what == 0:
            del holder[at[-1]]
        elif what == 1 and isinstance(holder, dict):
            holder[draw.choice(["x", "", "é", "x" * 3000])] = holder[at[-1]]
        elif what == 2 and isinstance(holder, list):
            holder.extend(deepcopy(holder) * draw.choice((1, 3)))
        elif what < 6 and type(holder[at[-1]]) in (int, float):  # legal, perhaps
            holder[at[-1]] = draw.choice((holder[at[-1]] + 1, holder[at[-1]] - 1, holder[at[-1]] * 2, 1))
        else:
            holder[at[-1]] = deepcopy(draw.choice(draw.choice((NUMBERS, TEXTS, OTHERS))))
    return data


def cut(data: bytes, draw: random.Random) -> bytes:
    """Bytes that are cut off, turned over or put in."""
    at = draw.randrange(len(data) + 1)
    what = draw.randrange(4)
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if what == 2:
        return data[:at] + draw.choice((b"\0", b"\xff\xfe", b"{", b"[" * 5000, b"9" * 5000, b'"')) + data[at:]
    return data[:at] + data[draw.randrange(len(data)) :]


def as_json(data: Any) -> bytes:
    return json.dumps(data).encode()


def as_toml(data: Any) -> bytes:
    """Tables by their names, all in them on one line each; tomlkit takes seconds for long lists."""
    tables = {key: part for key, part in data.items() if isinstance(part, dict)}
    lines = [f"{json.dumps(key)} = {_toml(part)}" for key, part in data.items() if key not in tables]
    for name, table in tables.items():
        lines += [
            f"[{json.dumps(name)}]",
            *(f"{json.dumps(key)} = {_toml(part)}" for key, part in table.items()),
        ]
    return "\n".join(lines).encode()


def _toml(data: Any) -> str:
    """A value as TOML has it within a line."""
    if isinstance(data, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(part)}' for key, part in data.items())}}}"
    if isinstance(data, list):
        return f"[{', '.join(map(_toml, data))}]"
    if data is None:
        raise TypeError("TOML has no null")
    return json.dumps(data)


def file_of(text: str, draw: random.Random, *, is_json: bool) -> bytes:
    """A file's text, changed."""
    if draw.random() < 0.25:
        return cut(text.encode(), draw)
    data = json.loads(text) if is_json else tomllib.loads(text)
    try:
        return (as_json if is_json else as_toml)(changed(data, draw))
    except (TypeError, ValueError, AttributeError):  # TOML has no such value
        return cut(text.encode(), draw)


# -- kinds of inputs

Kind = Callable[[random.Random], Input]

SCHEDULES = [
    schemes.chimera(4, 4),
    schemes.gpipe(2, 4, groups=2),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.zb_h1(2, 3),
    schemes.wpipe(2, 2),
    schemes.pipedream(3, 3),
    schemes.hanayo(2, 4, waves=1),
]
SMALL = (0, 1, 2, 3, 5, 9, 40)
ENDINGS = ("p1", "p2", "v1", "v9", ":0/2", ":1/2")


def other_op(op: str, draw: random.Random) -> str:
    """An op of another kind, micro-batch, stage, pipe, version or part, there or not."""
    micro_batch, _, rest = op[1:].partition(".")
    after = rest.lstrip("0123456789")
    kind = draw.choice("FBIW") if draw.random() < 0.3 else op[0]
    if draw.random() < 0.4:
        micro_batch = str(draw.choice(SMALL))
    if draw.random() < 0.4:
        rest = str(draw.choice(SMALL)) + after
    return f"{kind}{micro_batch}.{rest}" + (draw.choice(ENDINGS) if draw.random() < 0.2 else "")


def reordered(text: str, draw: random.Random) -> bytes:
    """A schedule of the right form with some wrong ops and numbers."""
    data = json.loads(text)
    for _ in range(draw.choice((1, 1, 2, 3))):
        order = draw.choice(data["orders"])
        at = draw.randrange(len(order))
        match draw.randrange(6):
            case 0 | 1 | 2:
                order[at] = other_op(order[at], draw)
            case 3:
                order.insert(draw.randrange(len(order)), order[at])
            case 4:
                order.insert(draw.randrange(len(order)), order.pop(at))
            case _:
                data[draw.choice(("micro_batches", "periods"))] = draw.choice(SMALL[1:])
    return as_json(data)


def schedule(draw: random.Random) -> Input:
    text = dumps(draw.choice(SCHEDULES))
    command = draw.choice(("check", "check", "simulate", "show", "export", "verify", "train"))
    name = ["--set", "schedule.file=x.json"] if command == "train" else ["x.json"]
    if command == "simulate" and draw.random() < 0.5:
        name += ["--p2p", "0.5", "--weight-bytes", "3", "--activation-bytes", "1", "--sync", "0.1"]
    changed_text = reordered(text, draw) if draw.random() < 0.5 else file_of(text, draw, is_json=True)
    return Input([command, *name], {"x.json": changed_text})


def config(draw: random.Random) -> Input:
    line = draw.choice((["train"], ["train"], ["profile", "--sizes", "1", "--repeats", "1"]))
    return Input([*line, "x.toml"], {"x.toml": file_of(RunConfig().to_toml(), draw, is_json=False)})


def inputs_of_plans(folder: Path) -> Kind:
    """Of ``plan``: a model, a profile, a cluster."""
    run(Input(["plan", "--example", "chimera-bert48", "--save-inputs", "."], {}), folder)
    texts = {path.name: path.read_text() for path in folder.glob("*.toml")}
    names = ["model", "profile", "cluster"]
    line = [word for name in names for word in (f"--{name}", f"{name}.toml")]

    def kind(draw: random.Random) -> Input:
        name = f"{draw.choice(names)}.toml"
        files = {other: text.encode() for other, text in texts.items()}
        files[name] = file_of(texts[name], draw, is_json=False)
        planned = ["plan", *line, "--scheme", "dapple", "--workers", "4", "--mini-batch", "32"]
        ordered = [*SYNTHESIZED.split(), *line, "--micro-batch-size", "2"]
        return Input(draw.choice((planned, planned, ordered)), files)

    return kind


SYNTHESIZED = "synthesize --placement straight --workers 2 --micro-batches 3 --moves 10"


def checkpoints(folder: Path, *, started: bool = False) -> Kind:
    """What a run leaves: its checkpoint's files, its config, its metrics, its timeline."""
    found = run(Input(["train", *TINY.split(), "--steps", "2", "--out", "run"], {}, started=True), folder)
    assert found.code == 0, found.text
    given = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    def kind(draw: random.Random) -> Input:
        name = draw.choice(sorted(given))
        is_json = name.endswith(".json")
        damaged = file_of(given[name].decode(), draw, is_json=True) if is_json else cut(given[name], draw)
        resume = ["train", *TINY.split(), "--steps", "4", "--set", "train.resume=run"]
        look = ["show", "run"]
        return Input(resume if started else draw.choice((resume, look)), given | {name: damaged}, started)

    return kind


FLAGS = [
    *("--stages", "--workers", "--micro-batches", "--chunks", "--waves", "--pairs", "--groups", "--periods"),
    *(
        "--injected",
        "--early-forwards",
        "--forward",
        "--backward",
        "--p2p",
        "--sync",
        "--replicas",
        "--concat",
    ),
    *(
        "--weight-bytes",
        "--activation-bytes",
        "--recompute",
        "--split",
        "--json",
        "--out",
        "--compare",
        "--x",
    ),
]


LINES = [
    *(f"{command} chimera --stages 4 --micro-batches 4" for command in ("simulate", "check", "show")),
    "simulate hanayo --workers 2 --micro-batches 4 --waves 2 --p2p 0.5 --json",
    "simulate zb-v --workers 2 --micro-batches 4 --weight-bytes 1GiB --activation-bytes 3MiB",
    "show gems --stages 2 --micro-batches 2 --compare chimera",
    "export mixpipe --stages 4 --micro-batches 4 --injected 2 --out x.json",
    "check wpipe --workers 2 --micro-batches 2 --json",
    "reproduce --list",
    "reproduce chimera-table2 --json",
    "schemes --json",
]
WORKS = [
    "plan --example chimera-bert48 --scheme dapple --scheme gpipe --workers 4 --mini-batch 256",
    "train --scheme hanayo --workers 2 --steps 3 --set train.samples=64",
    "train --workers 2 --dry-run --json",
    f"{SYNTHESIZED} --peak 3 --forward 1 --input-gradient 1 --weight-gradient 1",
    f"{SYNTHESIZED} --weight-bytes 1GiB --activation-bytes 3MiB --memory 2GiB --objective steady --json",
    "verify dapple --stages 2 --micro-batches 2 --steps 1",
    "profile --set model.layers=2 --sizes 1,2 --repeats 1 --json",
]


def line(draw: random.Random, lines: Sequence[str] = LINES) -> Input:
    """A right command line with words replaced, removed and put in."""
    words = draw.choice(lines).split()
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        at = draw.randrange(len(words))
        value = str(draw.choice(draw.choice((NUMBERS, TEXTS, [2, 3, 4, 8])))).replace("\0", "")
        what = draw.randrange(6)
        if what == 0:
            del words[at]
        elif what == 1:
            words[at:at] = [draw.choice(FLAGS)]
        elif what == 2 and words[0] == "train":
            section = draw.choice(list(RunConfig.model_fields))
            key = draw.choice(list(RunConfig.model_fields[section].annotation.model_fields))  # type: ignore
            words += ["--set", f"{section}.{key}={value}"]
        elif what == 3:
            words += [draw.choice(FLAGS), value]
        else:
            words[at] = value
        if not words:
            break
    return Input(words, {})


def work(draw: random.Random) -> Input:
    """The same of commands that plan, train, measure or search."""
    return line(draw, WORKS)


# -- running

COMMAND = typer.main.get_command(application())


def warm(folder: Path) -> None:
    """Run right commands here, so that what they import and compile is there in every fork."""
    _end_where_workers_start()
    before = Path.cwd()
    os.chdir(folder)
    nothing = io.StringIO()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        for words in (*LINES, *WORKS):
            with contextlib.suppress(SystemExit):
                COMMAND(words.split(), prog_name="counterflow")
    os.chdir(before)
    gc.collect()
    gc.freeze()


def run(given: Input, folder: Path) -> Outcome:
    """The outcome of a command, in a folder."""
    _put(given, folder)
    said = folder / ".said"
    pid = os.fork()
    if pid == 0:
        _be(given, folder, said)
    return _outcome(pid, said)


def run_fresh(given: Input, folder: Path) -> Outcome:
    """The outcome of a command in a Python of its own."""
    _put(given, folder)
    said = folder / ".said"
    with said.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "counterflow", *given.line],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    return _outcome(process.pid, said)


def _put(given: Input, folder: Path) -> None:
    for name, content in given.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _outcome(pid: int, said: Path) -> Outcome:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status)
    text = said.read_text(errors="replace")
    return Outcome(code, text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0)


def _be(given: Input, folder: Path, said: Path) -> None:
    """The command, in this process, which ends with it."""
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**32, size + 2**32))
    if given.started:
        training._launched = _LAUNCHED
    code: Any = 70
    try:
        COMMAND(list(given.line), prog_name="counterflow")
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
    except BaseException as error:
        print(f"Traceback of a {type(error).__name__}: {error}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 71)


_LAUNCHED = training._launched


def _end_where_workers_start() -> None:
    training._launched = _end  # type: ignore[assignment]
    survey.launch = _end  # type: ignore[assignment]
    training_agreement.launch = _end  # type: ignore[assignment]


def _end(*_: object, **__: object) -> Any:
    raise SystemExit(0)


SHARES = {
    "schedule": 0.3,
    "config": 0.12,
    "line": 0.12,
    "work": 0.14,
    "plan": 0.14,
    "checkpoint": 0.165,
    "resume": 0.01,
    "fresh": 0.005,
}
"""Of all inputs, those of each kind."""

_HEAD = [
    "| kind | inputs | done | refused | broken | longest, s | most memory, MiB | longest message |",
    "|---|---|---|---|---|---|---|---|",
]


def kinds(names: Sequence[str], folder: Path) -> dict[str, Kind]:
    """The kinds that are wanted, by their names; ``folder`` is for what right commands write."""
    found: dict[str, Kind] = {}
    makers: dict[str, Callable[[Path], Kind]] = {
        "schedule": lambda _: schedule,
        "config": lambda _: config,
        "line": lambda _: line,
        "work": lambda _: work,
        "plan": inputs_of_plans,
        "checkpoint": checkpoints,
        "resume": lambda place: checkpoints(place, started=True),
        "fresh": lambda _: line,
    }
    for name in names:
        (place := folder / f"right-{name}").mkdir()
        found[name] = makers[name](place)
    return found


def tried(name: str, kind: Kind, inputs: int, seed: int, folder: Path) -> Iterator[tuple[str, int]]:
    """The row of a kind, and how many of its inputs broke a rule: each hundred inputs, and at last."""
    runs = run_fresh if name == "fresh" else run
    base = runs(Input(["train", "x.toml"], {}), folder)  # there is no such file
    draw = random.Random(f"{name} {seed}")
    codes: Counter[str] = Counter()
    most = [0.0, 0.0, 0]
    slowest = longest = ""
    for number in range(inputs):
        given = kind(draw)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            found = runs(given, Path(temporary))
        seconds, more_bytes = found.seconds - base.seconds, found.more_bytes - base.more_bytes
        found = Outcome(found.code, found.text, seconds, more_bytes)
        wrong = found.broken()
        if seconds > max(most[0], MOST_SECONDS / 3):
            slowest = f"{name} {number} took {seconds:.1f} s: {shlex.join(given.line)[:300]}"
        if len(found.text) > max(most[2], LONG_CHARACTERS):
            longest = f"{name} {number} says, in {len(found.text):,} characters: {found.text}"
        codes["broken" if wrong else "done" if found.code == 0 else "refused"] += 1
        most = [max(a, b) for a, b in zip(most, (seconds, more_bytes, len(found.text)), strict=True)]
        if wrong:
            print(
                f"{name} {number}: {wrong}: {shlex.join(given.line)[:300]}\n{found.text[-700:]}", flush=True
            )
            for file, content in given.files.items():
                if file.startswith("x."):
                    print(f"{content[:1500]!r}", flush=True)
        if number % 100 == 99 or number == inputs - 1:
            cells = (name, number + 1, codes["done"], codes["refused"], codes["broken"], f"{most[0]:.1f}")
            row = " | ".join(map(str, (*cells, f"{most[1] / 2**20:.0f}", int(most[2]))))
            yield f"| {row} |", codes["broken"]
    print(*filter(None, (slowest, longest)), sep="\n")


def kept(rows: dict[str, str], seed: int) -> str:
    """The kept table with these rows in it."""
    before = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    old = {name: row for row in before for name in SHARES if row.startswith(f"| {name} |")}
    found = [(old | rows)[name] for name in SHARES if name in old | rows]
    inputs, broken = (sum(int(row.split("|")[column]) for row in found) for column in (2, 5))
    total = f"{inputs:,} inputs in all, {broken:,} broke a rule"
    return "\n".join([f"seed {seed}; {machine_line()}", "", *_HEAD, *found, "", total]) + "\n"


def main() -> None:
    parser = arguments(__doc__, "fuzz.*")
    parser.add_argument("inputs", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=SHARES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, str] = {}
    broken = 0
    with tempfile.TemporaryDirectory() as temporary:
        (place := Path(temporary, "warm")).mkdir()
        warm(place)
        for name, kind in kinds(options.kind or list(SHARES), Path(temporary)).items():
            inputs = max(1, round(SHARES[name] * options.inputs))
            wrong = 0
            for row, wrong in tried(name, kind, inputs, options.seed, Path(temporary)):  # noqa: B007
                rows[name] = row
                if options.keep:
                    RESULTS.write_text(kept(rows, options.seed))
            broken += wrong
            print(rows[name], flush=True)
    print(*_HEAD, *rows.values(), sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
