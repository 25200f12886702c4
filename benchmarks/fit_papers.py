"""Which values of the papers' unknown constants agree with what they were fitted on.

Each constant is varied with the others as they stand; what it was fitted on is predicted at each value, and
``<`` marks the value that the examples and figures have. Prints tables; one process, half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.published import Figure, Run, Stated
from counterflow.papers.figures.reproduction import best_plan, reproduce
from counterflow.planning.inputs.cluster import Cluster, Link
from counterflow.planning.task import Task
from counterflow.schedule.modes import Recompute

Change = Callable[[Task], Task]
GIB = 2**30


def changed(run: Run, change: Change) -> Run:
    """A run of another machine or model."""
    return replace(run, task=lambda: change(run.task()))


def with_cluster(task: Task, cluster: Cluster) -> Task:
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

    def change(task: Task) -> Task:
        link = task.cluster.allreduce_between or task.cluster.between
        return with_cluster(task, replace(task.cluster, allreduce_between=faster(link, gigabytes)))

    return change


def reserve(gibibytes: float) -> Change:
    """So much memory that training cannot have."""
    return lambda task: with_cluster(task, replace(task.cluster, reserve_bytes=gibibytes * GIB))


def saved(factor: float, now: float) -> Change:
    """Blocks that save ``factor`` times what the formula says, in place of ``now`` times."""

    def change(task: Task) -> Task:
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
        other = [f"{row.published.label} has {row.found[0]}" for row in found.rows if not row.holds]
        met = len(found.rows) - len(other)
        print(f"  {value:6g}{_mark(value, now)} {met} of {len(found.rows)}; {'; '.join(other)}")


def ratio(
    name: str,
    figure: Figure,
    at: tuple[str, str],
    make: Callable[[float], Change],
    values: Iterable[float],
    now: float,
) -> None:
    """One ratio that a constant was fitted on."""
    label, run_label = at
    value = next(v for v in figure.published if (v.label, v.runs) == (label, (run_label,)))
    run = next(run for run in figure.runs if run.label == run_label)
    print(f"\n{name}: {figure.title}, {label} on {run_label}, published {value.value}")
    for each in values:
        found = reproduce(replace(figure, runs=(changed(run, make(each)),), published=(value,))).rows[0]
        print(f"  {each:6g}{_mark(each, now)} {found.predicted:.3f} {found.difference:+.1%}")


def fitting_depths(values: Iterable[float], now: float) -> None:
    """Depths at which GPT-2 fits without recomputation."""
    figure = FIGURES["chimera-fig15"]
    print("\nGPT-2, saved bytes over the formula's: depths that fit without recomputation on 512 P100")
    for value in values:
        task = saved(value, now)(figure.runs[0].task())
        line = []
        for label in ("GPipe", "DAPPLE", "GEMS", "Chimera"):
            only = replace(figure.competitor(label), recompute=(Recompute.NONE,))
            depths = [d for d in only.depths if best_plan(replace(only, depths=(d,)), task)[0]]
            line.append(f"{label} {depths or 'none'}")
        print(f"  {value:6g}{_mark(value, now)} {', '.join(line)}")


def mixpipe_memory(values: Iterable[float], now: float) -> None:
    """Whether MixPipe (K=2) and Chimera fit D=4 with B=16 without recomputation."""
    figure = FIGURES["mixpipe-fig8"]
    print("\nMixPipe's models, saved bytes over the formula's: BERT-48 at D=4, B=16 without recomputation")
    stated = Stated(4, samples=16, recompute=False)
    for value in values:
        task = saved(value, now)(figure.runs[-1].task())
        line = []
        for label, options in (("MixPipe", (("injected", (2,)),)), ("Chimera", None)):
            one = figure.competitor(label)
            one = replace(one, stated=stated, options=one.options if options is None else options)
            fits = best_plan(one, task, at_stated=True)[0] is not None
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
    ratio(
        "Ethernet in GB/s",
        FIGURES["mixpipe-fig8"],
        ("GEMS", "32 devices"),
        messages,
        (1.25, 3.125, 5, 12.5),
        1.25,
    )
    ratio(
        "Lonestar6's messages in GB/s",
        FIGURES["hanayo-fig11"],
        ("Chimera-wave", "8 devices"),
        messages,
        (0.5, 0.8, 1, 1.05, 1.1, 1.5, 5),
        1.05,
    )


if __name__ == "__main__":
    main()
