"""Predicted against measured step times, over all schemes.

    python benchmarks/prediction.py [--parts gpt emulated] [--depths 4 8] [--turns 15] [--keep]

Claim: the planner's prediction is off by 3 % in the median and 10 % at most.

`gpt`: the GPT example on two workers of this machine over Gloo, one thread and one core each. Layers are
profiled as `counterflow profile` does, every scheme is predicted from that profile by
`counterflow.planning.predict`, with several micro-batch sizes and counts, and trained for some steps.
`emulated`: stages that sleep (`emulated_device.py`) at depth 4 and 8, profiled in steps of gpipe alone, and
predicted likewise.

Profile and steps are taken in turns: each turn times a step of every pipeline that the profile is made of,
then a step of every configuration, in a new order. A machine that others use as well may be quicker in one
minute than in the next by more than what is to be shown; so it is as quick or slow for both. What others do
on it is not what is predicted either: of the steps of each pipeline, those of the profile and those that are
predicted, the quieter half counts, which took least, with its mean. The mean of all is in the table beside
it, and the errors of a profile of all steps against the mean of all are told as well.

The table has every configuration; the picture, measured against predicted. The papers' closed forms stand
beside the prediction where there is one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from emulated_device import (
    BYTES,
    SAMPLES,
    note,
    precise_sleep,
    sleepers,
    timed,
    trivial_loss,
    undisturbed,
)
from kit import RESULTS, arguments, keep, machine_line
from torch import Tensor

import counterflow as cf
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.equal_layers import kinds_of
from counterflow.measure.layer_costs import assembled
from counterflow.measure.layer_times import AtSize, LayerTimer, StepTimer
from counterflow.measure.links import MESSAGES, measure_allreduces, measure_messages
from counterflow.measure.model_profile import profile_of
from counterflow.measure.op_times import WARM_UP_STEPS, OpTimer, OpTimes, least
from counterflow.papers.step_times import planned_closed_form
from counterflow.planning import Cluster, Configuration, LayerProfile, Model, Predictor, Profile
from counterflow.planning.play import Play
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry
from counterflow.schedule.op import B, F
from counterflow.training import load_config
from counterflow.training.job import prepare
from counterflow.training.profiling import subject_of

GOAL_MEDIAN, GOAL_WORST = 0.03, 0.10
QUIETEST = 0.5
"""The share of the steps that count."""
SHARES = QUIETEST, 1.0
KEPT = RESULTS / "prediction.json"
"""Parts that are not run again stay in the table."""


@dataclass(slots=True)
class Row:
    part: str
    name: str
    samples: int
    predicted: float
    closed_form: float | None
    predicted_of_all: float
    """From a profile of all steps, the disturbed ones too."""
    taken: list[float]

    @property
    def measured(self) -> float:
        return statistics.fmean(least(self.taken, QUIETEST, key=float))

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_of_all(self) -> float:
        return self.predicted_of_all / statistics.fmean(self.taken) - 1


def configurations(depth: int, count: int, samples: int) -> Iterator[Configuration]:
    """Every scheme on ``depth`` workers, with ``count`` micro-batches an update."""

    def of(scheme: str, **options: int | str) -> Configuration:
        return Configuration.of(scheme, options, replicas=1, samples=samples)

    yield of("gpipe", stages=depth, micro_batches=count)
    yield of("gpipe", stages=depth, micro_batches=count, groups=2)
    yield of("dapple", stages=depth, micro_batches=count)
    yield of("interleaved", workers=depth, micro_batches=count, chunks=2)
    yield of("gems", stages=depth, micro_batches=count)
    for concat in ("direct", "forward-doubling", "backward-halving"):
        yield of("chimera", stages=depth, micro_batches=count, concat=concat)
    yield of("mixpipe", stages=depth, micro_batches=count, injected=depth)
    yield of("mixpipe", stages=depth, micro_batches=count, injected="max")
    yield of("hanayo", workers=depth, micro_batches=count, waves=1)
    yield of("hanayo", workers=depth, micro_batches=count, waves=2)
    yield of("pipedream-2bw", stages=depth, micro_batches=count)
    yield of("wpipe", workers=depth, micro_batches=count)


def named(configuration: Configuration) -> str:
    options = " ".join(f"{name}={value}" for name, value in configuration.options)
    return f"{configuration.scheme} {options}"


def built(configuration: Configuration) -> cf.Schedule:
    return registry.build(configuration.scheme, dict(configuration.options))


class Contender:
    """A configuration that runs, step by step or, without a flush, some periods at a time."""

    def __init__(self, pipeline: cf.Pipeline, inputs: Any, targets: Any) -> None:
        self.pipeline = pipeline
        self.batch = inputs, targets
        self.taken: list[float] = []

    def warm_up(self, steps: int = WARM_UP_STEPS) -> None:
        for _ in range(steps):
            self.pipeline.step(*self.batch)
        self.pipeline.flush()

    def turn(self, transport: Any) -> None:
        step = partial(self.pipeline.step, *self.batch)
        if self.pipeline.schedule.synchronous:
            self.taken.append(timed(step, transport)[0])
            return
        for _ in range(self.pipeline.counted_steps - self.pipeline.execution.count_memory_steps + 1):
            step()
        begin = time.perf_counter()
        for _ in range(PERIODS):
            step()
        mine = (time.perf_counter() - begin) / PERIODS
        self.pipeline.flush()
        self.taken.append(max(row[0] for row in transport.gather([mine])))


PERIODS = 4
"""Timed together in the steady state of a scheme without a flush."""


def in_turns(timers: Sequence[Any], contenders: Sequence[Contender], turns: int, what: str) -> None:
    """Turns of the timers and of the contenders, after a warm-up of all; all workers call it."""
    transport = current_transport()
    for one in (*timers, *contenders):
        one.warm_up()
    note(transport.rank, f"{what}: {len(timers)} timers and {len(contenders)} contenders are warm")
    order = random.Random(0)  # the same on all workers
    for turn in range(turns):
        gc.collect()
        gc.freeze()
        for timer in timers:
            timer.warm_up(1)  # what another one's step has driven out of the caches
            timer.turn()
        for contender in order.sample(list(contenders), len(contenders)):
            contender.warm_up(1)
            contender.turn(transport)
        note(transport.rank, f"{what}: turn {turn + 1} of {turns}")


# The GPT example

SIZES = (1, 2, 4, 8, 16)


def own_core(rank: int) -> None:
    """Keep this worker on one core, if the system lets: the scheduler may put both on one for a while."""
    with contextlib.suppress(OSError, AttributeError, IndexError):
        core = sorted(os.sched_getaffinity(0))[rank]
        for thread in Path("/proc/self/task").iterdir():  # threads begun later inherit it
            os.sched_setaffinity(int(thread.name), {core})


def gpt_plans() -> list[Configuration]:
    plans = [
        c
        for samples, count in ((2, 4), (4, 4), (4, 8))
        for c in configurations(2, count, samples)
        if dict(c.options).get("injected") != 2 or count == 4
    ]
    return plans + [Configuration.of("pipedream", {"stages": 2}, replicas=1, samples=s) for s in (8, 16)]


def gpt_worker(turns: int) -> tuple[list[tuple[list[AtSize], tuple[float, float]]], Any, Any, list[Any]]:
    """What every worker runs; the timers' results by share of the steps that count."""
    transport = current_transport()
    own_core(transport.rank)
    timers: list[Any] = [LayerTimer(subject_of(prepare(load_config())), size) for size in SIZES]
    steps = StepTimer(subject_of(prepare(load_config())), SIZES[len(SIZES) // 2])
    contenders = []
    for configuration in gpt_plans():
        job = prepare(load_config())  # a pipeline makes the layers it is given
        schedule = built(configuration)
        pipeline = cf.Pipeline(
            job.layers,
            job.bundle.loss,
            schedule,
            optimizer=job.optimizer,
            recompute=configuration.recompute,
            sync=configuration.sync,
            clip_norm=1.0,
            digest_every=0,
        )
        samples = configuration.samples * schedule.micro_batches
        batch = job.bundle.batches.batch(0, samples, replica=0, replicas=1)
        contenders.append(Contender(pipeline, *batch))
    in_turns([*timers, steps], contenders, turns, "gpt")
    messages = measure_messages(transport, MESSAGES, repeats=15)
    sums = measure_allreduces(transport, MESSAGES, repeats=15)
    taken = [(c.taken, c.pipeline.cuts) for c in contenders]
    found = [([timer.result(share) for timer in timers], steps.result(share)) for share in SHARES]
    return found, messages, sums, taken


def gpt(turns: int) -> tuple[list[Row], str]:
    job = prepare(load_config())
    timed_layers, messages, sums, found = cf.launch(
        gpt_worker, turns, workers=2, transport="gloo", threads=1
    )[0]
    profiles = [
        profile_of(
            *(assembled(job.layers, by_size), "this machine", by_size, overheads),
            how=f"measured, mean of {turns}",
            optimizer=job.config.optimizer.name,
        )
        for by_size, overheads in timed_layers
    ]
    link = fitted(messages)
    summing = fitted(sums, begins=2)
    cluster = Cluster("this machine", 1, 2, 1e12, link, link, allreduce_inside=summing, cores=2)
    model = Model("gpt", tuple(kinds_of(job.layers)), optimizer_states=2.0)
    rows = []
    for configuration, (taken, cuts) in zip(gpt_plans(), found, strict=True):
        plays = [Predictor(model, p, cluster).play(replace(configuration, cuts=cuts)) for p in profiles]
        rows.append(row("gpt D=2", plays, taken))
    profile = profiles[0]
    return rows, (
        f"# gpt: an op takes {profile.op_overhead_seconds * 1e6:.0f} µs beside its layers, a step "
        f"{profile.step_overhead_seconds * 1e3:.2f} ms beside its ops; a message "
        f"{link.latency_seconds * 1e6:.0f} µs and {link.seconds_per_byte * 1e9:.2f} ns a byte"
    )


def row(part: str, plays: Sequence[Play], taken: list[float]) -> Row:
    """A line of the table; the predictions by share of the steps that count."""
    prediction, of_all = (play.prediction() for play in plays)
    closed = planned_closed_form(plays[0])
    return Row(
        part,
        named(prediction.configuration),
        prediction.configuration.samples,
        prediction.step_seconds,
        closed.seconds if closed else None,
        of_all.step_seconds,
        taken,
    )


# Emulated devices


PARTS = (0.5, 1, 2)
"""Sizes of a micro-batch that sleeping stages are profiled at, in those that they run with."""


def sleeping(schedule: cf.Schedule) -> cf.Pipeline:
    return cf.Pipeline(
        sleepers(schedule.stages, schedule.workers),
        trivial_loss,
        schedule,
        cuts=range(1, schedule.stages),
        optimizer=sgd,
        digest_every=0,
    )


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def slept(depth: int, payload: str, turns: int) -> tuple[list[dict[int, list[OpTimes]]], Any, Any, list[Any]]:
    """What every worker runs: stages of a whole, half and quarter share at three sizes, and all schemes."""
    torch.set_num_threads(1)
    undisturbed()
    precise_sleep()
    transport = current_transport()
    width = BYTES[payload] // 4 // SAMPLES

    def batch(samples: float) -> tuple[Tensor, Tensor]:
        return torch.empty(int(samples), width), torch.zeros(int(samples))

    count = 2 * depth
    timers = {
        groups: [
            OpTimer(sleeping(cf.schemes.gpipe(depth, 4, groups=groups)), *batch(4 * SAMPLES * part))
            for part in PARTS
        ]
        for groups in (1, 2, 4)
    }
    contenders = [
        Contender(sleeping(built(c)), *batch(count * SAMPLES)) for c in configurations(depth, count, SAMPLES)
    ]
    in_turns([t for of in timers.values() for t in of], contenders, turns, f"emulated D={depth}")
    messages = measure_messages(transport, MESSAGES, repeats=15)
    sums = measure_allreduces(transport, MESSAGES, repeats=9)
    times = [{groups: [t.times(share) for t in of] for groups, of in timers.items()} for share in SHARES]
    return times, messages, sums, [c.taken for c in contenders]


def emulated(depth: int, payload: str, turns: int) -> tuple[list[Row], str]:
    times, messages, sums, found = cf.launch(
        slept, depth, payload, turns, workers=depth, transport="gloo", threads=1
    )[0]
    link = fitted(messages)
    cluster = Cluster("emulated", 1, depth, 1e12, link, link, allreduce_inside=fitted(sums, begins=2))
    profiles = [sleeping_profile(by_groups, payload) for by_groups in times]
    rows = []
    for configuration, taken in zip(configurations(depth, 2 * depth, SAMPLES), found, strict=True):
        stages = built(configuration).stages
        model = Model("sleeping", (f"sleep-{stages // depth}",) * stages, optimizer_states=0.0)
        plays = [Predictor(model, profile, cluster).play(configuration) for profile in profiles]
        rows.append(row(f"emulated D={depth}", plays, taken))
    profile = profiles[0]
    sleep = profile.layer("sleep-1")
    return rows, (
        f"# emulated D={depth}: 20 and 40 ms are {sleep.seconds(F, SAMPLES) * 1e3:.2f} and "
        f"{sleep.seconds(B, SAMPLES) * 1e3:.2f} ms in steps; {profile.op_overhead_seconds * 1e6:.0f} µs "
        f"between two ops, {profile.step_overhead_seconds * 1e3:.2f} ms of a step beside its ops"
    )


def sleeping_profile(times: dict[int, list[OpTimes]], payload: str) -> Profile:
    """The profile of stages that sleep, by the parts of a worker's share that they are."""
    every = [one for of in times.values() for one in of]
    layers = {
        f"sleep-{groups}": LayerProfile(
            tuple(SAMPLES * part for part in PARTS),
            tuple(statistics.median(one.forward) for one in of),
            tuple(statistics.median(one.backward) for one in of),
            (0.0, 0.0, 0.0),
            weights_bytes=4.0,
            output_bytes=BYTES[payload] / SAMPLES,
        )
        for groups, of in times.items()
    }
    return Profile(
        "sleeping",
        "emulated",
        "",
        layers,
        op_overhead_seconds=statistics.median(one.gap_seconds for one in every),
        step_overhead_seconds=statistics.median(one.around_seconds for one in every),
    )


# The report


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| workers | scheme | B | predicted ms | measured ms | least .. most | error | mean of all steps, ms "
        "| closed form ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        closed = f"{r.closed_form * 1e3:.1f}" if r.closed_form is not None else ""
        late = " **over 10 %**" if abs(r.error) > GOAL_WORST else ""
        lines.append(
            f"| {r.part} | {r.name} | {r.samples} | {r.predicted * 1e3:.1f} | {r.measured * 1e3:.1f} "
            f"| {min(r.taken) * 1e3:.1f} .. {max(r.taken) * 1e3:.1f} | {r.error:+.1%}{late} "
            f"| {statistics.fmean(r.taken) * 1e3:.1f} | {closed} |"
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    lines = []
    for part in [*dict.fromkeys(r.part for r in rows), "all"]:
        mine = [r for r in rows if part in {r.part, "all"}]
        errors, of_all = [abs(r.error) for r in mine], [abs(r.error_of_all) for r in mine]
        lines.append(
            f"{part}: {len(mine)} configurations, median error {statistics.median(errors):.1%} "
            f"(goal {GOAL_MEDIAN:.0%}), worst {max(errors):.1%} (goal {GOAL_WORST:.0%}); with the mean of "
            f"all steps in profile and runs {statistics.median(of_all):.1%} and {max(of_all):.1%}"
        )
    return lines


def picture(rows: Sequence[Row]) -> None:
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
    markers = dict(zip(dict.fromkeys(r.part for r in rows), "os^Dv", strict=False))
    for part, marker in markers.items():
        mine = [r for r in rows if r.part == part]
        axes.scatter(
            [r.predicted * 1e3 for r in mine], [r.measured * 1e3 for r in mine], marker=marker, label=part
        )
    low = 0.9e3 * min(min(r.predicted, r.measured) for r in rows)
    high = 1.1e3 * max(max(r.predicted, r.measured) for r in rows)
    axes.plot([low, high], [low, high], color="0.5", linewidth=1)
    axes.fill_between(
        [low, high],
        [0.9 * low, 0.9 * high],
        [1.1 * low, 1.1 * high],
        color="0.9",
        label="within 10 %",
        zorder=0,
    )
    axes.set(xscale="log", yscale="log", xlabel="predicted, ms a step", ylabel="measured, ms a step")
    axes.set_title("Every scheme: predicted and measured")
    axes.legend()
    figure.savefig(RESULTS / "prediction.png", dpi=120)


def main() -> None:
    parser = arguments(__doc__, "prediction.*")
    parser.add_argument("--parts", nargs="+", choices=("gpt", "emulated"), default=["gpt", "emulated"])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8], help="of the emulated part")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    lines = [f"# python benchmarks/prediction.py, {machine_line()}"]
    rows: list[Row] = []
    parts = {"gpt D=2": partial(gpt, options.turns)} if "gpt" in options.parts else {}
    if "emulated" in options.parts:
        for depth in options.depths:
            parts[f"emulated D={depth}"] = partial(emulated, depth, "4KiB", options.turns)
    if options.keep and KEPT.exists():
        kept = json.loads(KEPT.read_text())
        lines += [line for part, line in kept["about"].items() if part not in parts]
        rows += [Row(**r) for r in kept["rows"] if r["part"] not in parts]
    about = {}
    for name, part in parts.items():
        found, about[name] = part()
        rows += found
    lines += about.values()
    lines += ["", *table(rows), "", *verdicts(rows)]
    print("\n".join(lines))
    if options.keep:
        if KEPT.exists():
            about = json.loads(KEPT.read_text())["about"] | about
        keep("prediction", lines)
        KEPT.write_text(json.dumps({"about": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
        picture(rows)


if __name__ == "__main__":
    main()
