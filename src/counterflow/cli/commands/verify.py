"""``counterflow verify``: compare the pipeline with one process, on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from counterflow.common.cli_fields import cli_field
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.runtime.transport.kinds import kind_of, kinds
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.testing import STRICT_LOCAL

from ..options.flags import JsonFlag, OptionRecord, SchemeOptions, SubjectArgument
from ..options.subject_argument import schedule_of
from ..output.console import WIDE, console, heading, note, print_json, table_of
from ..output.search_bar import search_bar

if TYPE_CHECKING:
    from counterflow.verification.training_agreement import StepProgress, TrainingAgreement


class Dtype(Enum):
    """Precisions in which numbers can be compared."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class LowerPrecision(Enum):
    """Options of a Pipeline by which layers compute in a lower precision."""

    AUTOCAST = "autocast"
    COMPUTE_DTYPE = "compute-dtype"


class Sums(Enum):
    """Forms in which gradients are summed, beside float32."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"


TransportName = StrEnum("TransportName", {kind.name: kind.name for kind in kinds()})  # type: ignore[misc]
"""What carries the workers' messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(OptionRecord):
    """Options of the pipeline's run."""

    panel: ClassVar[str] = "Run"

    replicas: int = cli_field(1, "W: copies of the pipeline group.", least=1)
    recompute: Recompute = cli_field(Recompute.NONE, "What each backward recomputes.")
    sync: Sync = cli_field(Sync.EAGER_OPT, "When gradients of copies are summed.", name="sync_mode")
    barrier: bool = cli_field(
        True,
        "End each step on all workers before the next begins; without a barrier nothing is clipped.",
    )
    transport: TransportName = cli_field(
        TransportName(STRICT_LOCAL.name), "; ".join(f"{kind}: {kind.about}" for kind in kinds()) + "."
    )
    gradient_compression: Sums | None = cli_field(
        None,
        "Sum gradients in this form in the pipeline; one process sums in float32, so errors of the form are "
        "accepted: 5 % for bfloat16, 40 % for int8.",
    )
    dtype: Dtype | None = cli_field(
        None,
        "Precision of weights. Default float64; with --bfloat16, --float16 or --gradient-compression "
        "float32.",
    )
    bfloat16: LowerPrecision | None = cli_field(
        None, "Compute layers in bfloat16, in one process too, by one of these two options of a Pipeline."
    )
    float16: LowerPrecision | None = cli_field(
        None,
        "Compute layers in float16, with losses scaled by torch's GradScaler in one process. One of the same "
        "two options.",
    )
    steps: int | None = cli_field(
        None,
        "Updates to compare. Default 3; asynchronous: 3 more than the warm-up, and a flush before the "
        "last 2.",
        least=1,
        most=1000,
    )
    seed: int = cli_field(0, "Seed of weights, data and dropout.")

    @property
    def lower(self) -> tuple[str, LowerPrecision] | None:
        """The lower precision in which layers compute, and how; None: that of the weights.

        Raises:
            ConfigError: two are given.
        """
        precisions = [
            (name, how) for name in ("bfloat16", "float16") if (how := getattr(self, name)) is not None
        ]
        if len(precisions) > 1:
            raise ConfigError("--bfloat16 and --float16: layers compute in one precision; give one of them")
        return precisions[0] if precisions else None

    @property
    def weights(self) -> Dtype:
        """The precision of weights.

        Raises:
            ConfigError: the precision cannot be combined with that of the layers.
        """
        if self.lower is not None and self.dtype is Dtype.FLOAT64:
            raise ConfigError(f"--{self.lower[0]} needs weights in float32; leave out --dtype float64")
        if self.gradient_compression is not None and self.dtype is Dtype.FLOAT64:
            raise ConfigError(
                "--gradient-compression: gradients in float64 are summed in full; leave out --dtype float64"
            )
        plain = self.lower is None and self.gradient_compression is None
        return self.dtype or (Dtype.FLOAT64 if plain else Dtype.FLOAT32)

    def compared(self, schedule: Schedule, steps: int, progress: StepProgress) -> TrainingAgreement:
        """Train with both for a number of updates, and measure how far their numbers differ."""
        from counterflow.training.trial import small_trial

        options: dict[str, Any] = {} if self.barrier else {"barrier": False, "clip_norm": None}
        if self.gradient_compression is not None:
            options["gradient_compression"] = self.gradient_compression.value
        tied: bool | None = None
        if self.lower is not None:
            name, how = self.lower
            options[how.value.replace("-", "_")] = name
            if schedule.stages == 1:
                tied = False  # one cast of a weight would round the sum of both its uses' gradients
        trial = small_trial(
            schedule,
            replicas=self.replicas,
            steps=steps,
            seed=self.seed,
            dtype=self.weights.value,
            tied=tied,
        )
        return trial.verify(
            transport=self.transport.value,
            flush_after=() if schedule.synchronous else (steps - 3,),
            seed=self.seed,
            recompute=self.recompute,
            sync=self.sync,
            progress=progress,
            **options,
        )


def verify(
    *, subject: SubjectArgument, options: SchemeOptions, running: Running, as_json: JsonFlag = False
) -> None:
    """Train a small model with one process and with the pipeline, and compare the numbers."""
    schedule = schedule_of(subject, options)
    weights = running.weights
    refuse_what_cannot_run(schedule)
    from counterflow.training.trial import updates_compared

    usual = updates_compared(schedule, replicas=running.replicas, sync=running.sync)
    steps = running.steps or usual
    workers = schedule.workers * running.replicas
    if not as_json:
        kind = "threads" if kind_of(running.transport.value).threads else "processes"
        note(
            f"Training with one process, then with {plural(workers, 'worker')} ({kind}), "
            f"{plural(steps, 'update')} each …"
        )
    with search_bar("training") as progress:
        agreement = running.compared(schedule, steps, progress)
    if as_json:
        from counterflow.verification.verification_report import Verified

        print_json(Verified.of(schedule=schedule, workers=workers, ok=agreement.ok, **asdict(agreement)))
    else:
        lower = running.lower
        precision = weights.value if lower is None else f"{lower[0]} by {lower[1].value}"
        _print(schedule, workers, agreement, precision)
    if not agreement.ok:
        raise typer.Exit(1)


def _print(schedule: Schedule, workers: int, agreement: TrainingAgreement, precision: str) -> None:
    from rich.text import Text

    out = console(WIDE)
    out.print(
        Text(
            f"{heading(schedule)}: {plural(workers, 'worker')} against one process, {precision}", style="bold"
        )
    )
    table = table_of("", "largest relative error")
    rows = {
        "loss": agreement.loss_error,
        "gradient norm": agreement.norm_error,
        "gradients": agreement.gradient_error,
        "weights": agreement.weight_error,
    }
    for name, error in rows.items():
        style = "" if error <= agreement.tolerance else "bold red"
        table.add_row(name, Text(f"{error:.1e}", style=style))
    out.print(table)
    if agreement.ok:
        out.print(Text(f"They agree: all errors are within {agreement.tolerance:g}.", style="green"))
    else:
        out.print(Text(f"They differ: errors must be within {agreement.tolerance:g}.", style="bold red"))
