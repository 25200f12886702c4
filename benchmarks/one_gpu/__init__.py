"""Validation on a machine with one GPU, in eight minutes: parts by their value, each with a time limit.

    PYTHONPATH=src python benchmarks/gpu_check.py --one-gpu [--out one_gpu.json] [--parts numbers,nccl]
    PYTHONPATH=src python benchmarks/gpu_check.py --one-gpu --pretend [--thin 8]  # rehearsal on CPUs

Each part is a process of its own that writes each result at once, so that a crash, a hang or the end of the
machine's time leaves what came before. The report is one JSON file, rewritten after each part, and a table.
It runs from a checkout without installation, with numpy, numba, matplotlib, typer, rich, safetensors,
pydantic and tomlkit beside torch; a row of each part says what else it imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from kit import machine

FOLDER = Path(__file__).parents[1]
GRACE_SECONDS = 5.0
"""Time that a part has to end by itself after its limit."""

REHEARSAL_FACTOR = 6.0
"""Multiple of a part's limit in a rehearsal, whose machine may be busy with other things."""

ALLOWED = (
    *("torch", "numpy", "numba", "matplotlib", "typer", "rich", "safetensors", "pydantic", "tomlkit"),
    *("pip", "setuptools", "dill", "tqdm"),  # which torch imports where they are installed
)
"""Distributions that the programme may import, with what these require."""

GOOD = {"agrees", "measured", "not available"}
"""Verdicts of rows that are no failures."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the programme.

    Attributes:
        name: name of the part.
        module: module of its rows.
        seconds: limit of its time.
        about: subject, for the table.
    """

    name: str
    module: str
    seconds: float
    about: str

    def limit(self, *, pretend: bool) -> float:
        """Limit of its time, in seconds; a rehearsal's is longer."""
        return self.seconds * (REHEARSAL_FACTOR if pretend else 1.0)


PARTS = (
    Part("numbers", "one_gpu.numbers", 95, "workers as threads against one process"),
    Part("nccl", "one_gpu.nccl", 125, "ranks as processes over NCCL on one GPU"),
    Part("memory", "one_gpu.memory", 75, "peak memory of each worker, predicted and measured"),
    Part("host", "one_gpu.host", 70, "host microseconds, kernels, share of the peak"),
    Part("rules", "one_gpu.rules", 20, "the pretended device beside the device"),
    Part("graphs", "one_gpu.graphs", 20, "a stage's ops as a CUDA graph"),
    Part("profile", "one_gpu.profile", 60, "profiles of GPT, Llama and MoE layers"),
)
"""Together 465 seconds, in the order of their value."""


