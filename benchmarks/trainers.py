"""Trainers of transformers and TRL in pipeline stages, against the same trainers in one process.

    python benchmarks/trainers.py [--keep] [--only WORD ...] [--pp 1 2 4]

Claims: for each row of the table (trainer, architecture, feature, number of workers), the logged losses,
gradient norms, learning rates and metrics, and the final weights, are those of the plain trainer in one
process; or the trainer refuses the feature, by name, when it is made. Differences are relative: of what is
logged to the value (at least 1e-3), of weights to the largest of their tensor (at least 1e-2). In float64
what is logged is within 1e-6 (trainers add losses up in float32), and weights within 1e-12. In bf16 both are
within 2e-2. SFTTrainer and DPOTrainer compute losses in float32: pp=1 is within 1e-4 of what they log and
1e-4 of weights, and pp=2 and 4 are as exact against pp=1 as the others.

Models have a few thousand parameters and train for 2 to 8 steps. Each row is written when it is done, so a
table that was interrupted says so in its first line. Rows of TRL are left out without TRL.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TQDM_DISABLE"] = "1"

import torch
from kit import arguments, machine_line
from trainers_cases import CASES, Case, fused, rows, trainer_of

import counterflow as cf

RESULTS = Path(__file__).parent / "results" / "trainers.txt"
TOLD_EXACTLY_NOT = ("runtime", "per_second", "total_flos", "preparation_time")
ALONE = "alone"
"""Folder of the runs of the plain trainer; others have the number of workers."""


# -- the table


@dataclass
class Table:
    """The rows, in a folder that all workers see.

    Attributes:
        folder: the folder of the runs.
        cases: the rows that are asked for.
        pps: numbers of workers that are asked for.
        about: versions.
        kept: where the table is written as well.
    """

    folder: Path
    cases: tuple[Case, ...]
    pps: tuple[int, ...]
    about: str
    kept: Path | None

    def asked(self) -> list[tuple[Case, int]]:
        """Rows with their numbers of workers."""
        return [(case, pp) for case in self.cases for pp in case.pps if pp in self.pps]

    def note(self, case: Case, pp: int, found: dict[str, Any]) -> None:
        """Write a row, and the table so far."""
        with (self.folder / "rows").open("a") as file:
            file.write(json.dumps([case.name, pp, found]) + "\n")
        print(self._line(case, pp, found), file=sys.stderr, flush=True)
        if self.kept is not None:
            self.kept.write_text("\n".join(self.lines()) + "\n")

    def rows(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The rows that were written."""
        path = self.folder / "rows"
        lines = path.read_text().splitlines() if path.exists() else []
        return {(name, pp): found for name, pp, found in map(json.loads, lines)}

    def lines(self) -> list[str]:
        """The table as text."""
        known, asked = self.rows(), self.asked()
        done = [(case, pp) for case, pp in asked if (case.name, pp) in known]
        right = sum(not known[case.name, pp]["wrong"] for case, pp in done)
        state = "" if len(done) == len(asked) else f"PARTIAL: {len(done)} of {len(asked)} rows. "
        return [
            f"{state}Against the plain trainer in one process; {self.about}, float64.",
            "Relative differences; tolerance 1e-6 of what is logged, 1e-12 of weights, or as told.",
            f"{'trainer':14}{'architecture':13}{'feature':34}{'pp':>3}  {'schedule':17}{'logged':>8}"
            f"{'weights':>9}",
            *(self._line(case, pp, known[case.name, pp]) for case, pp in done),
            f"{right} of {len(done)} rows are the same or refused by name.",
            machine_line(),
        ]

    @staticmethod
    def _line(case: Case, pp: int, found: dict[str, Any]) -> str:
        title = f"{case.trainer:14}{case.architecture:13}{case.feature:34}"
        if case.refused:
            return f"{title}{'':3}  {found['wrong'] or found['said']}"
        numbers = f"{found['logged']:8.0e}{found['weights']:9.0e}" if "logged" in found else " " * 17
        tolerance = "" if case.weights == Case("").weights else f" ({case.weights:g})"
        workers = f"{pp}" if case.replicas == 1 else f"{pp}x{case.replicas}"
        return f"{title}{workers:>3}  {case.schedule(pp):17}{numbers}  {found['wrong'] or 'same'}{tolerance}"


# -- a run


