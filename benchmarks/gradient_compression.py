"""Sums of gradients in bfloat16 and in 8 bits: what they do to the loss, and to the time of a step.

    python benchmarks/gradient_compression.py [--steps 120] [--turns 9] [--only loss] [--keep]

Two tables. Bytes and loss: the GPT example (`counterflow train`'s model, text and optimiser) for some steps
from the same weights, in Chimera's two directions and in two replicas of a pipeline. Time: emulated stages
whose gradients cross a limited link, as in `eager_sync.py`, in full and compressed in turns, beside their
predictions; needs root, and Linux.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from eager_sync import DEPTH, SAMPLES, WIDTH, Case, Layer, Work
from emulated_device import note
from kit import arguments, keep, machine_line
from namespaces import all_done, nodes, one_a_node

import counterflow as cf
from counterflow.planning import Configuration, Model, Predictor
from counterflow.planning.cost.device_placement import Arrangement, devices
from counterflow.runtime.parameters.compressed_sums import SumCompression
from counterflow.schedule.modes import Sync
from counterflow.training import load_config
from counterflow.training.job import prepare

FORMS = None, "bfloat16", "int8"
CASES = (
    *(Case(1, 300.0, weights, 0.0) for weights in (500_000, 1_000_000, 4_000_000)),
    *(Case(2, 300.0, weights, 0.0) for weights in (500_000, 1_000_000)),
)


@dataclass(frozen=True)
class Row:
    """A case's steps in seconds, by form."""

    case: Case
    sent: dict[str, float]
    measured: dict[str, list[float]]
    predicted: dict[str, float]


def compression_of(pipeline: cf.Pipeline) -> SumCompression | None:
    """Form in which a pipeline sums its gradients, with the bytes that it has sent; None: in full."""
    return pipeline.weights.placement._compression


def losses(name: str, steps: int, form: str | None) -> tuple[float, float, float, float]:
    """What every worker runs: the example, its losses and bytes."""
    schedule = {"chimera": cf.schemes.chimera(4, 8), "dapple": cf.schemes.dapple(2, 4)}[name]
    config = load_config(sets=[f"train.steps={steps}"])
    job = prepare(config)
    with torch.device("meta"):
        layers = job.layers
    pipeline = cf.Pipeline(
        layers,
        job.bundle.loss,
        schedule,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        gradient_compression=form,
        digest_every=20,
    )
    found, samples = [], config.train.samples // pipeline.replicas
    where = {"replica": pipeline.replica, "replicas": pipeline.replicas}
    for step in range(steps):
        found.append(pipeline.step(*job.bundle.batches.batch(step, samples, **where)).loss)
        if step % 20 == 0:
            note(pipeline.transport.rank, f"{name} {form}: step {step}")
    inputs, targets = job.bundle.batches.validation(samples, **where)
    validation = pipeline.evaluate(inputs, targets).loss
    used = compression_of(pipeline)
    mine = [1.0, 1.0] if used is None else [used.plain_bytes, used.sent_bytes]
    plain, sent = (sum(column) for column in zip(*pipeline.transport.gather(mine), strict=True))
    return statistics.fmean(found[-10:]), validation, plain, sent


def loss_table(steps: int) -> list[str]:
    """Losses of the example by scheme and form."""
    lines = [
        f"## Loss of the GPT example after {steps} steps",
        "",
        "| scheme | sums | training loss, mean of the last 10 | validation loss | bytes sent / plain |",
        "|---|---|--:|--:|--:|",
    ]
    for name, kind in (("chimera", "chimera D=4, two directions"), ("dapple", "dapple D=2, two replicas")):
        for form in FORMS:
            loss, validation, plain, sent = cf.launch(
                losses, name, steps, form, workers=4, transport="gloo", threads=1
            )[0]
            lines.append(
                f"| {kind} | {form or 'in full'} | {loss:.4f} | {validation:.4f} | {sent / plain:.3f} |"
            )
    return lines


