"""Which values of the papers' unknown constants agree with what they were fitted on.

Each constant is varied with the others as they stand; what it was fitted on is predicted at each value, and
``<`` marks the value that the examples and figures have. Prints tables; one process, half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.figure_changes import changed_task
from counterflow.papers.figures.figure_entries import best_plan
from counterflow.papers.figures.published import Figure, PublishedUse, Run, Stated
from counterflow.papers.figures.reproduction import ReproductionVerdict, predict_row, reproduce
from counterflow.planning.inputs.cluster import Cluster, Link
from counterflow.planning.task import PlanningTask
from counterflow.schedule.modes import Recompute

Change = Callable[[PlanningTask], PlanningTask]
GIB = 2**30


def changed(run: Run, change: Change) -> Run:
    """A run of another machine or model."""
    return replace(run, task=lambda: change(run.task()))


def with_cluster(task: PlanningTask, cluster: Cluster) -> PlanningTask:
    """The same on another cluster."""
    return replace(task, cluster=cluster)


def faster(link: Link, gigabytes: float) -> Link:
    """The link with so many GB/s."""
    return replace(link, seconds_per_byte=1 / (gigabytes * 1e9))


def messages(gigabytes: float) -> Change:
    """Messages between nodes of so many GB/s."""
    return lambda task: with_cluster(
        task, replace(task.cluster, between=faster(task.cluster.between, gigabytes))
    )


def sums(gigabytes: float) -> Change:
    """All-reduces between nodes of so many GB/s."""

    def change(task: PlanningTask) -> PlanningTask:
        link = task.cluster.allreduce_between or task.cluster.between
        return with_cluster(task, replace(task.cluster, allreduce_between=faster(link, gigabytes)))

    return change


def reserve(gibibytes: float) -> Change:
    """So much memory that training cannot have."""
    return lambda task: with_cluster(task, replace(task.cluster, reserve_bytes=gibibytes * GIB))


def saved(factor: float, now: float) -> Change:
    """Blocks that save ``factor`` times what the formula says, in place of ``now`` times."""

    def change(task: PlanningTask) -> PlanningTask:
        block = task.profile.layer("block")
        more = replace(block, saved_bytes=tuple(size * factor / now for size in block.saved_bytes))
        return replace(task, profile=replace(task.profile, layers={**task.profile.layers, "block": more}))

    return change


def best_configurations(
    name: str, make: Callable[[float], Change], values: Iterable[float], now: float
) -> None:
    """How many of Figure 10's best configurations are found."""
    figure = FIGURES["chimera-fig10"]
    print(f"\nPiz Daint, {name}: best configurations of Chimera's Figure 10 found")
    for value in values:
        found = reproduce(replace(figure, runs=(changed(figure.runs[0], make(value)),)))
        other = [
            f"{row.published.label} has {row.configurations[0]}"
            for row in found.rows
            if row.verdict is not ReproductionVerdict.HIT
        ]
        met = len(found.rows) - len(other)
        print(f"  {value:6g}{_mark(value, now)} {met} of {len(found.rows)}; {'; '.join(other)}")


def ratios(
    name: str,
    figure: Figure,
    others: tuple[str, ...],
    make: Callable[[float], Change],
    values: Iterable[float],
    now: float,
) -> None:
    """The ratios that a constant was fitted on."""
    published = [v for v in figure.published if v.over in others and v.use is PublishedUse.FIT]
    runs = ", ".join(dict.fromkeys(run for value in published for run in value.runs))
    print(f"\n{name}: {figure.title}, {runs}")
    for each in values:
        varied = replace(figure, runs=tuple(changed(run, make(each)) for run in figure.runs))
        rows = [predict_row(varied, value) for value in published]
        shown = [f"{row.published.over} {row.predicted:.3f} {row.difference:+.1%}" for row in rows]
        print(f"  {each:6g}{_mark(each, now)} {', '.join(shown)}")


