"""What late gradients cost: the same training with every scheme without a flush, and with none.

    python benchmarks/convergence.py [--task NAME ...] [--seeds 0 1 2] [--steps N] [--processes 2]
                                     [--quick] [--resume] [--keep] [--draw]

As WPipe section 4.1, Table 2 and Figure 7, on two models that a processor of two cores trains from scratch:
the project's example (a GPT on bytes) with AdamW, and a small ResNeXt on scikit-learn's digits with SGD and
momentum. One device, chimera, wpipe, pipedream-2bw and pipedream see the same mini-batches from the same
first weights, make an update each mini-batch, and have the same optimiser. The pipelines are run, not
emulated: workers are threads, four of them.

Claims, and the command fails where one does not hold: chimera's loss is that of one device at every step,
and that of a scheme without a flush is, in the first steps, that of one process which keeps old weights.
What the curves show beyond that is in docs/convergence.md. ``--keep`` writes benchmarks/results/convergence.*
and the pictures; ``--draw`` makes tables and pictures again from what was kept. Digits need scikit-learn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from kit import arguments, keep, load, machine, machine_line
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import counterflow as cf
from counterflow.capture.estimates import estimated_costs
from counterflow.capture.model_layers import parameter_count
from counterflow.data.text import shipped_text, unigram_entropy
from counterflow.data.text_batches import NextByte
from counterflow.drawing import palette
from counterflow.drawing.saving import SETTINGS, UNDATED
from counterflow.models.gpt import GPTConfig
from counterflow.models.presets import preset
from counterflow.models.resnext import Norm, ResNeXtConfig
from counterflow.schedule.cuts import balance
from counterflow.verification.reference import Reference, Staleness

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PICTURES = HERE.parent / "docs" / "pictures"
IN_FLIGHT = HERE.parent / "runs" / "convergence.jsonl"
"""Trainings as they are done, for ``--resume``."""

WORKERS = 4
MICRO_BATCHES = 4
"""Of a mini-batch, as few as wpipe and pipedream-2bw can have with 4 workers: how many does not matter for
which weights are used."""

TOLERANCE = 1e-3
"""Largest relative difference of two loss curves that are to be one, in float32."""

RECENT = 10
"""Steps whose mean is the loss at the end; curves are drawn as means of as many."""

Evaluation = dict[str, float]
"""What is measured on samples that are not trained on."""


# -- what is trained


@dataclass(frozen=True)
class Task:
    """A model with its data and its optimiser, the same for all methods.

    Attributes:
        title: for tables and pictures.
        config: the model.
        sample: an input of one micro-batch, to cut the model by.
        steps: mini-batches, an update each.
        samples: of a mini-batch.
        evaluate_every: steps after which it is evaluated, which takes a flush.
        data: a seed to a function of the step's number to inputs and targets.
        optimizer: of some parameters.
        rate: a step's number and the number of steps to the share of the learning rate.
        evaluate: of a model.
        score: the name of what is to be compared at the end.
        target: a loss, to tell how many steps it takes to get there.
        dtype: of the weights and all that is computed.
    """

    title: str
    about: str
    config: GPTConfig | ResNeXtConfig
    sample: Callable[[], Tensor]
    steps: int
    samples: int
    evaluate_every: int
    data: Callable[[int], Callable[[int], tuple[Tensor, Tensor]]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rate: Callable[[int, int], float]
    evaluate: Callable[[nn.Module], Evaluation]
    score: str
    target: float
    dtype: torch.dtype = torch.float32

    def layers(self) -> list[nn.Module]:
        """The model without weights; a seed makes them, whatever the stages."""
        with torch.device("meta"):
            return [layer.to(self.dtype) for layer in self.config.build()]

    def cuts(self, stages: int) -> tuple[int, ...]:
        """The layers with which stages begin, balanced by their operations."""
        return tuple(balance(estimated_costs(self.layers(), self.sample()), stages))


def warm_then_cosine(share: float) -> Callable[[int, int], float]:
    """The learning rate rises for a share of the steps, and falls to 0 by a cosine."""

    def rate(step: int, steps: int) -> float:
        warm = max(1, round(share * steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))

    return rate


def next_byte(seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    batches = NextByte(shipped_text(), positions=64, seed=seed)
    return lambda step: batches.batch(step, GPT_SAMPLES)


def evaluated_bytes(model: nn.Module) -> Evaluation:
    config = preset("example").config
    inputs, targets = NextByte(shipped_text(), positions=64).validation(512)
    losses = [
        float(config.loss(model(some), those))
        for some, those in zip(inputs.split(128), targets.split(128), strict=True)
    ]
    return {"validation loss": statistics.fmean(losses)}


def adamw(rate: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """As ``counterflow train``: norms and biases do not decay."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = [
            {"params": [p for p in given if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in given if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.99))

    return make


