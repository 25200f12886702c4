"""What ``--json`` prints: one model a command. ``docs/json.md`` is this file as a page.

Invariant: a command prints what its model says and nothing else; ``format`` changes when a key goes or
changes its meaning. Times are in seconds and end in ``_seconds``, sizes in bytes and end in ``_bytes``; what
the simulator plays is in its ``time_unit``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from counterflow.schedule.ir import Op, Schedule
from counterflow.simulate import Simulation

from .console import unit_of

Options = dict[str, bool | int | str]
Number = int | float


def _said(text: str) -> Any:
    return Field(description=text)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Result(_Part):
    """What a command prints. Keys that do not apply are left out."""

    format: Annotated[Literal[1], _said("the version of this form")] = 1


class OpShown(_Part):
    """An op."""

    kind: Annotated[str, _said("F forward, B backward, I input gradient, W weight gradients")]
    stage: Annotated[int, _said("from 0")]
    pipe: Annotated[int, _said("from 0")]
    micro_batches: Annotated[list[int], _said("those it works on together, from 0")]
    part: Annotated[int, _said("which of `parts`, from 0")]
    parts: Annotated[int, _said("in how many shares the work on its micro-batch is cut")]
    version: Annotated[int, _said("updates that its weights have seen")]


class OpPlayed(OpShown):
    """An op as it ran, in `time_unit`."""

    worker: int
    start: float
    end: float


class SyncPlayed(_Part):
    """A gradient sync as it ran beside a worker, in `time_unit`."""

    worker: int
    stage: int
    period: int
    start: float
    end: float


class MessagePlayed(_Part):
    """A message on its link, in `time_unit`."""

    sender: Annotated[int, _said("a worker")]
    receiver: Annotated[int, _said("a worker")]
    start: float
    end: float
    maker: Annotated[OpShown, _said("whose product it carries")]
    taker: Annotated[OpShown, _said("what needs it")]


class BubblesShown(_Part):
    """A worker's idle time by cause, in `time_unit`; together they are its `idle`."""

    warm_up: Annotated[float, _said("before its first op")]
    dependency: Annotated[float, _said("while what its next op takes is not made yet")]
    message: Annotated[float, _said("while it is made and has not come yet")]
    drain: Annotated[float, _said("after its last op")]


class _Scheduled(Result):
    scheme: Annotated[str, _said("its scheme")]
    options: Annotated[Options, _said("the scheme's options")]
    workers: Annotated[int, _said("of one pipeline group")]


class Simulated(_Scheduled):
    """`counterflow simulate`."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, _said("of one update")]
    costs: Annotated[
        dict[str, Any], _said("forward, backward, p2p, and what else was given, by the flags' names")
    ]
    time_unit: Annotated[Literal["s", "F"], _said("s: seconds; F: times of a forward, where none were given")]
    makespan: Annotated[float, _said("until the last op, sync and agreement have ended")]
    steady_step: Annotated[
        float | None,
        _said(
            "what a step adds when steps follow each other without a barrier; null: too few periods to see"
        ),
    ]
    steady_step_clipped: Annotated[
        float | None, _said("the same where updates wait for the gradient norm of all stages")
    ]
    bubble_ratio: Annotated[float, _said("idle time over makespan, mean of the workers")]
    busy: Annotated[list[float], _said("by worker: time it computes")]
    idle: Annotated[list[float], _said("by worker: time it has no op to run")]
    bubbles: Annotated[list[BubblesShown], _said("by worker: its idle time by cause")]
    spans: Annotated[list[float], _said("by worker: first start to last end")]
    peak_activations: Annotated[list[Number], _said("by worker: most forwards stashed at once")]
    weight_copies: Annotated[list[int], _said("by worker: stages held, versions counted")]
    steady_bubble_ratio: Annotated[
        float | None, _said("without a flush: after the warm-up, before the drain; null: no such part")
    ]
    peak_bytes: Annotated[list[Number], _said("by worker; if bytes were given")] = []
    ops: Annotated[list[OpPlayed], _said("with `--timeline`")] = []
    gradient_syncs: Annotated[list[SyncPlayed], _said("with `--timeline`")] = []
    messages: Annotated[list[MessagePlayed], _said("with `--messages`")] = []
    timeline: Annotated[
        list[tuple[int, str, int, int, list[int], float, float]],
        _said(
            "with `--timeline`, the older form of `ops`: worker, kind, pipe, stage, micro-batches, start, end"
        ),
    ] = []
    syncs: Annotated[
        list[tuple[int, int, int, float, float]],
        _said("with `--timeline`, the older form of `gradient_syncs`: worker, stage, period, start, end"),
    ] = []


class Rule(_Part):
    """A rule's verdict."""

    rule: str
    ok: Annotated[bool | None, _said("null: it could not be looked at, because another is broken")]
    detail: Annotated[str, _said("the reason, for people")]


