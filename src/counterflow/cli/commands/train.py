"""``counterflow train``: train a model as a config says, and show the results."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterflow.common.number_texts import byte_size
from counterflow.common.plurals import plural
from counterflow.errors import WorkerError

from ..options.flags import ENDS_PROCESS, ConfigArgument, JsonFlag, SchemeOption, WorkersOption
from ..output.console import WIDE, Row, console, merge_equal_rows, note, print_json, table_of
from ..output.visible import echo

if TYPE_CHECKING:
    from counterflow.training import RunConfig
    from counterflow.training.training_report import Pair, Summary


_SLOWER = 0.1
"""Relative change from which ops that took longer in the run than when they were timed have a row."""


def train(
    ctx: typer.Context,
    config: ConfigArgument = None,
    *,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Change a key; may be repeated. --keys lists them.",
        ),
    ] = None,
    workers: WorkersOption = None,
    scheme: SchemeOption = None,
    steps: Annotated[int | None, typer.Option(help="Number of updates.")] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            help="Maximum restarts after a worker dies, hangs or fails.",
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder of the results. Default: the next free runs/SCHEME-NUMBER.",
            rich_help_panel="Output",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check config, model and folder, print the memory a worker needs; start nothing.",
        ),
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key of a config, and train nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a model. Without a config: a small GPT on the text that ships with Python, 4 workers, chimera.

    Starts its own workers on this machine, or takes its place among those that torchrun or Slurm started.
    Ctrl-C ends it after the step in flight and keeps what was reached (exit code 130). So do SIGTERM, SIGUSR1
    and SIGHUP, with exit code 75: the same run can go on from its checkpoint.
    """
    from counterflow.training.supervision.stopping import STOP, Phase, listening

    ends_process = ctx.find_root().obj == ENDS_PROCESS
    with (
        listening(ends_process=ends_process),
        STOP.during(Phase.LEAVE),
    ):  # the run has not begun, and importing torch takes seconds
        from counterflow.training import load_config

        if keys:
            _list_keys(as_json=as_json)
            return
        resolved = load_config(config, sets or (), scheme=scheme, workers=workers, steps=steps, out=out)
        if dry_run:
            _prepare(resolved, as_json=as_json)
        else:
            _run(resolved, max_restarts=max_restarts, as_json=as_json)


def _run(config: RunConfig, *, max_restarts: int, as_json: bool) -> None:
    from counterflow.training.run import run
    from counterflow.training.supervision.stopping import STOP

    from ..output.train_progress import TrainProgress

    try:
        done = run(config, TrainProgress(introduces=not as_json), max_restarts=max_restarts)
    except KeyboardInterrupt as stopped:
        note("; ".join(["Stopped", *map(str, stopped.args if str(stopped) else ())]))
        raise typer.Exit(STOP.exit_code) from None
    except WorkerError as error:
        if error.reported and _rank():
            raise typer.Exit(1) from None  # the worker that is to blame prints the error
        raise
    if done is None:
        raise typer.Exit(STOP.exit_code if STOP else 0)
    summary, folder = done
    if as_json:
        from counterflow.training.training_report import trained

        print_json(trained(summary, folder))
    else:
        _print(summary, folder)
    if summary.stopped:
        raise typer.Exit(STOP.exit_code)


def _list_keys(*, as_json: bool) -> None:
    from counterflow.common import toml
    from counterflow.training.load import known_keys
    from counterflow.training.training_report import ConfigKeys

    if as_json:
        print_json(ConfigKeys(keys=known_keys()))
        return
    for key in known_keys():
        text = key.key if key.default is None else f"{key.key} = {toml.dumps(key.default)}"
        echo(f"{text}  # {key.about}; {key.legal}")


def _prepare(config: RunConfig, *, as_json: bool) -> None:
    # GPUs are not checked: the run's may be on other machines.
    from counterflow.training.auto_config import with_plan
    from counterflow.training.folder import RunFolder
    from counterflow.training.job import prepare
    from counterflow.training.step_memory import available_bytes, least_shortage, step_memory
    from counterflow.training.training_report import prepared

    from ..output.train_progress import introduction

    job = prepare(with_plan(config))
    if _rank():
        return
    rehearsal = job.rehearsal()
    folder = RunFolder.tried(job.config, job.start.path if job.start is not None else None)
    least, available = job.least_bytes(rehearsal), available_bytes(job)
    warning = least_shortage(least, available)
    memory = step_memory(job, available) if warning is None else ""
    if as_json:
        rows = rehearsal.table.rows if rehearsal is not None else ()
        workers = None if isinstance(memory, str) else [asdict(worker) for worker in memory.workers]
        print_json(prepared(job.about, folder, least, workers, [asdict(row) for row in rows]))
        return
    for line in introduction(job.about):
        echo(line)
    if not isinstance(memory, str):
        echo(str(memory))
        warning = memory.shortage
    else:
        for name, amount in merge_equal_rows(least):
            echo(
                f"worker{'s' if '–' in name else ''} {name}: {byte_size(amount)} of weights, gradients and "
                "optimizer state; activations come on top"
            )
        if memory:
            echo(f"activations were not counted: {memory}")
    if warning is not None:
        echo(f"Warning: {warning}")
    if rehearsal is not None:
        echo(str(rehearsal.table))
    echo(f"results would go to {folder}, which can be written; nothing was started")


def _rank() -> int:
    from counterflow.runtime.workers.world import rank

    return rank() or 0