def sgd(rate: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(list(parameters), lr=rate, momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True)
class Digits:
    """Images [n, 1, 8, 8] from -1 to 1 and their classes."""

    images: Tensor
    classes: Tensor


@cache
def digits() -> tuple[Digits, Digits]:
    """1,437 images to train on and 360 to test on, each class by the same share."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an optional extra
        from sklearn.model_selection import train_test_split  # noqa: PLC0415
    except ImportError:
        sys.exit("the task digits needs scikit-learn: pip install -e '.[study]', or --task gpt")
    found = load_digits()
    rows = train_test_split(range(len(found.target)), test_size=0.2, random_state=0, stratify=found.target)
    images = torch.tensor(found.data / 8.0 - 1.0, dtype=torch.float64).view(-1, 1, 8, 8)
    classes = torch.tensor(found.target)
    train, test = (Digits(images[part], classes[part]) for part in rows)
    return train, test


def shuffled(seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Epochs, each in an order of its own; what fills no mini-batch is left to the next epoch's luck."""
    train, _ = digits()
    epoch_steps = len(train.classes) // DIGITS_SAMPLES

    @cache
    def order(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(len(train.classes), generator=generator)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, epoch_steps)
        chosen = order(epoch)[place * DIGITS_SAMPLES : (place + 1) * DIGITS_SAMPLES]
        return train.images[chosen], train.classes[chosen]

    return batch


def evaluated_digits(model: nn.Module) -> Evaluation:
    _, test = digits()
    logits = model(test.images)
    right = (logits.argmax(dim=1) == test.classes).double().mean()
    return {
        "test accuracy": float(right) * 100,
        "test loss": float(nn.functional.cross_entropy(logits, test.classes)),
    }


GPT_SAMPLES = 32
DIGITS_SAMPLES = 64

EXAMPLE = preset("example").config
assert isinstance(EXAMPLE, GPTConfig)


def gpt(rate: float) -> Task:
    assert isinstance(EXAMPLE, GPTConfig)
    return Task(
        title=f"GPT on bytes, AdamW {rate:g}",
        about=f"the example GPT from scratch, AdamW, largest learning rate {rate:g}",
        config=EXAMPLE,
        sample=lambda: torch.zeros(GPT_SAMPLES // MICRO_BATCHES, EXAMPLE.positions, dtype=torch.int64),
        steps=300,
        samples=GPT_SAMPLES,
        evaluate_every=75,
        data=next_byte,
        optimizer=adamw(rate),
        rate=warm_then_cosine(0.25),
        evaluate=evaluated_bytes,
        score="validation loss",
        target=2.7,
    )


def resnext(rate: float) -> Task:
    # Group normalisation keeps samples apart: pipedream's micro-batch is four times the others', and what a
    # batch normalisation makes of that would look like an effect of late gradients.
    # float64, because rounding makes a ReLU open or close now and then: in float32 one device alone, with its
    # mini-batches cut into other micro-batches, has another loss by 1 % after some 20 steps.
    return Task(
        title=f"ResNeXt-20 on digits, SGD {rate:g}",
        about=f"a ResNeXt of 20 layers from scratch, SGD with momentum 0.9, largest learning rate {rate:g}",
        config=ResNeXtConfig(
            (2, 2, 2),
            groups=8,
            width=2,
            classes=10,
            channels=1,
            planes=8,
            small_images=True,
            norm=Norm.GROUP,
        ),
        sample=lambda: torch.zeros(DIGITS_SAMPLES // MICRO_BATCHES, 1, 8, 8, dtype=torch.float64),
        steps=264,
        samples=DIGITS_SAMPLES,
        evaluate_every=66,
        data=shuffled,
        optimizer=sgd(rate),
        rate=warm_then_cosine(0.05),
        evaluate=evaluated_digits,
        score="test accuracy",
        target=0.2,
        dtype=torch.float64,
    )


TASKS = {
    "gpt": gpt(0.01),
    "gpt-fifth": gpt(0.002),
    "digits": resnext(0.05),
    "digits-fifth": resnext(0.01),
}


# -- how it is trained


@dataclass(frozen=True)
class Method:
    """A way to train; without a schedule it is one device.

    Attributes:
        late: updates by which the gradients are late, in words.
    """

    name: str
    late: str
    schedule: Callable[[], cf.Schedule] | None = None


ALONE = Method("one device", "0")
METHODS = {
    method.name: method
    for method in (
        ALONE,
        Method("chimera", "0", lambda: cf.schemes.chimera(WORKERS, MICRO_BATCHES)),
        Method(
            "wpipe", "1 in the first half, 0 in the second", lambda: cf.schemes.wpipe(WORKERS, MICRO_BATCHES)
        ),
        Method("pipedream-2bw", "1", lambda: cf.schemes.pipedream_2bw(WORKERS, MICRO_BATCHES)),
        # Its period is a micro-batch: with the whole mini-batch as its one micro-batch, every update sees
        # the samples that it sees with the others.
        Method(
            "pipedream", "3, 2, 1, 0 by stage", lambda: cf.schemes.pipedream(WORKERS, periods=3 * WORKERS)
        ),
    )
}
LATE = [name for name, m in METHODS.items() if m.schedule is not None and not m.schedule().synchronous]


@dataclass
class Curve:
    """What came of one training: the loss of each step, and evaluations by the steps made before."""

    task: str
    method: str
    seed: int
    steps: int
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    seconds: float = 0.0

    def final(self, score: str) -> float:
        return self.evaluations[max(self.evaluations)][score]

    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-RECENT:])

    def smooth(self) -> list[float]:
        """By step from number RECENT on: the mean of the last ones."""
        sums = list(itertools.accumulate(self.losses, initial=0.0))
        return [(b - a) / RECENT for a, b in zip(sums, sums[RECENT:], strict=False)]

    def steps_to(self, loss: float) -> int | None:
        """Steps until the mean of the last ones is as low as that."""
        return next((i + RECENT for i, mean in enumerate(self.smooth()) if mean <= loss), None)


@dataclass(frozen=True)
class Job:
    """One training. ``steps`` is how many are made of the ``of`` that the learning rate is reckoned with."""

    task: str
    method: str
    seed: int
    steps: int
    of: int
    emulated: bool = False
    """One process that keeps old weights, in place of the pipeline."""


def scheduler_of(task: Task, steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: task.rate(n, steps))


def evaluated(task: Task, state: dict[str, Tensor]) -> Evaluation:
    """Of a model by its weights, the same computation whatever trained it."""
    model = nn.Sequential(*task.layers()).to_empty(device="cpu")
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return task.evaluate(model)


def due(task: Task, job: Job, made: int) -> bool:
    """Whether to evaluate after so many steps."""
    return made == job.steps or made % task.evaluate_every == 0


def alone(job: Job, tick: Callable[[], None]) -> Curve:
    """Train with one process."""
    task = TASKS[job.task]
    staleness = None
    if job.emulated:
        schedule = METHODS[job.method].schedule
        assert schedule is not None
        built = schedule()
        staleness = Staleness.of(built, task.cuts(built.stages))
    training = Reference(
        task.layers(),
        task.config.loss,
        (1,) * MICRO_BATCHES,
        optimizer=task.optimizer,
        scheduler=scheduler_of(task, job.of),
        seed=job.seed,
        staleness=staleness,
    )
    batch = task.data(job.seed)
    curve = Curve(job.task, job.method, job.seed, job.steps)
    for step in range(job.steps):
        curve.losses.append(training.step([batch(step)]).loss)
        tick()
        if due(task, job, step + 1):
            training.flush()
            curve.evaluations[step + 1] = evaluated(task, training.state_dict())
    return curve


def in_pipeline(job: Job, tick: Callable[[], None]) -> Curve:
    """One worker's part."""
    torch.set_num_threads(1)
    task = TASKS[job.task]
    make = METHODS[job.method].schedule
    assert make is not None
    schedule = make()
    pipeline = cf.Pipeline(
        task.layers(),
        task.config.loss,
        schedule,
        cuts=task.cuts(schedule.stages),
        optimizer=task.optimizer,
        scheduler=scheduler_of(task, job.of),
        seed=job.seed,
        count_memory_steps=0,
    )
    first = pipeline.transport.rank == 0
    batch = task.data(job.seed)
    curve = Curve(job.task, job.method, job.seed, job.steps)
    told = {}
    for step in range(job.steps):
        found = [pipeline.step(*batch(step))]
        if first:
            tick()
        if due(task, job, step + 1):
            found += pipeline.flush()
            state = pipeline.model_state_dict()
            if first:
                curve.evaluations[step + 1] = evaluated(task, state)
        told |= {s.reports_step: s.loss for s in found if s.reports_step is not None}
    assert sorted(told) == list(range(job.steps)), "a step's loss was not told"
    curve.losses = [told[step] for step in range(job.steps)]
    return curve


_ticks: Any = None


def _begin(ticks: Any) -> None:
    global _ticks  # noqa: PLW0603 - how a process pool hands something to its processes
    _ticks = ticks
    torch.set_num_threads(1)


def _tick() -> None:
    if _ticks is not None:
        with _ticks.get_lock():
            _ticks.value += 1


def trained(job: Job) -> Curve:
    """Do one training in this process."""
    began = time.perf_counter()
    if METHODS[job.method].schedule is None or job.emulated:
        curve = alone(job, _tick)
    else:
        curve = cf.launch(in_pipeline, job, _tick, workers=WORKERS, transport="local", threads=1)[0]
    curve.seconds = time.perf_counter() - began
    return curve


def done_before(path: Path) -> dict[Job, Curve]:
    """The trainings a file of lines has."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        job, curve = json.loads(line)
        curve["evaluations"] = {int(step): those for step, those in curve["evaluations"].items()}
        found[Job(**job)] = Curve(**curve)
    return found


def all_trained(jobs: Sequence[Job], processes: int, path: Path) -> list[Curve]:
    """Do all trainings, as many at once as there are processes, with a bar of their steps.

    Each is a line of a file as soon as it is done; one whose line is there is not done again.
    """
    console = Console(stderr=True, highlight=False)
    context = multiprocessing.get_context("spawn")
    found = done_before(path)
    ticks = context.Value("q", sum(job.steps for job in jobs if job in found))
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    with (
        ProcessPoolExecutor(processes, context, _begin, (ticks,)) as pool,
        Progress(TextColumn("{task.description}"), *columns, console=console) as bar,
    ):
        shown_task = bar.add_task("training", total=sum(job.steps for job in jobs))
        waiting: dict[Future[Curve], Job] = {
            pool.submit(trained, job): job for job in jobs if job not in found
        }
        while waiting:
            done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.update(shown_task, completed=ticks.value)
            for future in done:
                job = waiting.pop(future)
                try:
                    found[job] = curve = future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                with path.open("a") as lines:
                    lines.write(json.dumps([vars(job), vars(curve)]) + "\n")
                way = "one process with old weights" if job.emulated else job.method
                way = f"{way} ({job.method})" if job.emulated else way
                last = ", ".join(f"{k} {v:.3f}" for k, v in curve.evaluations[job.steps].items())
                console.print(
                    f"{job.task}, seed {job.seed}, {way}: {job.steps} steps in {curve.seconds:.0f} s, "
                    f"loss {curve.final_loss():.3f}, {last}"
                )
    return [found[job] for job in jobs]


# -- what is told


def largest_difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """The largest relative difference of two curves as far as both go, and its step."""
    pairs = zip(one, other, strict=False)
    return max((abs(a - b) / max(abs(a), 1e-30), step) for step, (a, b) in enumerate(pairs))


def mean_and_spread(values: Sequence[float], digits_: int) -> str:
    """Mean ± standard deviation over the seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits_}f} ± {spread:.{digits_}f}"


