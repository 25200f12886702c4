"""What transformers' own tests claim of its Trainer, one by one, of the trainer in pipeline stages.

    python benchmarks/trainer_claims.py [--keep] [--only WORD ...]

Each test of transformers' ``tests/trainer/test_trainer*.py`` (5.x, where they are split by subject) is a row:
it runs here, or is refused with a sentence, or does not apply, because of what the row says. A claim that
runs is a function of this file, in our words and on a small model of our own; it holds for the plain
``Trainer``, which shows that it says what the test says, and for ``PipelineTrainer`` on two workers, with the
scheme ``1f1b``. A claim that is refused is tried, and the sentence is what the trainer raises.

Tests that make no trainer (samplers, collators, states and handlers of callbacks) are rows without a run.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"

import torch
import transformers
from kit import arguments, keep, machine_line
from trainer_claims_kit import Kit
from trainer_claims_rows import ROWS, Row, Run

import counterflow as cf
from counterflow.runtime.workers.world import current_transport

WORKERS = 2

REFUSALS = "cannot be combined|but a pipeline writes|the loss is nan"
"""What a sentence of ours says."""


def attempt(row: Row, folder: Path, workers: int) -> tuple[str, str]:
    """What is wrong with a row, empty if its claim holds, and the sentence with which it is refused."""
    staged = workers > 0
    assert row.run is not None
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            row.run(Kit(folder, workers))
        except AssertionError as error:
            frames = [
                f
                for f in traceback.extract_tb(error.__traceback__)
                if Path(f.filename).name.startswith("trainer_claims")
            ]
            return f"line {frames[-1].lineno}: {frames[-1].line} {error}", ""
        except Exception as error:  # transformers' or ours
            said = str(error).splitlines()[0] if str(error) else ""
            if row.refused and staged and re.search(REFUSALS, said):
                return "", said
            return f"{type(error).__name__}: {said}", ""
    return ("is not refused" if row.refused and staged else ""), ""


@dataclass
class Told:
    """What rows say, in a file that all workers see.

    Attributes:
        folder: folder of the runs.
    """

    folder: Path

    def note(self, number: int, wrong: str, said: str = "") -> None:
        """Write what a row says."""
        with (self.folder / "rows").open("a") as file:
            file.write(json.dumps([number, wrong, said]) + "\n")
        row = ROWS[number]
        print(f"{row.file:14} {row.name}: {wrong or said or 'holds'}", file=sys.stderr, flush=True)

    def rows(self) -> dict[int, tuple[str, str]]:
        """What was written, by row."""
        path = self.folder / "rows"
        lines = path.read_text().splitlines() if path.exists() else []
        return {number: (wrong, said) for number, wrong, said in map(json.loads, lines)}


def serve(numbers: list[int], told: Told) -> None:
    """Try rows in stages, in this worker; the first worker writes what they say."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # trainers collect garbage, also among all that is imported
    transport = current_transport()
    for number in numbers:
        wrong, said = attempt(ROWS[number], told.folder / "staged" / str(number), WORKERS)
        if wrong or ROWS[number].ends:  # the others may wait for this worker
            told.note(number, wrong, said)
            raise RuntimeError(wrong or said)
        transport.gather_objects(None)
        if transport.rank == 0:
            told.note(number, wrong, said)


def launched(numbers: list[int], told: Told) -> None:
    """Try rows on workers, which are started anew after a row that ends them."""
    while numbers:
        try:
            cf.launch(serve, numbers, told, workers=WORKERS, transport="gloo", threads=1, timeout_seconds=60)
        except Exception as error:
            done = {number: row for number, row in told.rows().items() if number in numbers}
            left = [number for number in numbers if number not in done]
            if left and not any(wrong or ROWS[number].ends for number, (wrong, _) in done.items()):
                told.note(left.pop(0), f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
            numbers = left
        else:
            return


def table(asked: list[int], plain: dict[Run, str], found: dict[Run, tuple[str, str]]) -> list[str]:
    """The table as text."""
    lines, counts = [], dict.fromkeys(("run and pass", "are refused by name", "do not apply", "fail"), 0)
    for number in asked:
        row = ROWS[number]
        wrong, said = found.get(row.run, ("NOT RUN", "")) if row.run is not None else ("", "")
        if row.run is None:
            kind, text = "do not apply", f"does not apply: {row.why}"
        elif wrong:
            kind, text = "fail", f"FAILS: {wrong}"
        elif row.refused:
            kind, text = "are refused by name", f"refused: {said}"
        elif plain.get(row.run):
            kind, text = "fail", f"holds in stages, but not of Trainer: {plain[row.run]}"
        else:
            kind, text = "run and pass", "runs and passes"
        counts[kind] += 1
        lines.append(f"{row.file:14} {row.name:62} {text}")
    return [
        f"Claims of transformers' tests of its Trainer, on {WORKERS} workers; transformers "
        f"{transformers.__version__}.",
        *lines,
        ", ".join(f"{count} {kind}" for kind, count in counts.items()) + ".",
        machine_line(),
    ]


def main() -> None:
    """Run the claims that are asked for, and print the table."""
    parser = arguments(__doc__, "trainer_claims.*")
    parser.add_argument("--only", nargs="*", default=[""], help="words, one of which a row contains")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    asked = [n for n, row in enumerate(ROWS) if any(w in f"{row.file} {row.name}" for w in given.only)]
    first: dict[Run, int] = {}
    for number in asked:
        run = ROWS[number].run
        if run is not None:
            first.setdefault(run, number)  # several tests may make one claim
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = Told(folder)
        plain = {
            run: attempt(ROWS[number], folder / "plain" / str(number), 0)[0]
            for run, number in first.items()
            if not ROWS[number].refused
        }
        for run, wrong in plain.items():
            if wrong:
                print(f"not of Trainer: {ROWS[first[run]].name}: {wrong}", file=sys.stderr, flush=True)
        launched(list(first.values()), told)
        found = {run: told.rows()[number] for run, number in first.items() if number in told.rows()}
        lines = table(asked, plain, found)
    print("\n".join(lines))
    if given.keep:
        keep("trainer_claims", lines)


if __name__ == "__main__":
    main()