def run(case: Case, folder: Path, pp: int | None, checkpoint: Path | None = None) -> None:
    """Train, and write what was logged and the weights."""
    from transformers import PrinterCallback

    trainer = trainer_of(case, folder, pp)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    more: dict[str, Any] = {}
    if case.after.startswith("predict"):
        data = rows(5, 1)
        if case.after == "predict_unlabelled":
            data = [{"input_ids": row["input_ids"]} for row in data]
        found = trainer.predict(data)
        more = {"predicted": torch.as_tensor(found.predictions).double(), "metrics": told(found.metrics)}
    reporters = [one for one in trainer.callback_handler.callbacks if hasattr(one, "events")]
    more |= {"events": [one.events for one in reporters]}
    trainer.save_model(str(folder / "final"))
    history = [told(row) for one in reporters for row in one.logs]
    history += [told(row) for row in trainer.state.log_history]
    if trainer.is_world_process_zero():
        kept = sorted(path.name for path in folder.glob("checkpoint-*"))
        files = sorted(
            path.name for path in (folder / "final").glob("*") if not path.name.startswith("model")
        )
        torch.save({"history": history, "kept": kept, "files": files, **more}, folder / "told.pt")


def told(row: dict[str, Any]) -> dict[str, float]:
    """What does not depend on the time."""
    return {name: v for name, v in row.items() if not any(part in name for part in TOLD_EXACTLY_NOT)}