class Sums(Work):
    """What every worker of a link does, case by case."""

    def compressed(self, case: Case, form: str | None) -> cf.Pipeline:
        """Chimera with one layer a stage."""
        schedule = cf.schemes.chimera(DEPTH, DEPTH)
        return cf.Pipeline(
            [Layer(case.weights, self.host) for _ in range(DEPTH)],
            lambda output, _: output.mean(), schedule, sync=Sync.EAGER_OPT, gradient_compression=form,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            digest_every=0, witness_every=0, cuts=range(1, DEPTH),
            mesh=devices(schedule.placement, case.replicas, next(iter(Arrangement))),
        )  # fmt: skip

    def forms(self, case: Case, turns: int) -> dict[str, Any]:
        """A case: the forms in turns, and their predictions."""
        self.host.busy = case.busy
        profile = self.profile(case)
        pipelines = {str(form): self.compressed(case, form) for form in FORMS}
        inputs = torch.zeros(SAMPLES * DEPTH, WIDTH)
        measured: dict[str, list[float]] = {name: [] for name in pipelines}
        for turn in range(turns + 2):
            for name, pipeline in pipelines.items():
                taken = self.step_seconds(pipeline, inputs)
                if turn >= 2:
                    measured[name].append(taken)
        sent, predicted = {}, {}
        for form in FORMS:
            used = compression_of(pipelines[str(form)])
            sent[str(form)] = 1.0 if used is None else used.sent_bytes / used.plain_bytes
            keys = {"clip_norm": 0} | ({} if form is None else {"gradient_compression": form})
            model = Model("emulated", ("layer",) * DEPTH, 0.0, config={"pipeline": keys})
            chosen = Configuration.of(
                "chimera", {"stages": DEPTH, "micro_batches": DEPTH}, case.replicas, SAMPLES,
                sync=Sync.EAGER_OPT,
            )  # fmt: skip
            predictor = Predictor(model, profile, replace(self.cluster, sync_slowdown=0.0))
            predicted[str(form)] = predictor.predict(chosen).step_seconds
        for pipeline in pipelines.values():
            pipeline.close()
        return {"sent": sent, "measured": measured, "predicted": predicted}


def work(out: str, cases: str, turns: int) -> None:
    """A worker; the first one writes."""
    self = Sums()
    rows = [{"case": each, **self.forms(Case(**each), turns)} for each in json.loads(cases)]
    if self.transport.rank == 0:
        Path(out).write_text(json.dumps(rows))


def time_table(turns: int) -> list[str]:
    """Medians of steps by case and form."""
    lines = [
        "## Time of a step over links of 300 Mbit/s, one worker a node, Chimera D=4",
        "",
        "| W | a stage's gradients | sums | bytes sent / plain | step, ms | ratio | predicted, ms | ratio |",
        "|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for replicas in dict.fromkeys(case.replicas for case in CASES):
        cases = [case for case in CASES if case.replicas == replicas]
        count = DEPTH * replicas
        with nodes(count, cases[0].megabits, 1e-4) as names, tempfile.NamedTemporaryFile("r") as file:
            program = [sys.executable, __file__, "--work", file.name, "--turns", str(turns)]
            program += ["--cases", json.dumps([vars(case) for case in cases])]
            all_done(one_a_node(names, *program), 1500)
            for row in json.load(file):
                lines += rows_of(Row(**{**row, "case": Case(**row["case"])}))
    return lines


def rows_of(row: Row) -> Sequence[str]:
    """A case's lines."""
    lines, plain = [], str(None)
    for name, taken in row.measured.items():
        median, first = statistics.median(taken), statistics.median(row.measured[plain])
        form = "in full" if name == plain else name
        lines.append(
            f"| {row.case.replicas} | {4e-6 * row.case.weights:g} MB | {form} "
            f"| {row.sent[name]:.3f} | {1e3 * median:.1f} | {median / first:.3f} "
            f"| {1e3 * row.predicted[name]:.1f} | {row.predicted[name] / row.predicted[plain]:.3f} |"
        )
    return lines


def main() -> None:
    """Read the command line and do what it says."""
    parser = arguments(__doc__, "gradient_compression.txt")
    parser.add_argument("--steps", type=int, default=120, help="of the GPT example")
    parser.add_argument("--turns", type=int, default=9, help="steps of each form that are timed")
    parser.add_argument("--only", choices=["loss", "time"], help="one of the two tables")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.cases, given.turns)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is taken down
    words = [word for word in sys.argv[1:] if word != "--keep"]
    lines = [f"# {' '.join(['python benchmarks/gradient_compression.py', *words])}, {machine_line()}", ""]
    if given.only != "loss":
        lines += [*time_table(given.turns), ""]
    if given.only != "time":
        lines += loss_table(given.steps)
    print("\n".join(lines))
    if given.keep:
        keep("gradient_compression", lines)


if __name__ == "__main__":
    main()
