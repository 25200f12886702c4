"""``counterflow profile``: measure a model's layers and this machine's links, for the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterflow.common.number_texts import byte_size
from counterflow.errors import ConfigError

from ..options.flags import JsonFlag
from ..output.console import WIDE, console, note, print_json, table_of, writing

if TYPE_CHECKING:
    from counterflow.measure.model_profile import Measurement
    from counterflow.training import RunConfig


def profile(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBJECT",
            help="Model to measure: CONFIG.toml; FILE.py:FUNCTION, a function that returns model, loss and "
            "(inputs, targets), by default make_model; or a folder of transformers. Default: the built-in "
            "example.",
        ),
    ] = None,
    *,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key of a config; may be repeated."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Samples of a micro-batch to measure. Default 1,2,4,8,16,32."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Workers on this machine. Default: one per GPU, or one per core.", min=1),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Number of measurements, of which the median counts.", min=1)
    ] = 5,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for model.toml, profile.toml and cluster.toml.")
    ] = Path("profile"),
    as_json: JsonFlag = False,
) -> None:
    """Measure layers against micro-batch size, messages and all-reduces, for 'plan' to choose with.

    Of equal layers in a row one is measured, of small ones up to four. Under torchrun all workers measure,
    on all nodes, links between nodes too; the first writes.
    """
    from counterflow.measure.folder_model import ModelFolder
    from counterflow.measure.model_file import ModelFile
    from counterflow.measure.model_profile import SIZES
    from counterflow.runtime.workers.world import rank_info
    from counterflow.training.profiling import Profiled, measure, measure_file

    placed = rank_info()
    first = placed is None or placed.rank == 0
    file: ModelFile | ModelFolder | None = None if subject is None else ModelFile.parse(subject)
    if file is not None and sets:
        raise ConfigError(f"--set {sets[0]}: {subject} has no keys; change the function")
    if subject is not None and Path(subject).is_dir() and not sets:
        file = ModelFolder(Path(subject))
    options: dict[str, Any] = {
        "sizes": SIZES if sizes is None else _numbers(sizes),
        "workers": workers,
        "repeats": repeats,
    }
    with _progress(shown=first and not as_json) as report:
        if file is not None:
            measurement, samples = measure_file(file, **options, progress=report)
        else:
            config = _config(subject, sets or ())
            measurement, samples = measure(config, **options, progress=report), config.train.samples
    if not first:
        return
    with writing(out):
        paths = measurement.save(out)
    if as_json:
        print_json(Profiled.model_validate(measurement))
    else:
        _print(measurement)
    flags = " ".join(f"--{name} {path}" for name, path in paths.items())
    plan = f"counterflow plan {flags} --mini-batch {samples}"
    note(f"Plan with it: {plan}{' --out plan.toml' if file is None else ''}")


def _config(subject: str | None, sets: Sequence[str]) -> RunConfig:
    from counterflow.common import toml
    from counterflow.training import load_config

    if subject is not None and Path(subject).is_dir():
        return load_config(
            None, ['model.kind="huggingface"', f"model.path={toml.dumps(str(Path(subject)))}", *sets]
        )
    return load_config(subject, sets)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes {text}: must be whole numbers separated by commas, as in 1,2,4") from None


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import Progress

    from ..output.screen import Screen

    screen = Screen(stderr=True)
    with Progress(console=screen, transient=True, disable=not (shown and screen.is_terminal)) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"measuring {what}", total=of)
            bar.update(tasks[what], completed=done)

        yield report


def _spread(low: Sequence[float], high: Sequence[float]) -> str:
    return f"{low[0] - 1:+.0%} {high[0] - 1:+.0%}" if low and high else ""


def _print(measured: Measurement) -> None:
    from rich.text import Text

    from counterflow.drawing.time_units import time_unit
    from counterflow.planning.inputs.reliability import unreliable

    def shown(seconds: float) -> str:
        return time_unit(seconds).text(seconds)

    out = console(WIDE)
    out.print(Text(measured.model.name, style="bold"), Text(f"on {measured.profile.machine}"), sep="\n")
    columns = ("layer", "samples", "forward", "backward", "spread", "saved for backward")
    table = table_of(*columns, text_columns=("layer",))
    for kind, layer in measured.profile.layers.items():
        count = measured.model.layers.count(kind)
        for row, size in enumerate(layer.samples):
            table.add_row(
                (f"{kind} × {count}" if count > 1 else kind) if not row else "",
                f"{size:g}",
                shown(layer.forward_seconds[row]),
                shown(layer.backward_seconds[row]),
                _spread(layer.low_factors[row:], layer.high_factors[row:]),
                byte_size(layer.saved_bytes[row]),
            )
    out.print(table)
    links = table_of("", "bytes", "measured", "fitted")
    cluster = measured.cluster
    for travels, link, begins, name in (
        (measured.messages, cluster.inside, 1, "message"),
        (measured.allreduces, cluster.allreduce_inside or cluster.inside, 2, "all-reduce of 2"),
        (measured.between[0], cluster.between, 1, "between nodes"),
        (measured.between[1], cluster.allreduce_between or cluster.between, 2, "all-reduce of 2 nodes"),
    ):
        for row, travel in enumerate(travels):
            fit = begins * link.latency_seconds + link.seconds_per_byte * travel.size_bytes
            links.add_row(
                name if not row else "", byte_size(travel.size_bytes), shown(travel.seconds), shown(fit)
            )
    if measured.messages or measured.between[0]:
        out.print(links)
    out.print(
        f"beside its layers an op takes {shown(measured.profile.op_overhead_seconds)}, "
        f"beside its ops a step {shown(measured.profile.step_overhead_seconds)}"
    )
    memory = byte_size(cluster.memory_bytes)
    out.print(
        (f"{cluster.devices} workers of {memory} each" if cluster.devices > 1 else f"1 worker of {memory}")
        + (f" on {cluster.cores} cores" if cluster.cores else "")
    )
    for some in cluster.kinds:
        out.print(f"{some.name}: layers take {some.slowness:g} times as long as in the profile")
    if (reason := unreliable(measured.profile)) is not None:
        out.print(Text(f"This profile is {reason}", style="bold"))