@dataclass(slots=True)
class Row:
    """One result.

    Attributes:
        part: part of the programme.
        name: case.
        verdict: ``agrees``, ``measured``, ``not available``, ``differs``, ``failed`` or ``cut off``.
        text: explanation.
        values: figures by name.
    """

    part: str
    name: str
    verdict: str
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """Rows of one part, written as they come.

    Attributes:
        part: name of the part.
        path: file with a JSON object in each line.
        end: time at which the part has to end, of ``time.monotonic``.
        pretend: whether it is a rehearsal on CPUs.
        thin: in a rehearsal each so-many-th case runs.
        longest: seconds of the longest case so far.
        broken: whether the device answers with errors, after which nothing runs.
    """

    part: str
    path: Path
    end: float
    pretend: bool
    thin: int = 1
    longest: float = 2.0
    broken: bool = False

    @property
    def device(self) -> str:
        """Device of the computation."""
        return "cpu" if self.pretend else "cuda"

    def left(self) -> float:
        """Seconds that the part has left."""
        return self.end - time.monotonic()

    def add(self, name: str, verdict: str, text: str = "", **values: Any) -> None:
        """Write a row."""
        row = Row(self.part, name, verdict, text, values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(shown(row), flush=True)

    def case(self, name: str, run: Callable[[], tuple[str, str, dict[str, Any]]]) -> None:
        """Run a case and write its row; an error is a row too."""
        begin = time.perf_counter()
        now_of(self.path).write_text(name, encoding="utf-8")
        try:
            verdict, text, values = run()
        except Exception as error:
            self.broken = isinstance(error, getattr(torch, "AcceleratorError", ()))
            lines = traceback.format_exc().splitlines()
            self.add(name, "failed", f"{type(error).__name__}: {error}"[:2000], traceback=lines[-12:])
            return
        seconds = time.perf_counter() - begin
        self.longest = max(self.longest, seconds)
        self.add(name, verdict, text, seconds=round(seconds, 2), **values)

    def cases(self, cases: Sequence[Any]) -> Iterator[Any]:
        """Cases that are run: in a rehearsal each so-many-th, and those for which there is time."""
        chosen = cases[:: self.thin]
        for number, case in enumerate(chosen):
            if self.broken or self.left() < self.longest:
                why = "the device answers with errors" if self.broken else "no time was left"
                self.add("further cases", "not available", f"{why}; {len(chosen) - number} cases")
                return
            yield case


def case_name(schedule: object, replicas: int, options: Mapping[str, Any]) -> str:
    """A schedule, replicas and options in words."""
    groups = f", {replicas} replicas" if replicas > 1 else ""
    return f"{schedule}{groups}" + "".join(f", {key}={value}" for key, value in options.items())


def now_of(path: Path) -> Path:
    """File with the name of the case that runs."""
    return path.with_suffix(".now")


def shown(row: Row) -> str:
    """A line of the table."""
    figures = {k: v for k, v in row.values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    text = row.text.splitlines()[0][:160] if row.text else ""
    return f"{row.part:<8} {row.verdict:<13} {row.name:<60} {numbers}  {text}".rstrip()


# -- a part, in its own process


def run_part(name: str, report: Report) -> None:
    """Run a part, and say which packages it imported beside the allowed ones."""
    part = next(part for part in PARTS if part.name == name)
    try:
        importlib.import_module(part.module).rows(report)
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        report.add("the part itself", "failed", f"{type(error).__name__}: {error}", traceback=lines[-12:])
    others = other_packages()
    if others:
        # torch and numba import others of their own where these are installed.
        verdict = "failed" if report.pretend else "measured"
        report.add("packages beside the allowed ones", verdict, ", ".join(others))


def other_packages() -> list[str]:
    """Distributions of which something is imported and that are not among the allowed ones."""
    known: set[str] = set()
    left = [*ALLOWED]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in known:
            continue
        known.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        left += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required if "extra ==" not in each]
    by_module = importlib.metadata.packages_distributions()
    found = {
        distribution
        for module in {each.partition(".")[0] for each in sys.modules}
        for distribution in by_module.get(module, ())
        if not {re.sub(r"[-_.]+", "-", d).lower() for d in by_module[module]} & known
    }
    return sorted(found - {"counterflow"})


# -- all parts


def run(parts: Sequence[str], out: Path, *, pretend: bool, thin: int) -> int:
    """Run parts one after another; the status is 1 if a row is a failure."""
    began = time.monotonic()
    found: dict[str, Any] = {"pretended": pretend, "machine": {}, "seconds": {}, "rows": []}
    found["machine"] = about_machine()
    print(json.dumps(found["machine"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if part.name not in parts:
                continue
            begin = time.monotonic()
            path = Path(folder) / f"{part.name}.jsonl"
            print(f"\n{part.name}: {part.about}, at most {part.limit(pretend=pretend):g} s", flush=True)
            problem = _process(part, path, pretend=pretend, thin=thin)
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            rows = [Row(**json.loads(line)) for line in lines]
            if problem:
                rows.append(Row(part.name, "the part itself", "cut off", problem))
                print(shown(rows[-1]), flush=True)
            found["rows"] += [asdict(row) for row in rows]
            found["seconds"][part.name] = round(time.monotonic() - begin, 1)
            draft = out.with_suffix(".draft")
            draft.write_text(json.dumps(found, indent=1), encoding="utf-8")
            draft.replace(out)
    failures = [row for row in found["rows"] if row["verdict"] not in GOOD]
    print(f"\n{len(found['rows'])} rows, {len(failures)} of them failures, {time.monotonic() - began:.0f} s")
    for row in failures:
        print(shown(Row(**row)))
    print(f"The report is in {out}; docs/gpus.md says where it goes.")
    return 1 if failures else 0


def _process(part: Part, path: Path, *, pretend: bool, thin: int) -> str:
    """Run a part in a process; returns why it did not end by itself, or nothing."""
    command = [sys.executable, "-m", "one_gpu", "--part", part.name, "--rows", str(path)]
    command += ["--thin", str(thin), *(["--pretend"] if pretend else [])]
    limit = part.limit(pretend=pretend)
    command += ["--end", str(time.monotonic() + limit)]
    environment = os.environ | {"PYTHONPATH": _import_path(), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait(limit + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
        process.wait()
    if status is None:
        now = now_of(path).read_text(encoding="utf-8") if now_of(path).exists() else "its imports"
        return f"it took more than {limit:g} s, in {now}"
    return "" if status == 0 else f"its process ended with status {status}"


def _import_path() -> str:
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (given, str(FOLDER.parent / "src"), str(FOLDER))))


def about_machine() -> dict[str, Any]:
    """The machine, its GPUs and its versions."""
    found: dict[str, Any] = {**machine(), "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found["gpus"] = [each.name for each in properties]
        found["gpu_bytes"] = [each.total_memory for each in properties]
        found["nccl"] = torch.cuda.nccl.version()
    return found
