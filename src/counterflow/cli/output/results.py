"""What ``--json`` prints: one model a command. ``docs/json.md`` is this file as a page.

Invariant: a command prints what its model says and nothing else; ``format`` changes when a key goes or
changes its meaning. Times are in seconds and end in ``_seconds``, sizes in bytes and end in ``_bytes``; what
the simulator plays is in its ``time_unit``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from counterflow.planning.comparison_report import ComparedShown, ComparisonShown, LeftOut
from counterflow.planning.report import PLAN_PARTS, Planned
from counterflow.schedule.ir import Op, Schedule
from counterflow.shown import Options, Part, Result, said
from counterflow.simulation import Simulation
from counterflow.synthesis import Synthesis

from .console import unit_of

Number = int | float


class OpShown(Part):
    """An op."""

    kind: Annotated[str, said("F forward, B backward, I input gradient, W weight gradients")]
    stage: Annotated[int, said("from 0")]
    pipe: Annotated[int, said("from 0")]
    micro_batches: Annotated[list[int], said("those it works on together, from 0")]
    part: Annotated[int, said("which of `parts`, from 0")]
    parts: Annotated[int, said("in how many shares the work on its micro-batch is cut")]
    version: Annotated[int, said("updates that its weights have seen")]


class OpPlayed(OpShown):
    """An op as it ran, in `time_unit`."""

    worker: int
    start: float
    end: float


class SyncPlayed(Part):
    """A gradient sync as it ran beside a worker, in `time_unit`."""

    worker: int
    stage: int
    period: int
    start: float
    end: float


class MessagePlayed(Part):
    """A message on its link, in `time_unit`."""

    sender: Annotated[int, said("a worker")]
    receiver: Annotated[int, said("a worker")]
    start: float
    end: float
    maker: Annotated[OpShown, said("whose product it carries")]
    taker: Annotated[OpShown, said("what needs it")]


class BubblesShown(Part):
    """A worker's idle time by cause, in `time_unit`; together they are its `idle`."""

    warm_up: Annotated[float, said("before its first op")]
    dependency: Annotated[float, said("while what its next op takes is not made yet")]
    message: Annotated[float, said("while it is made and has not come yet")]
    drain: Annotated[float, said("after its last op")]


class _Scheduled(Result):
    scheme: Annotated[str, said("its scheme")]
    options: Annotated[Options, said("the scheme's options")]
    workers: Annotated[int, said("of one pipeline group")]


class Simulated(_Scheduled):
    """`counterflow simulate`."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, said("of one update")]
    costs: Annotated[
        dict[str, Any], said("forward, backward, p2p, and what else was given, by the flags' names")
    ]
    time_unit: Annotated[Literal["s", "F"], said("s: seconds; F: times of a forward, where none were given")]
    makespan: Annotated[float, said("until the last op, sync and agreement have ended")]
    steady_step: Annotated[
        float | None,
        said("what a step adds when steps follow each other without a barrier; null: too few periods to see"),
    ]
    steady_step_clipped: Annotated[
        float | None, said("the same where updates wait for the gradient norm of all stages")
    ]
    bubble_ratio: Annotated[float, said("idle time over makespan, mean of the workers")]
    busy: Annotated[list[float], said("by worker: time it computes")]
    idle: Annotated[list[float], said("by worker: time it has no op to run")]
    bubbles: Annotated[list[BubblesShown], said("by worker: its idle time by cause")]
    spans: Annotated[list[float], said("by worker: first start to last end")]
    peak_activations: Annotated[list[Number], said("by worker: most forwards stashed at once")]
    weight_copies: Annotated[list[int], said("by worker: stages held, versions counted")]
    steady_bubble_ratio: Annotated[
        float | None, said("without a flush: after the warm-up, before the drain; null: no such part")
    ]
    peak_bytes: Annotated[list[Number], said("by worker; if bytes were given")] = Field(default_factory=list)
    ops: Annotated[list[OpPlayed], said("with `--timeline`")] = Field(default_factory=list)
    gradient_syncs: Annotated[list[SyncPlayed], said("with `--timeline`")] = Field(default_factory=list)
    messages: Annotated[list[MessagePlayed], said("with `--messages`")] = Field(default_factory=list)


class Synthesized(_Scheduled):
    """`counterflow synthesize`."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, said("of one update")]
    time_unit: Annotated[Literal["s", "F"], said("s: seconds; F: times of a forward, where none were given")]
    objective: Annotated[str, said("what was made small: `makespan` or `steady`")]
    makespan: Annotated[float, said("until the last op, sync and agreement have ended")]
    steady: Annotated[float, said("what a step adds when steps follow each other without a barrier")]
    lower_bound: Annotated[float, said("of the objective: no order within the limits takes less")]
    reason: Annotated[str, said("why the bound holds, for people")]
    gap: Annotated[float, said("share of the objective that could be saved at most")]
    proved: Annotated[bool, said("whether no order is better")]
    method: Annotated[str, said("what found the order")]
    named: Annotated[str | None, said("the best named scheme of this workload within the limits; null: none")]
    named_value: Annotated[float | None, said("its objective")]
    gain: Annotated[float | None, said("share of it that was saved")]
    peak: Annotated[list[Number], said("by worker: most forwards stashed at once")]
    idle: Annotated[list[float], said("by worker: time it has no op to run")]
    stopped: Annotated[bool, said("whether it was interrupted")]