def half_rate(samples: float) -> Change:
    """A device with half of its highest rate at so many samples of a micro-batch."""
    return lambda task: changed_task(task, {"profile": {"half_rate_samples": samples}})


def hanayo_memory(values: Iterable[float], now: float) -> None:
    """What fits 8 devices with a batch of 4."""
    figure = FIGURES["hanayo-fig12"]
    print("\nHanayo's BERT, saved bytes over the formula's: P=8, batch 4 on 8 devices")
    for value in values:
        run = changed(figure.runs[0], saved(value, now))
        line = []
        for competitor in figure.competitors:
            plan = best_plan(competitor, run, run.task(), competitor.statement(run.label))
            line.append(f"{competitor.label} {'fits' if plan is not None else 'does not fit'}")
        print(f"  {value:6g}{_mark(value, now)} {', '.join(line)}")


def fitting_depths(values: Iterable[float], now: float) -> None:
    """Depths at which GPT-2 fits without recomputation."""
    figure = FIGURES["chimera-fig15"]
    print("\nGPT-2, saved bytes over the formula's: depths that fit without recomputation on 512 P100")
    for value in values:
        run = changed(figure.runs[0], saved(value, now))
        line = []
        for label in ("GPipe", "DAPPLE", "GEMS", "Chimera"):
            only = replace(figure.competitor(label), recompute=(Recompute.NONE,))
            depths = [d for d in only.depths if best_plan(replace(only, depths=(d,)), run, run.task())]
            line.append(f"{label} {depths or 'none'}")
        print(f"  {value:6g}{_mark(value, now)} {', '.join(line)}")


def mixpipe_memory(values: Iterable[float], now: float) -> None:
    """Whether MixPipe (K=2) and Chimera fit D=4 with B=16 without recomputation."""
    figure = FIGURES["mixpipe-fig8"]
    print("\nMixPipe's models, saved bytes over the formula's: BERT-48 at D=4, B=16 without recomputation")
    stated = Stated(4, samples=16, recompute=False)
    for value in values:
        run = changed(figure.runs[-1], saved(value, now))
        line = []
        for label, options in (("MixPipe", (("injected", (2,)),)), ("Chimera", None)):
            competitor = figure.competitor(label)
            competitor = replace(competitor, options=competitor.options if options is None else options)
            fits = best_plan(competitor, run, run.task(), stated) is not None
            line.append(f"{label} {'fits' if fits else 'does not fit'}")
        print(f"  {value:6g}{_mark(value, now)} {', '.join(line)}")


def _mark(value: float, now: float) -> str:
    return " <" if value == now else "  "


def main() -> None:
    """All of them."""
    print("What the papers' constants were fitted on, at other values of each; < is the one in use")
    best_configurations("GB/s of messages", messages, (0.5, 0.75, 1, 1.25, 1.5, 2, 5), 1)
    best_configurations("GB/s of all-reduces", sums, (3, 3.25, 3.5, 3.75, 3.85, 3.95, 4, 5), 3.85)
    best_configurations("GiB in reserve", reserve, (4.5, 5, 5.5, 5.6, 5.7, 5.75, 5.8, 6), 5.7)
    fitting_depths((1, 1.1, 1.12, 1.145, 1.16, 1.2), 1.145)
    mixpipe_memory((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1), 0.8)
    hanayo_memory((0.4, 0.44, 0.45, 0.46, 0.47, 0.48, 0.49, 0.5), 0.46)
    ratios(
        "Samples at half of the highest rate",
        FIGURES["mixpipe-fig8"],
        ("GPipe", "DAPPLE"),
        half_rate,
        (1, 2, 4, 5, 6, 7, 8),
        6,
    )
    ratios(
        "Lonestar6's messages in GB/s",
        FIGURES["hanayo-fig11"],
        ("Chimera-wave",),
        messages,
        (0.5, 0.8, 1, 1.05, 1.1, 1.5, 5),
        1.05,
    )


if __name__ == "__main__":
    main()