class Checked(_Scheduled):
    """`counterflow check`."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, _said("of one update")]
    op_count: Annotated[int, _said("ops of all workers")]
    ok: Annotated[bool, _said("whether all rules hold")]
    rules: list[Rule]


class Verified(_Scheduled):
    """`counterflow verify`: largest relative errors. Its `workers` are those of all replicas."""

    loss_error: float
    norm_error: Annotated[float, _said("of the gradients' global norm")]
    gradient_error: float
    weight_error: float
    tolerance: Annotated[float, _said("what each error must not exceed")]
    ok: bool


class OptionShown(_Part):
    """An option of a scheme."""

    name: str
    legal: Annotated[str, _said("its range, for people")]
    required: bool
    default: int | str | bool | None
    help: str


class SchemeShown(_Part):
    """A scheme."""

    name: str
    aliases: list[str]
    summary: str
    source: Annotated[str, _said("who published it")]
    synchronous: Annotated[bool, _said("whether a flush comes before each update")]
    directions: str
    options: list[OptionShown]


class Schemes(Result):
    """`counterflow schemes`."""

    schemes: list[SchemeShown]


class Planned(Result):
    """`counterflow plan`."""

    model: Annotated[str, _said("its name")]
    profile: Annotated[str, _said("its name")]
    cluster: Annotated[str, _said("its name")]
    mini_batch: Annotated[int, _said("samples of an update, of all replicas")]
    usable_bytes: Annotated[float, _said("memory of a device without the reserve")]
    best: Annotated[list[dict[str, Any]], _said("the best plans: options, seconds, bytes, notes")]
    schemes: Annotated[list[dict[str, Any]], _said("the best plan of each scheme")]
    rejected: Annotated[list[dict[str, Any]], _said("by scheme: candidates, and what became of them")]
    omitted: Annotated[list[dict[str, str]], _said("parts of the space without a candidate, and why")]
    why: Annotated[dict[str, Any], _said("where the best plan's step goes, and what would change it")]


class ExampleShown(_Part):
    """A paper's run."""

    name: str
    about: str
    mini_batch: int
    source: str


class Examples(Result):
    """`counterflow plan --list`."""

    examples: list[ExampleShown]


class Profiled(Result):
    """`counterflow profile`: what it wrote into the three files."""

    model: dict[str, Any]
    profile: dict[str, Any]
    cluster: dict[str, Any]


class Measured(_Part):
    """A figure as measured, and as predicted from the stages' measured costs."""

    measured: float
    predicted: float


class Trained(Result):
    """`counterflow train`."""

    model: Annotated[str, _said("its architecture and shape, for people")]
    parameters: int
    text: Annotated[str, _said("what it was trained on")]
    text_bytes: int
    unigram_entropy: Annotated[float, _said("loss of knowing only how frequent bytes are")]
    scheme: str
    options: Options
    workers: Annotated[int, _said("of a pipeline group")]
    replicas: int
    pipes: int
    stage_layers: Annotated[list[tuple[int, int]], _said("first and last layer of each stage")]
    micro_batches: Annotated[int, _said("of a replica's mini-batch")]
    samples: Annotated[int, _said("of a mini-batch, of all replicas")]
    positions: Annotated[int, _said("tokens of a sample")]
    steps: Annotated[int, _said("updates made in total")]
    first_step: Annotated[int, _said("updates made by the run that this one resumed")]
    workers_here: int
    cores: int
    on_cpu: bool
    stopped: Annotated[bool, _said("whether it was ended before all steps were made")]
    seconds: float
    samples_per_second: float
    planned_samples_per_second: float | None
    training_loss: float
    training_steps: Annotated[int, _said("the last steps, over which `training_loss` is the mean")]
    validation_loss: float
    timed_together: Annotated[int, _said("steps that were timed as one")]
    sampled_steps: list[int]
    step_seconds: float
    ops_seconds: Measured
    bubble_ratio: Measured
    saved_bytes: Annotated[list[Measured], _said("by worker: most saved for backward at once")]
    stages_held: Annotated[list[Measured], _said("by worker: most weights held at once")]
    folder: str


class Reproducible(Result):
    """`counterflow reproduce --list`."""

    tables: list[str]
    figures: list[str]