def _print(summary: Summary, folder: Path) -> None:
    from rich.text import Text

    from counterflow.training.folder import RunFolder

    from ..output.train_progress import duration

    about = summary.about
    out = console(WIDE)
    ended = (
        f"Stopped after {summary.steps:,} of {about.steps:,} steps"
        if summary.stopped
        else f"Trained {summary.steps:,} steps"
    )
    speed = f"{summary.samples_per_second:.4g} samples/s"
    out.print(Text(f"\n{ended} in {duration(summary.seconds)} · {speed}", style="bold"))
    out.print(_losses(summary))
    out.print(_figures(summary))
    if summary.planned_samples_per_second is not None:
        said = "measured in this run; predicted from ops timed at its start; planned from the profile's costs"
        out.print(Text(said, style="dim"))
    if about.shares_cores:
        out.print(
            Text(
                f"{about.workers_here} workers share {plural(about.cores, 'core')}: the prediction "
                "assumes the op "
                "times measured with all workers busy.",
                style="dim",
            )
        )
    out.print(Text(f"\nIn {folder}", style="bold"))
    out.print(_grid((Path(name).name, what) for name, what in RunFolder(folder).files().items()))
    out.print(Text(f"See it again: counterflow show {folder}", style="dim"))
    if summary.stopped:
        out.print(Text(f"Go on: {_resuming(folder)}", style="dim"), soft_wrap=True)  # a command, to copy


def _resuming(folder: Path) -> str:
    words = ["counterflow", "train", str(folder / "config.toml"), "--set", f"train.resume={folder}"]
    return shlex.join([*words, "--set", "train.out="])  # that run's folder is not empty


def _losses(summary: Summary) -> Any:
    steps = summary.training_steps
    mean = f"mean of the last {steps} steps" if steps > 1 else "of the only step"
    return _grid(
        [
            ("loss", f"[bold]{summary.training_loss:.3f}[/]", f"training, {mean}"),
            ("", f"[bold]{summary.validation_loss:.3f}[/]", "validation, held-out text"),
            (
                "",
                f"{summary.about.unigram_entropy:.3f}",
                f"unigram entropy: knowing only how frequent {summary.about.target}s are",
            ),
        ]
    )


def _figures(summary: Summary) -> Any:
    planned = summary.planned_samples_per_second
    table = table_of("", "measured", "predicted", *(() if planned is None else ("planned",)))
    together = summary.timed_together
    ops = "ops of a step" if together == 1 else f"ops of {together} steps, with warm-up and drain"
    table.add_row(ops, *map(_milliseconds, _pair(summary.ops_seconds)))
    if summary.as_ran_seconds is not None and abs(summary.slowdown - 1) > _SLOWER:
        word = "slower" if summary.slowdown > 1 else "quicker"
        times = max(summary.slowdown, 1 / summary.slowdown)
        row = f"the same, for ops as in the run: {times:.2f} times {word} than when they were timed"
        table.add_row(row, "", _milliseconds(summary.as_ran_seconds))
    bubbles = "bubble ratio" if together == 1 else "bubble ratio, between warm-up and drain"
    table.add_row(bubbles, *(f"{ratio:.1%}" for ratio in _pair(summary.bubble_ratio)))
    label = "whole step, with syncs and updates"
    if planned is None:
        table.add_row(label, _milliseconds(summary.step_seconds), "")
    elif together == 1:
        samples = summary.about.samples
        table.add_row(label, _milliseconds(summary.step_seconds), "", _milliseconds(samples / planned))
        table.add_row(
            "samples/s of these steps", f"{samples / summary.step_seconds:.4g}", "", f"{planned:.4g}"
        )
    else:  # steps overlap, so only the speed of all of them is the plan's number
        table.add_row(label, _milliseconds(summary.step_seconds), "", "")
        table.add_row("samples/s over all steps", f"{summary.samples_per_second:.4g}", "", f"{planned:.4g}")
    for name, pair in _grouped(summary.saved_bytes):
        table.add_row(f"saved for backward, {name}", *map(byte_size, _pair(pair)))
    for name, pair in _grouped(summary.stages_held) if together > 1 else ():
        table.add_row(f"weights held, {name}", *(f"{count:g} stages" for count in _pair(pair)))
    if summary.about.on_cpu:  # a process contains Python and torch, which the prediction does not
        for name, amount in _grouped(tuple(pair.predicted for pair in summary.memory_bytes)):
            table.add_row(f"memory of tensors, {name}", "", byte_size(amount))
        for name, amount in _grouped(tuple(pair.measured for pair in summary.memory_bytes)):
            table.add_row(f"memory of the process, with Python and torch, {name}", byte_size(amount), "")
    else:
        for name, pair in _grouped(summary.memory_bytes):
            table.add_row(f"memory, allocated, {name}", *map(byte_size, _pair(pair)))
    if summary.beside_torch_bytes:
        most = byte_size(max(summary.beside_torch_bytes))
        table.add_row("memory, CUDA's, communicators' and others', at most", most, "")
    return table


def _pair(pair: Pair) -> tuple[float, float]:
    return pair.measured, pair.predicted


def _grouped(pairs: tuple[Row, ...]) -> list[tuple[str, Row]]:
    return [(f"worker{'s' if '–' in name else ''} {name}", pair) for name, pair in merge_equal_rows(pairs)]


def _grid(rows: Any) -> Any:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row("", *row)
    return grid


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 10 else f"{1000 * seconds:.4g} ms"