class Rule(Part):
    """A rule's verdict."""

    rule: str
    ok: Annotated[bool | None, said("null: it could not be looked at, because another is broken")]
    detail: Annotated[str, said("the reason, for people")]


class Checked(_Scheduled):
    """`counterflow check`."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, said("of one update")]
    op_count: Annotated[int, said("ops of all workers")]
    ok: Annotated[bool, said("whether all rules hold")]
    rules: list[Rule]


class Verified(_Scheduled):
    """`counterflow verify`: largest relative errors. Its `workers` are those of all replicas."""

    loss_error: float
    norm_error: Annotated[float, said("of the gradients' global norm")]
    gradient_error: float
    weight_error: float
    tolerance: Annotated[float, said("what each error must not exceed")]
    ok: bool


class OptionShown(Part):
    """An option of a scheme."""

    name: str
    legal: Annotated[str, said("its range, for people")]
    required: bool
    default: int | str | bool | None
    help: str


class SchemeShown(Part):
    """A scheme."""

    name: str
    aliases: list[str]
    summary: str
    source: Annotated[str, said("who published it")]
    synchronous: Annotated[bool, said("whether a flush comes before each update")]
    directions: str
    options: list[OptionShown]


class Schemes(Result):
    """`counterflow schemes`."""

    schemes: list[SchemeShown]


class ExampleShown(Part):
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


class Measured(Part):
    """A figure as measured, and as predicted from the stages' measured costs."""

    measured: float
    predicted: float


class Prepared(Result):
    """`counterflow train --dry-run`."""

    model: Annotated[str, said("its architecture and shape, for people")]
    parameters: int
    text: Annotated[str, said("what it was trained on")]
    text_bytes: int
    unigram_entropy: Annotated[float, said("loss of knowing only how frequent tokens are")]
    scheme: str
    options: Options
    workers: Annotated[int, said("of a pipeline group")]
    replicas: int
    pipes: int
    stage_layers: Annotated[list[tuple[int, int]], said("first and last layer of each stage")]
    micro_batches: Annotated[int, said("of a replica's mini-batch")]
    samples: Annotated[int, said("of a mini-batch, of all replicas")]
    positions: Annotated[int, said("tokens of a sample")]
    steps: Annotated[int, said("updates made in total; before a run, those it would make")]
    first_step: Annotated[int, said("updates made by the run that this one resumed")]
    resumed: Annotated[str | None, said("the checkpoint that it went on from")]
    changed: Annotated[list[str], said("keys with other values than when that was written, with both")]
    workers_here: int
    cores: int
    on_cpu: bool
    unit: Annotated[str, said("what a token is: `byte`, or `token` of a tokenizer")]
    target: Annotated[str, said("what the model is to tell: `byte`, `token` or `label`")]
    where: Annotated[str, said("where workers compute, and what carries their messages")]
    folder: Annotated[str, said("of the results")]


