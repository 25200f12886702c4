"""``counterflow synthesize``: the best order for a placement, costs and limits, with a bound."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from counterflow.common.cli_fields import cli_field
from counterflow.common.number_texts import byte_size
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.planning.orders import play_one_by_one
from counterflow.planning.play import Play
from counterflow.planning.predict import Predictor
from counterflow.schedule.formats import dumps
from counterflow.schedule.modes import Recompute
from counterflow.schedule.orders.slices import lengths_of, sliced_workload
from counterflow.schedule.scheme import MOST_OPS
from counterflow.schedule.workload import Workload, plain
from counterflow.synthesis import Limit, Objective, Synthesis
from counterflow.synthesis import synthesize as compute

from ..options.flags import CostOptions, JsonFlag, OptionRecord, bytes_of, numbers_of
from ..options.placements import placement_of
from ..options.profile_files import ProfileFiles, refuse_costs
from ..output.console import console, note, number, print_json, writing
from ..output.search_bar import order_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(OptionRecord):
    """Workload to be ordered."""

    panel: ClassVar[str] = "Workload"

    placement: str = cli_field(
        MISSING,
        "straight: stage s on worker s; loop: on s mod workers; vee: down and up again; wave: several of "
        "these; two-way: one pipe down and one up. Or your own: the worker of each stage, 0,1,1,0, with / "
        "between pipes; or a JSON file with such lists, or a schedule.",
        metavar="NAME|TABLE|FILE",
    )
    micro_batches: int = cli_field(MISSING, "Micro-batches of a mini-batch.", metavar="N")
    workers: int | None = cli_field(None, "Number of workers; a table of your own states it.", metavar="P")
    chunks: int | None = cli_field(None, "Stages on each worker, for loop. Default 2.")
    waves: int | None = cli_field(None, "Down-and-up passes, for wave. Default 2.")
    pairs: int | None = cli_field(None, "Pairs of pipes, for two-way. Default 1.")
    split: bool = cli_field(True, "Split each backward into input gradient and weight gradients.")
    slices: str = cli_field(
        "1", "Slices of the sequence of each micro-batch, or their lengths.", metavar="NUMBER|LENGTHS"
    )

    def workload(self) -> Workload:
        """All ops and what each needs.

        Raises:
            ConfigError: the placement does not exist, or there are too many ops.
        """
        placed = placement_of(
            self.placement, self.workers, chunks=self.chunks, waves=self.waves, pairs=self.pairs
        )
        if self.micro_batches < 1:
            raise ConfigError(f"--micro-batches {self.micro_batches}: must be 1 or more")
        slices = int(self.slices) if self.slices.isdecimal() else len(lengths_of(self.slices))
        ops = placed.stages * self.micro_batches * slices * (3 if self.split else 2)
        if ops > MOST_OPS:
            sliced = f" of {slices} slices" if slices > 1 else ""
            raise ConfigError(
                f"{plural(placed.stages, 'stage')} and "
                f"{plural(self.micro_batches, 'micro-batch')}{sliced} are {ops:,} ops, and "
                f"at most {MOST_OPS:,} are ordered; choose smaller numbers"
            )
        workload = plain(placed, self.micro_batches, split=self.split, pipe_of=lambda m: m % placed.pipes)
        return sliced_workload(workload, self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(OptionRecord):
    """Limits on what a worker holds, as texts."""

    panel: ClassVar[str] = "Limits: one number for all workers (4), or one a worker (4,4,3,3)"

    peak: str | None = cli_field(
        None,
        "Maximum activations that a worker stashes, until their weight gradients are computed.",
        metavar="NUMBER",
    )
    memory: str | None = cli_field(
        None, "Maximum bytes of a worker; needs the bytes of stages, or a profile.", metavar="BYTES"
    )

    def read(self) -> tuple[Limit | None, Limit | None]:
        """Maximum activations and maximum bytes; None: no limit.

        Raises:
            ConfigError: a text is not a number.
        """
        return (
            None if self.peak is None else numbers_of("peak", self.peak),
            None if self.memory is None else bytes_of("memory", self.memory),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(OptionRecord):
    """Options of the search for an order."""

    panel: ClassVar[str] = "Search"

    objective: Objective = cli_field(
        Objective.MAKESPAN,
        "makespan: of one step; steady: the time a step adds without a barrier.",
        metavar="NAME",
    )
    seconds: float = cli_field(30.0, "Search time limit, in seconds.", least=0.0)
    moves: int | None = cli_field(
        None,
        "Search budget in moves, instead of --seconds: the same result on every machine.",
        least=0,
    )
    seed: int = cli_field(0, "Seed of the search.", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(ProfileFiles):
    """Files that measured costs are read from."""

    def play(self, workload: Workload, costs: CostOptions) -> Play | None:
        """The measured costs of a model's stages, cut into balanced stages; None if no files are given.

        Raises:
            ConfigError: only some of the files are given, costs are given as well, or a file is damaged.
        """
        if not self.has_values:
            return None
        if workload.slices > 1:
            raise ConfigError(
                f"--slices {workload.slices}: a profile has times of whole micro-batches and halves, none of "
                "slices; give --forward and --backward instead, or leave out --slices"
            )
        inputs = self.read()
        cost_values = costs.set_values()
        replicas, recompute = cost_values.pop("replicas", 1), cost_values.pop("recompute", Recompute.NONE)
        refuse_costs(cost_values)
        return play_one_by_one(
            Predictor(inputs.model, inputs.profile, inputs.cluster),
            workload,
            replicas=replicas,
            samples=inputs.samples,
            recompute=recompute,
        )


def synthesize(
    *,
    work: WorkloadOptions,
    limits: Limits,
    search: SearchOptions,
    costs: CostOptions,
    profiled: ProfileOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the schedule, for check, show, simulate, train and verify.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute the best order for any placement, costs and memory, with a bound on how much better an order
    could be.
    """
    workload = work.workload()
    peak, memory = limits.read()
    played = profiled.play(workload, costs)
    if played is not None and peak is None and memory is None:
        memory = tuple(
            u - room for u, room in zip(played.usable_bytes, played.order_independent_bytes, strict=True)
        )
    with order_bar(None if search.moves is not None else search.seconds) as report:
        result = compute(
            workload,
            costs.of_stages(workload.placement) if played is None else played.costs,
            peak=peak,
            memory_bytes=memory,
            objective=search.objective,
            seconds=search.seconds,
            moves=search.moves,
            seed=search.seed,
            report=report,
        )
    if result.stopped:
        note("Stopped: this is the best so far.")
    if out is not None:
        with writing(out):
            out.write_text(dumps(result.schedule), encoding="utf-8")
    if as_json:
        from counterflow.synthesis.synthesis_report import Synthesized

        print_json(Synthesized.model_validate(result))
        return
    _print(result, work.placement, (peak, memory))
    if out is not None:
        note(f"Wrote {out}; look at it: counterflow show {out}")