def by_method(curves: Iterable[Curve], task: str) -> dict[str, list[Curve]]:
    """Each method's curves of a task by seed, in the order of the methods."""
    rows: dict[str, list[Curve]] = {name: [] for name in METHODS}
    for curve in curves:
        if curve.task == task:
            rows[curve.method].append(curve)
    return {name: sorted(row, key=lambda c: c.seed) for name, row in rows.items() if row}


def table(name: str, rows: dict[str, list[Curve]]) -> list[str]:
    """A task's table."""
    task = TASKS[name]
    accuracy = task.score == "test accuracy"
    lines = [
        f"| method | updates late | {task.score}{', %' if accuracy else ''} | training loss at the end "
        f"| mean loss of all steps | steps to {task.target:g} |",
        "|---|---|---|---|---|---|",
    ]
    base: float | None = None
    for method, row in rows.items():
        reached = [curve.steps_to(task.target) for curve in row]
        there = [float(steps) for steps in reached if steps is not None]
        missed = f"{len(reached) - len(there)} of {len(reached)} seeds never"
        steps = mean_and_spread(there, 0) if there else ""
        if method == ALONE.name and len(there) == len(reached):
            base = statistics.fmean(there)
        elif base is not None and len(there) == len(reached):
            steps += f" ({statistics.fmean(there) / base:.2f}×)"
        steps = ", ".join(part for part in (steps, missed if len(there) < len(reached) else "") if part)
        lines.append(
            f"| {method} | {METHODS[method].late} "
            f"| {mean_and_spread([c.final(task.score) for c in row], 2 if accuracy else 3)} "
            f"| {mean_and_spread([c.final_loss() for c in row], 4 if accuracy else 3)} "
            f"| {mean_and_spread([statistics.fmean(c.losses) for c in row], 3)} | {steps} |"
        )
    return lines