class Trained(Prepared):
    """`counterflow train`."""

    stopped: Annotated[bool, said("whether it was ended before all steps were made")]
    seconds: float
    samples_per_second: float
    planned_samples_per_second: float | None
    training_loss: float
    training_steps: Annotated[int, said("the last steps, over which `training_loss` is the mean")]
    validation_loss: float
    timed_together: Annotated[int, said("steps that were timed as one")]
    sampled_steps: list[int]
    step_seconds: float
    ops_seconds: Measured
    bubble_ratio: Measured
    saved_bytes: Annotated[list[Measured], said("by worker: most saved for backward at once")]
    stages_held: Annotated[list[Measured], said("by worker: most weights held at once")]
    memory_bytes: Annotated[
        list[Measured], said("by worker: most allocated by torch on its GPU, or resident of its process")
    ]
    beside_torch_bytes: Annotated[
        list[float],
        said("by worker: used of its GPU beside that, by CUDA, communicators and others; empty on the CPU"),
    ]


class KeyShown(Part):
    """A key of a config."""

    key: Annotated[str, said("with its section: `train.steps`")]
    default: Annotated[Any, said("null where another key or the data decides")]
    about: Annotated[str, said("what it means")]
    legal: Annotated[str, said("what it may be")]


class Keys(Result):
    """`counterflow train --keys`."""

    keys: list[KeyShown]


class ConvertedShown(Result):
    """`counterflow convert`."""

    path: Annotated[str, said("what was made")]
    kind: Annotated[str, said("what that is, for people")]
    tensors: int
    bytes: Annotated[int, said("of the file of weights")]


class FindingShown(Part):
    """What `counterflow doctor` found of one thing."""

    about: Annotated[str, said("what was looked at")]
    found: Annotated[str, said("what there is, in words")]
    ok: Annotated[bool | None, said("whether that will do; null: it is only told")]
    advice: Annotated[str, said("what to do about it; empty if nothing")]


class Doctor(Result):
    """`counterflow doctor`."""

    version: Annotated[str, said("of Counterflow")]
    ok: Annotated[bool, said("whether nothing is wrong")]
    findings: list[FindingShown]


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
    rows: Annotated[list[dict[str, Any]], said("formula, value, measured (least and most over the workers)")]
    notes: dict[str, str]


class FigureShown(Result):
    """`counterflow reproduce FIGURE`."""

    name: str
    title: str
    setting: str
    assumptions: list[str]
    tolerance: float
    subject: Annotated[str, said("the scheme whose ratios over the others are shown")]
    rows: Annotated[list[dict[str, Any]], said("published, predicted, difference")]
    schemes: Annotated[
        list[dict[str, Any]], said("by scheme and run: the best plan found, and the one stated")
    ]
    constants: dict[str, str]
    summary: str


COMMANDS: tuple[type[Result], ...] = (
    *(
        Simulated,
        Synthesized,
        ComparisonShown,
        Checked,
        Verified,
        Schemes,
        Planned,
        Examples,
        Profiled,
        Trained,
    ),
    *(Prepared, Keys, ConvertedShown, Doctor),
    *(Reproducible, TableShown, FigureShown),
)
PARTS: tuple[type[BaseModel], ...] = (
    *(OpShown, OpPlayed, SyncPlayed, MessagePlayed, BubblesShown, Rule, SchemeShown, OptionShown),
    *PLAN_PARTS,
    *(ComparedShown, LeftOut),
    *(ExampleShown, Measured, KeyShown, FindingShown),
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
        more["ops"] = [
            OpPlayed(**_op(s.op), worker=s.worker, start=s.start, end=s.end) for s in result.timeline
        ]
        if result.syncs:
            more["gradient_syncs"] = [
                SyncPlayed(worker=s.worker, stage=s.stage, period=s.period, start=s.start, end=s.end)
                for s in result.syncs
            ]
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


def synthesized(found: Synthesis) -> Synthesized:
    """The result of a computed order."""
    name, value = found.named or (None, None)
    return Synthesized(
        **of_schedule(found.schedule),
        time_unit="F" if unit_of(found.simulation) == "F" else "s",
        objective=found.objective.value,
        makespan=found.makespan,
        steady=found.steady,
        lower_bound=found.lower_bound,
        reason=found.bound.reason,
        gap=found.gap,
        proved=found.proved,
        method=found.method,
        named=name,
        named_value=value,
        gain=found.gain,
        peak=[exact(peak) for peak in found.peak],
        idle=list(found.idle),
        stopped=found.stopped,
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