class TableShown(Result):
    """`counterflow reproduce TABLE`."""

    name: str
    title: str
    setting: str
    columns: list[str]
    rows: Annotated[list[dict[str, Any]], _said("formula, value, measured (least and most over the workers)")]
    notes: dict[str, str]


class FigureShown(Result):
    """`counterflow reproduce FIGURE`."""

    name: str
    title: str
    setting: str
    assumptions: list[str]
    tolerance: float
    subject: Annotated[str, _said("the scheme whose ratios over the others are shown")]
    rows: Annotated[list[dict[str, Any]], _said("published, predicted, difference")]
    schemes: Annotated[
        list[dict[str, Any]], _said("by scheme and run: the best plan found, and the one stated")
    ]
    constants: dict[str, str]
    summary: str


COMMANDS: tuple[type[Result], ...] = (
    *(Simulated, Checked, Verified, Schemes, Planned, Examples, Profiled, Trained),
    *(Reproducible, TableShown, FigureShown),
)
PARTS: tuple[type[BaseModel], ...] = (
    *(OpShown, OpPlayed, SyncPlayed, MessagePlayed, BubblesShown, Rule, SchemeShown, OptionShown),
    *(ExampleShown, Measured),
)


def page_sections() -> list[str]:
    """The tables of ``docs/json.md``, one a model: each key with what it means."""
    sections = []
    for model in (*COMMANDS, *PARTS):
        lines = [f"### {' '.join((model.__doc__ or '').split())}", "", "| key | meaning |", "|---|---|"]
        for name, field in model.model_fields.items():
            lines.append(f"| `{name}` | {field.description or name.replace('_', ' ')} |")
        sections.append("\n".join(lines))
    return sections


def simulated(result: Simulation, costs: dict[str, Any], *, timeline: bool, messages: bool) -> Simulated:
    """The result of a simulation; ``costs`` are those to be shown."""
    schedule = result.schedule
    more: dict[str, Any] = {}
    if result.memory is not None:
        more["peak_bytes"] = [exact(use.peak) for use in result.memory]
    if timeline:
        spans = result.timeline
        more["ops"] = [OpPlayed(**_op(s.op), worker=s.worker, start=s.start, end=s.end) for s in spans]
        more["timeline"] = [
            (s.worker, s.op.kind.value, s.op.pipe, s.op.stage, list(s.op.micro_batches), s.start, s.end)
            for s in spans
        ]
        if result.syncs:
            more["gradient_syncs"] = [
                SyncPlayed(worker=s.worker, stage=s.stage, period=s.period, start=s.start, end=s.end)
                for s in result.syncs
            ]
            more["syncs"] = [(s.worker, s.stage, s.period, s.start, s.end) for s in result.syncs]
    if messages:
        more["messages"] = [
            MessagePlayed(
                sender=m.sender,
                receiver=m.receiver,
                start=m.start,
                end=m.end,
                maker=OpShown(**_op(m.maker)),
                taker=OpShown(**_op(m.taker)),
            )
            for m in result.messages
        ]
    return Simulated(
        **of_schedule(schedule),
        costs=costs,
        time_unit="F" if unit_of(result) == "F" else "s",
        makespan=result.makespan,
        steady_step=result.steady_step,
        steady_step_clipped=result.steady_step_clipped,
        bubble_ratio=result.bubble_ratio,
        busy=list(result.busy),
        idle=list(result.idle),
        bubbles=[
            BubblesShown(warm_up=b.warm_up, dependency=b.dependency, message=b.message, drain=b.drain)
            for b in result.bubbles
        ],
        spans=list(result.spans),
        peak_activations=[exact(peak) for peak in result.peak_activations],
        weight_copies=list(result.weight_copies),
        steady_bubble_ratio=result.steady_bubble_ratio,
        **more,
    )


def of_schedule(schedule: Schedule) -> dict[str, Any]:
    """What names a schedule."""
    return {
        "scheme": schedule.scheme,
        "options": dict(schedule.options),
        "workers": schedule.workers,
        "stages": schedule.stages,
        "pipes": schedule.pipes,
        "micro_batches": schedule.micro_batches,
    }


def _op(op: Op) -> dict[str, Any]:
    return {
        "kind": op.kind.value,
        "stage": op.stage,
        "pipe": op.pipe,
        "micro_batches": list(op.micro_batches),
        "part": op.part,
        "parts": op.parts,
        "version": op.version,
    }


def exact(value: float) -> Number:
    """A count as JSON should show it: 5 rather than 5.0, but 2.5 as it is."""
    return int(value) if float(value).is_integer() else value