def first_checkpoint(folder: Path) -> Path:
    """The checkpoint with the fewest steps."""
    return min(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings and progress."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


Job = tuple[Case, int, bool]
"""A row, its number of workers, and whether this is only the run that it goes on from."""


def source_of(case: Case, folder: Path, pp: int) -> Path:
    """Folder of the run whose checkpoint a row resumes."""
    return folder / case.name / f"source {case.source or pp}"


def serve(jobs: tuple[Job, ...], table: Table) -> None:
    """Run rows in this worker, until one fails."""
    gc.freeze()  # trainers collect garbage, also among all that is imported
    with quiet():
        for case, pp, is_source in jobs:
            place = table.folder / case.name / str(pp)
            plain = replace(case, after="")
            source = source_of(case, table.folder, pp)
            try:
                if is_source:
                    run(plain, source, pp)
                    continue
                if case.resumes and not case.source:
                    run(plain, source, pp)
                run(case, place, pp, first_checkpoint(source) if case.resumes else None)
            except Exception as error:
                place.mkdir(parents=True, exist_ok=True)
                with (place / "error").open("a") as file:
                    file.write(f"{type(error).__name__}: {error}\n")
                raise
            if _is_first():
                table.note(case, pp, compared(case, table.folder, pp))


def _is_first() -> bool:
    from counterflow.runtime.workers.world import current_transport

    transport = current_transport()
    transport.gather_objects(None)
    return transport.rank == 0


def refusal(case: Case, folder: Path) -> dict[str, Any]:
    """The sentence with which a row is refused."""
    try:
        trainer = trainer_of(case, folder / case.name, 1)
        if case.after == "train":
            cf.launch(trainer.train, workers=1, transport="local", threads=1)
    except cf.ConfigError as error:
        return {"wrong": "", "said": str(error).replace(f"{Path(__file__).parents[1]}/", "")}
    except Exception as error:  # transformers' own, before it is ours
        return {"wrong": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return {"wrong": "is not refused"}


# -- comparison


def weights(folder: Path, *, loaded: bool) -> dict[str, torch.Tensor]:
    """Final weights, as they are written, or as ``from_pretrained`` loads them."""
    if loaded:
        import transformers

        kind = transformers.AutoModelForCausalLM
        with quiet():
            state: dict[str, torch.Tensor] = kind.from_pretrained(
                folder / "final", dtype=torch.float64
            ).state_dict()
        return state
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in (folder / "final").glob("*.safetensors"):
        found |= load_file(file)
    return found


def compared(case: Case, folder: Path, pp: int) -> dict[str, Any]:
    """Largest relative differences of what was logged and of weights, and what is wrong."""
    place = folder / case.name / str(pp)
    reference = place.parent / ("1" if fused(case) and pp > 1 else ALONE)
    rounded = fused(case) and pp == 1
    if not (reference / "told.pt").exists():
        return {"wrong": f"has no run to compare with ({reference.name})"}
    mine = torch.load(place / "told.pt", weights_only=False)
    its = torch.load(reference / "told.pt", weights_only=False)
    found: dict[str, Any] = {"logged": 0.0, "weights": 0.0, "wrong": ""}
    if len(mine["history"]) != len(its["history"]):
        return found | {"wrong": f"{len(mine['history'])} logs for {len(its['history'])}"}
    pairs = [
        *zip(mine["history"], its["history"], strict=True),
        (mine.get("metrics", {}), its.get("metrics", {})),
    ]
    tolerance = 1e-4 if rounded else case.logged
    for row, wanted in pairs:
        if case.resumes:  # of the steps since then
            row.pop("train_loss", None), wanted.pop("train_loss", None)
        if row.keys() != wanted.keys():
            found["wrong"] = f"logs differ: {sorted(row.keys() ^ wanted.keys())}"
            continue
        for name, value in wanted.items():
            if not isinstance(value, float | int):
                continue
            if rounded and name.endswith("rewards/accuracies"):  # of margins that are 0 but for rounding
                continue
            apart = abs(row[name] - value) / max(abs(value), 1.0 if rounded else 1e-3)
            found["logged"] = max(found["logged"], math.inf if math.isnan(apart) else apart)
            if not apart <= tolerance and not found["wrong"]:
                found["wrong"] = f"{name} {row[name]} for {value}"
    for name in ("files", "events") if case.resumes else ("kept", "files", "events"):
        if mine[name] != its[name] and not found["wrong"]:
            found["wrong"] = f"{name} differ: {mine[name]} for {its[name]}"
    loaded = case.after == "loaded" or case.architecture in ("Mixtral", "GPT-NeoX")  # written by older names
    ours, wanted_weights = weights(place, loaded=loaded), weights(reference, loaded=loaded)
    if ours.keys() != wanted_weights.keys():
        return found | {"wrong": f"weights differ: {sorted(ours.keys() ^ wanted_weights.keys())[:3]}"}
    for name, tensor in wanted_weights.items():
        found["weights"] = max(found["weights"], _apart(ours[name], tensor))
    if "predicted" in its:
        found["weights"] = max(found["weights"], _apart(mine["predicted"], its["predicted"]))
    if not found["weights"] <= (1e-4 if rounded else case.weights) and not found["wrong"]:
        found["wrong"] = f"weights {found['weights']:.1e} apart"
    return found


def _apart(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    if mine.shape != wanted.shape:
        return math.inf
    largest = max(float(wanted.double().abs().max()), 1e-2)
    apart = float((mine.double() - wanted.double()).abs().max()) / largest
    return apart if math.isfinite(apart) else math.inf


# -- all runs


def launched(jobs: list[Job], table: Table, *, workers: int, say: Callable[[str], None]) -> None:
    """Run rows on some workers, which are started anew after a row that fails."""
    while jobs:
        transport = "local" if workers == 1 else "gloo"
        try:
            cf.launch(
                serve,
                tuple(jobs),
                table,
                workers=workers,
                transport=transport,
                threads=1,
                timeout_seconds=120,
            )
            return
        except Exception as error:
            at = next((n for n, job in enumerate(jobs) if not _is_done(job, table)), None)
            if at is None:
                return
            case, pp, _ = jobs[at]
            path = table.folder / case.name / str(pp) / "error"
            why = path.read_text() if path.exists() else f"{type(error).__name__}: {str(error)[-300:]}"
            say(f"{case.name}, {workers} workers: {why}")
            table.note(case, pp, {"wrong": why.splitlines()[0][:200]})
            jobs = jobs[at + 1 :]


def _is_done(job: Job, table: Table) -> bool:
    case, pp, is_source = job
    if is_source:
        return (source_of(case, table.folder, pp) / "told.pt").exists()
    return (case.name, pp) in table.rows()


def groups_of(table: Table) -> list[tuple[int, list[Job]]]:
    """Numbers of workers and their rows, in an order in which runs exist before they are resumed."""
    asked = table.asked()
    pps = sorted({pp for _, pp in asked} | {case.source for case, _ in asked if case.source})
    groups: list[tuple[int, list[Job]]] = []
    later: list[Job] = []
    for pp in pps:
        sources: list[Job] = [(case, pp, True) for case, _ in asked if case.source == pp]
        mine: list[Job] = [(case, its, False) for case, its in asked if its == pp]
        later += [job for job in mine if job[0].source > pp]
        by_workers: dict[int, list[Job]] = {}
        for job in [*sources, *(job for job in mine if job[0].source <= pp)]:
            by_workers.setdefault(pp * job[0].replicas, []).append(job)
        groups += by_workers.items()
    return groups + [(job[1] * job[0].replicas, [job]) for job in later]


def main() -> None:
    """Run the rows that are asked for, and print the table."""
    parser = arguments(__doc__, "trainers.*")
    parser.add_argument("--pp", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", nargs="*", default=[""], help="words, one of which a row's name contains")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    cases = [case for case in CASES if any(word in case.name for word in asked.only)]
    try:
        import trl

        about = f"transformers {transformers.__version__}, trl {trl.__version__}"
    except ImportError:
        cases, about = (
            [case for case in cases if case.data != "trl"],
            f"transformers {transformers.__version__}",
        )
    folder = Path(tempfile.mkdtemp())
    table = Table(folder, tuple(cases), tuple(asked.pp), about, RESULTS if asked.keep else None)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with quiet():
        for case in [case for case in cases if case.refused]:
            table.note(case, 1, refusal(case, folder))
        table.cases = tuple(case for case in cases if not case.refused)
        for case in table.cases:
            try:
                run(replace(case, after="" if case.resumes else case.after), folder / case.name / ALONE, None)
            except Exception as error:
                say(f"{case.name} fails in one process: {type(error).__name__}: {str(error)[:300]}")
        groups = groups_of(table)
        table.cases = tuple(cases)
        for workers, jobs in groups:
            launched(jobs, table, workers=workers, say=say)
    print("\n".join(table.lines()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