@dataclass(frozen=True)
class Check:
    """Two curves that have to be one."""

    task: str
    what: str
    steps: int
    difference: float
    at_step: int

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCE

    def line(self) -> str:
        about = f"{self.task}: {self.what}, {self.steps} steps: "
        if not self.difference:
            return about + "no loss differs"
        return (
            f"{about}largest relative difference of a loss {self.difference:.1e}, "
            f"in step {self.at_step + 1}{'' if self.ok else ' - TOO LARGE'}"
        )


def checks(curves: Sequence[Curve], emulations: Sequence[Curve]) -> list[Check]:
    """Chimera against one device, and each late scheme against one process with old weights."""
    found = []
    by_place = {(c.task, c.method, c.seed): c for c in curves}
    for curve in curves:
        other = by_place.get((curve.task, ALONE.name, curve.seed))
        if curve.method == "chimera" and other is not None:
            what = f"chimera and one device, seed {curve.seed}"
            found.append(
                Check(curve.task, what, curve.steps, *largest_difference(other.losses, curve.losses))
            )
    for emulated in emulations:
        curve = by_place[emulated.task, emulated.method, emulated.seed]
        what = f"{curve.method} and one process with old weights, seed {curve.seed}"
        difference = largest_difference(emulated.losses, curve.losses)
        found.append(Check(curve.task, what, emulated.steps, *difference))
    return found