def _print(result: Synthesis, placement: str, limits: tuple[Limit | None, Limit | None]) -> None:
    from rich.markup import escape
    from rich.table import Table

    schedule, unit = result.schedule, result.costs.time_unit
    sliced = f" of {schedule.workload.slices} slices" if schedule.workload.slices > 1 else ""
    out = console()
    out.print(
        f"[bold]Order for {plural(schedule.workers, 'worker')}, {plural(schedule.stages, 'stage')} "
        f"({escape(placement)}), "
        f"{plural(schedule.micro_batches, 'micro-batch')}{sliced}[/]"
    )
    peak, memory = limits
    limited = [
        *([f"at most {_limit_text(peak, number)} activations a worker"] if peak is not None else []),
        *([f"at most {_limit_text(memory, byte_size)} a worker"] if memory is not None else []),
    ]
    out.print(f"[dim]{'; '.join(limited) or 'memory without limit'} · objective: {result.objective}[/]")
    table = Table.grid(padding=(0, 2))
    table.add_row("makespan", f"[bold]{number(result.makespan)}[/] {unit}")
    table.add_row("steady step", f"[bold]{number(result.steady)}[/] {unit}  [dim]without a barrier[/]")
    table.add_row(
        "lower bound", f"{number(result.lower_bound)} {unit}  [dim]{escape(result.bound.reason)}[/]"
    )
    gap = "none: no order is better" if result.proved else f"{result.gap:.2%} can be saved at most"
    table.add_row("gap", gap)
    table.add_row("found by", escape(result.method))
    if result.named is None:
        table.add_row("named schemes", "none has this workload within the limits")
    else:
        name, value = result.named
        table.add_row("best scheme", f"{number(value)} {unit}  {escape(name)}; saved: {result.gain or 0:.2%}")
    table.add_row("peak", f"{', '.join(number(p) for p in result.peak)} activations by worker")
    table.add_row("idle", f"{', '.join(number(max(i, 0.0)) for i in result.idle)} {unit} by worker")
    out.print(table)


def _limit_text(limit: Limit, text_of: Any) -> str:
    return (
        str(text_of(limit))
        if isinstance(limit, (int, float))
        else ", ".join(text_of(number) for number in limit)
    )