# -- pictures

STYLES: dict[str, dict[str, Any]] = {
    "one device": {"color": palette.INK, "linewidth": 1.8, "linestyle": "-"},
    "chimera": {"color": palette.INK, "linewidth": 0, "marker": "o", "markersize": 4.5, "mfc": "white"},
    "wpipe": {"color": palette.hue(0).backward, "linewidth": 1.4, "linestyle": "-", "marker": "^"},
    "pipedream-2bw": {"color": "#d9820a", "linewidth": 1.4, "linestyle": (0, (5, 1.5)), "marker": "s"},
    "pipedream": {
        "color": palette.hue(7).backward,
        "linewidth": 1.4,
        "linestyle": (0, (1, 1)),
        "marker": "D",
    },
}
"""Lines differ by dashes and markers too, for readers without colours."""

MARKERS = 8
"""Of a line."""


def picture(name: str, rows: dict[str, list[Curve]], path: Path) -> None:
    """Two panels: the loss, and how much worse than with one device; bands from the least to the most."""
    task = TASKS[name]
    base = {curve.seed: curve for curve in rows.get(ALONE.name, [])}
    with mpl.rc_context(SETTINGS | {"font.size": 9.0, "axes.edgecolor": palette.FAINT}):
        figure = Figure(figsize=(10.5, 4.3), dpi=160, layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, (method, row) in enumerate(rows.items()):
            style = {"markersize": 4.5, "mec": palette.INK, "mew": 0.6} | STYLES[method]
            smooth = [curve.smooth() for curve in row]
            xs = list(range(RECENT, RECENT + len(smooth[0])))
            apart = max(1, len(xs) // MARKERS)
            marks = (number * apart // len(METHODS), apart)
            left.plot(
                xs, means(smooth), label=method, markevery=marks, zorder=3 + (method == "chimera"), **style
            )
            if method != "chimera":
                left.fill_between(xs, *ends(smooth), color=style["color"], alpha=0.18, linewidth=0)
            if task.score == "test accuracy":
                at = sorted(row[0].evaluations)
                scores = [[curve.evaluations[step][task.score] for step in at] for curve in row]
                low, high = ends(scores)
                middle = means(scores)
                shift = [x + (number - (len(rows) - 1) / 2) * task.evaluate_every / 22 for x in at]
                errors = [
                    [m - a for m, a in zip(middle, low, strict=True)],
                    [b - m for m, b in zip(middle, high, strict=True)],
                ]
                right.errorbar(shift, middle, yerr=errors, capsize=2.5, elinewidth=0.9, zorder=3, **style)
            elif base:
                if method == ALONE.name:
                    right.axhline(0.0, **STYLES[method])
                    continue
                excess = [
                    [a - b for a, b in zip(curve.smooth(), base[curve.seed].smooth(), strict=True)]
                    for curve in row
                ]
                right.plot(xs, means(excess), markevery=marks, zorder=3 + (method == "chimera"), **style)
                if method != "chimera":
                    right.fill_between(xs, *ends(excess), color=style["color"], alpha=0.18, linewidth=0)
        left.set_title(f"{task.title}: training loss (mean of {RECENT} steps)", loc="left", fontsize=9.5)
        left.set_xlabel("updates")
        left.set_ylabel("cross-entropy, nats")
        right.set_xlabel("updates")
        if task.score == "test accuracy":
            left.set_yscale("log")
            right.set_title("accuracy on held-out images", loc="left", fontsize=9.5)
            right.set_ylabel("test accuracy, %")
        else:
            right.set_title("loss above that of one device, same seed", loc="left", fontsize=9.5)
            right.set_ylabel("nats")
        for axes in (left, right):
            axes.grid(color="#e5e7eb", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(0, None)
        if task.score != "test accuracy":
            entropy = unigram_entropy(shipped_text())
            left.axhline(entropy, color=palette.FAINT, linewidth=0.8, linestyle=(0, (2, 3)))
            left.text(
                task.steps,
                entropy,
                "unigram entropy",
                color=palette.FAINT,
                fontsize=8,
                ha="right",
                va="bottom",
            )
        seeds = len(next(iter(rows.values())))
        (where, place, ways) = (
            (right, "lower right", "band, bar") if task.score == "test accuracy" else (left, "best", "band")
        )
        handles, labels = left.get_legend_handles_labels()
        title = f"mean of {seeds} seeds; {ways}: least to most"
        where.legend(handles, labels, loc=place, frameon=False, title=title, alignment="left")
        PICTURES.mkdir(exist_ok=True)
        figure.savefig(path, metadata=UNDATED["png"])


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def ends(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    columns = list(zip(*rows, strict=True))
    return [min(values) for values in columns], [max(values) for values in columns]


# -- keeping


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def as_data(curve: Curve) -> dict[str, Any]:
    evaluations = {
        str(step): {name: rounded(value) for name, value in found.items()}
        for step, found in curve.evaluations.items()
    }
    return {
        "task": curve.task,
        "method": curve.method,
        "seed": curve.seed,
        "seconds": round(curve.seconds, 1),
        "evaluations": evaluations,
        "losses": [rounded(loss) for loss in curve.losses],
    }


def from_data(data: dict[str, Any]) -> Curve:
    evaluations = {int(step): found for step, found in data["evaluations"].items()}
    losses = data["losses"]
    return Curve(
        data["task"], data["method"], data["seed"], len(losses), losses, evaluations, data["seconds"]
    )


def heading(name: str) -> str:
    task = TASKS[name]
    return f"## {name}: {task.about}"


def report(kept: dict[str, Any]) -> list[str]:
    """All tables."""
    curves = [from_data(data) for data in kept["curves"]]
    # Without the load: what is told here does not depend on how busy the machine was.
    lines = [f"# {kept['command']}, {machine_line(kept['machine']).partition(', load before')[0]}"]
    for name in (name for name in TASKS if any(curve.task == name for curve in curves)):
        task, rows = TASKS[name], by_method(curves, name)
        count = parameter_count(task.layers())
        first = next(iter(rows.values()))
        lines += [
            "",
            heading(name),
            "",
            f"{count:,} parameters; {first[0].steps} updates of {task.samples} samples, "
            f"{len(first)} seeds, mean ± standard deviation; evaluated every {task.evaluate_every} updates",
            "",
            *table(name, rows),
        ]
    lines += ["", "## Curves that have to be one", ""]
    lines += [Check(**data).line() for data in kept["checks"]]
    minutes = kept["seconds"] / 60
    at_once = kept["processes"]
    lines += ["", f"The trainings took {minutes:.0f} minutes in all, {at_once} of them at once."]
    return lines


def written(kept: dict[str, Any]) -> str:
    """As JSON, a curve a line."""
    head = {name: value for name, value in kept.items() if name != "curves"}
    text = json.dumps(head, indent=1)
    curves = ",\n".join(json.dumps(curve, separators=(",", ":")) for curve in kept["curves"])
    return f'{text[:-2]},\n "curves": [\n{curves}\n ]\n}}\n'


def draw_all(kept: dict[str, Any], folder: Path) -> list[Path]:
    curves = [from_data(data) for data in kept["curves"]]
    paths = []
    for name in dict.fromkeys(curve.task for curve in curves):
        paths.append(folder / f"convergence-{name}.png")
        picture(name, by_method(curves, name), paths[-1])
    return paths


def planned(options: argparse.Namespace) -> list[Job]:
    """The trainings, and those of one process with old weights that they are checked by."""
    jobs = []
    for name in options.task:
        steps = options.steps or (20 if options.quick else TASKS[name].steps)
        for seed, method in itertools.product(options.seeds, METHODS):
            jobs.append(Job(name, method, seed, steps, steps))
        short = min(steps, options.check_steps)
        if short:
            jobs += [Job(name, m, options.seeds[0], short, steps, emulated=True) for m in LATE]
    return jobs


def main() -> None:
    parser = arguments(__doc__, "convergence.*")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="updates; as the task says where not given")
    parser.add_argument("--check-steps", type=int, default=50, help="compared with one process; 0: none")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at once")
    parser.add_argument("--resume", action="store_true", help="do not repeat what an ended run has done")
    parser.add_argument("--quick", action="store_true", help="20 updates: to see that it runs")
    parser.add_argument("--draw", action="store_true", help="only tables and pictures, from what was kept")
    options = parser.parse_args()
    path = RESULTS / "convergence.json"
    if options.draw:
        kept = json.loads(path.read_text())
    else:
        if "digits" in options.task:
            digits()  # says what is missing before anything is trained
        about = machine()
        IN_FLIGHT.parent.mkdir(exist_ok=True)
        if not options.resume:
            IN_FLIGHT.unlink(missing_ok=True)
        jobs = planned(options)
        curves = all_trained(jobs, options.processes, IN_FLIGHT)
        found = [curve for job, curve in zip(jobs, curves, strict=True) if not job.emulated]
        emulated = [curve for job, curve in zip(jobs, curves, strict=True) if job.emulated]
        about["load_after"] = round(load(), 2)
        kept = {
            "command": " ".join(["python benchmarks/convergence.py", *sys.argv[1:]]),
            "machine": about,
            "seconds": round(sum(curve.seconds for curve in curves)),
            "processes": options.processes,
            "checks": [vars(check) for check in checks(found, emulated)],
            "curves": [as_data(curve) for curve in found],
        }
    lines = report(kept)
    print("\n".join(lines))
    if options.keep or options.draw:
        RESULTS.mkdir(exist_ok=True)
        path.write_text(written(kept))
        keep("convergence", lines)
        draw_all(kept, PICTURES)
    wrong = [check for data in kept["checks"] if not (check := Check(**data)).ok]
    if wrong:
        sys.exit("these curves are not one:\n" + "\n".join(check.line() for check in wrong))


if __name__ == "__main__":
    main()
