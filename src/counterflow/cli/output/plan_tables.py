"""Output of ``counterflow plan``: the ranking, the best plan, why it is the best, the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from counterflow.common.number_texts import byte_size
from counterflow.common.parallel_degrees import DEGREES, above_one, by_letter
from counterflow.common.plurals import plural
from counterflow.planning.by_length import slices_win_from
from counterflow.planning.prediction import choices, seconds_text
from counterflow.planning.search.degrees_tried import words
from counterflow.planning.search.node_orders import in_words
from counterflow.schedule.modes import Recompute
from counterflow.schedule.registry import title
from counterflow.schedule.scheme import SLICES

from .console import WIDE, console, number, table_of

if TYPE_CHECKING:
    from rich.console import Console

    from counterflow.planning.by_length import AtLength
    from counterflow.planning.inputs.cluster import Cluster
    from counterflow.planning.orders import Orders
    from counterflow.planning.prediction import Configuration, Parts, Prediction
    from counterflow.planning.search.search_result import Plan, SearchResult
    from counterflow.planning.task import PlanningTask
    from counterflow.planning.why import Why


def print_plans(
    task: PlanningTask,
    result: SearchResult,
    explained: Why,
    top: int | None,
    *,
    orders: Orders | None = None,
    by_length: Sequence[AtLength] = (),
) -> None:
    """Print the ranking, the best plan, why it is the best, and the rest.

    Args:
        task: what was planned.
        result: what the search found.
        explained: why the best plan is the best.
        top: number of best plans to show; None: the best of every scheme.
        orders: orders computed for the best plans.
        by_length: plans at other lengths of the sequence.
    """
    out = console(WIDE)
    cluster = task.cluster
    out.print(Text(f"{task.model.name} on {cluster.name}", style="bold"))
    nodes = f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''}"
    devices = f"{nodes} of {cluster.devices}" if cluster.devices > 1 else nodes
    if cluster.kinds:
        devices = f"{nodes} ({in_words(tuple((kind.name, kind.nodes) for kind in cluster.kinds))})"
    about = (
        f"{devices}, {task.profile.machine} · mini-batch {plural(result.mini_batch, 'sample')} · "
        f"{_memory_of(cluster)} a device"
    )
    if cluster.reserve_bytes:
        about += f", {byte_size(cluster.reserve_bytes)} more reserved"
    out.print(Text(about, style="dim"))
    ranked = result.best if top else result.of_schemes
    plans = _distinct(ranked)
    predictions = [plan.play.prediction() for plan in plans]
    spread = cluster.most_devices > 1
    out.print(_ranking(plans, width=out.width, with_arrangement=spread))
    if out.width < (room := _room(plans, with_arrangement=spread)):
        columns = "Columns sync and devices are" if spread else "Column sync is"
        remark = f"{columns} hidden (needs a terminal of {room} columns, or --json)"
        out.print(Text(remark, style="dim"))
    if len(plans) < len(ranked):
        same = (
            f"{plural(len(ranked) - len(plans), 'more scheme')} on one worker each: the same data parallelism"
        )
        out.print(Text(same, style="dim"))
    best = result.best[0].play.prediction()
    for line in _of_best(result.best[0]):
        out.print(Text(line))
    out.print()
    for line in _explained(explained, best):
        out.print(Text(line))
    if orders is not None:
        _print_orders(out, orders)
    if by_length:
        _print_lengths(out, by_length)
    out.print(_rejected(result))
    for omission in result.omissions:
        out.print(Text(f"{omission.what}: {omission.reason}", style="dim"))
    often = dict.fromkeys(p.configuration.scheme for p in predictions if p.updates > 1)
    for scheme in often:
        remark = f"{scheme} updates after every micro-batch: several times in a mini-batch."
        out.print(Text(remark, style="dim"))


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    """The plans, of which those on one worker a replica are listed once, whatever the scheme."""
    distinct: dict[object, Plan] = {}
    for place, plan in enumerate(plans):
        chosen = plan.play.configuration
        alone = plan.play.schedule.workers == 1 < chosen.replicas and plan.play.schedule.synchronous
        key = (chosen.replicas, chosen.samples, chosen.recompute, chosen.zero_stage, str(chosen.degrees))
        distinct.setdefault(key if alone else place, plan)
    return list(distinct.values())


def _memory_of(cluster: Cluster) -> str:
    sizes = dict.fromkeys(byte_size(node.usable_bytes) for node, _ in cluster.kinds_of_nodes())
    return " or ".join(sizes)


def _room(plans: Sequence[Plan], *, with_arrangement: bool) -> int:
    # Narrower terminals omit columns that the best plan's line repeats.
    return (132 if with_arrangement else 114) + 4 * len(_degrees(plans))


def _degree(letter: str) -> Callable[[Prediction], str]:
    return lambda p: str(by_letter(p.configuration.degrees)[letter])


def _degrees(plans: Sequence[Plan]) -> list[str]:
    chosen = [plan.play.configuration.degrees for plan in plans]
    return [
        names.letter
        for name, names in DEGREES.items()
        if any(name in above_one(degrees) for degrees in chosen)
    ]


def _ranking(plans: Sequence[Plan], *, width: int, with_arrangement: bool) -> Any:
    is_complete = width >= _room(plans, with_arrangement=with_arrangement)
    cells: dict[str, Callable[[Prediction], str]] = {
        "scheme": lambda p: title(p.configuration.scheme),
        "options": lambda p: " ".join(
            filter(None, ["data parallel" if _is_data_parallel(p) else "", choices(p.configuration)])
        ),
        "D": lambda p: str(p.workers),
        "W": lambda p: str(p.configuration.replicas),
        **{letter: _degree(letter) for letter in _degrees(plans)},
        "B": lambda p: str(p.configuration.samples),
        "N": lambda p: str(p.micro_batches),
        "recompute": lambda p: p.configuration.recompute.value,
        "sync": lambda p: p.configuration.sync.value,
        "devices": lambda p: p.configuration.arrangement.value,
        "step": lambda p: p.step_text,
        "samples/s": lambda p: number(round(p.samples_per_second, 1)),
        "bubbles": lambda p: f"{p.bubble_ratio:.1%}",
        "peak memory": lambda p: byte_size(max(p.peak_bytes)),
    }
    if not (is_complete and with_arrangement):
        del cells["devices"]
    if not is_complete:
        del cells["sync"]
    words = ("scheme", "options", "recompute", "sync", "devices")
    table = table_of(*cells, text_columns=words, pad_edge=False)
    for plan in plans:
        prediction = plan.play.prediction()
        table.add_row(*(cell(prediction) for cell in cells.values()))
    return table


_TELLING = 0.001
"""Share of a step from which a loss has a line."""


def _of_best(plan_found: Plan) -> Iterator[str]:
    best = plan_found.play.prediction()
    plan = best.configuration
    divided = "".join(f"{text}, " for text in words(plan.degrees))
    yield (
        f"Best plan: {best.schedule}, {plan.replicas} replica{'s' if plan.replicas > 1 else ''}, {divided}"
        f"micro-batches of {plan.samples}, recompute {plan.recompute.value}, sync {plan.sync.value}, devices "
        f"{plan.arrangement.value}{f', nodes: {in_words(plan.nodes)}' if plan.nodes else ''}"
        f"{', optimiser state sharded (zero_stage 1)' if plan.zero_stage else ''}"
    )
    runs: list[tuple[int, int, str]] = []
    for worker, size in enumerate(map(byte_size, best.peak_bytes)):
        if runs and runs[-1][2] == size:
            runs[-1] = (runs[-1][0], worker, size)
        else:
            runs.append((worker, worker, size))
    shown = (f"{a}–{b}: {size}" if a != b else f"{a}: {size}" for a, b, size in runs)
    yield "  peak memory by worker   " + ", ".join(shown)
    fullest = max(best.memory, key=lambda worker: worker.total)
    if fullest.workspace:  # the profile contains the ops' overhead
        parts = fullest.parts().items()
        parts_text = ", ".join(f"{name} {byte_size(size)}" for name, size in parts if size >= 0.5)
        yield f"  of the fullest worker   {parts_text}"
    if best.steady_step_seconds < best.step_seconds * (1 - _TELLING) and not plan.zero_stage:
        steady = _seconds(best.steady_step_seconds)
        yield f"  without a barrier       {steady} a step (Pipeline(barrier=False))"
    if isinstance(plan.cuts, tuple) and plan.cuts:
        yield f"  stages begin at layers  0, {', '.join(map(str, plan.cuts))}"
    if plan_found.layout is not None:
        yield f"  layout                  {plan_found.layout}"
    if (devices := best.mesh) is not None:
        count = best.workers * plan.replicas * plan.degrees.positions
        parts_text = str(devices) if count <= _MESH_TOLD else f"of {count} devices: see --json"
        position = "·".join(name for name in above_one(plan.degrees) if name != "ep")
        yield f"  mesh                    {parts_text} (replica, worker, {position})"
    for text in best.notes:
        yield f"  note                    {text}"


_MESH_TOLD = 32
"""Maximum number of devices of a mesh that is printed on a line."""


def _print_lengths(out: Console, lengths: Sequence[AtLength]) -> None:
    table = table_of(
        *("positions", "whole sequences", "step", "in slices", "slices", "step", "times as fast"),
        text_columns=("whole sequences", "in slices", "slices"),
        pad_edge=False,
    )
    for comparison in lengths:
        cells = []
        for plan in (comparison.unsliced, comparison.sliced):
            configuration = None if plan is None else plan.play.configuration
            cells.append("none fits" if configuration is None else title(configuration.scheme))
            if plan is comparison.sliced:
                cells.append("" if configuration is None else str(dict(configuration.options)[SLICES]))
            cells.append("" if plan is None else _seconds(plan.seconds))
        faster = "" if comparison.faster is None else f"{comparison.faster:.2f}"
        table.add_row(f"{comparison.positions:,}", *cells, faster)
    out.print()
    out.print(table)
    first = slices_win_from(lengths)
    if first is None:
        summary = f"Slices do not win at {lengths[-1].positions:,} positions, the longest sequence tried"
    elif first.faster is None:
        summary = f"Slices win from {first.positions:,} positions on, where whole sequences do not fit"
    elif first is lengths[0]:
        summary = (
            f"Slices win already at {first.positions:,} positions, the shortest sequence tried: "
            f"{first.faster:.2f} times as fast there"
        )
    else:
        summary = f"Slices win from {first.positions:,} positions on: {first.faster:.2f} times as fast there"
    out.print(Text(summary))


def _print_orders(out: Console, orders: Orders) -> None:
    named = _short(orders.named.play.prediction())
    if orders.best is None:
        summary = f"Computed orders: none is quicker than {named}, {_seconds(orders.named.seconds)}"
    else:
        summary = (
            f"Computed orders: the best saves {orders.gain:.1%} of {named}, {_seconds(orders.named.seconds)}"
        )
    out.print()
    out.print(Text(summary))
    if orders.computed:
        table = table_of(
            *("placement of", "D", "W", "B", "backwards", "recompute", "step", "no order below"),
            *("gap", "found by"),
            text_columns=("placement of", "backwards", "recompute", "found by"),
            pad_edge=False,
        )
        for order in orders.computed:
            plan = order.play.configuration
            table.add_row(
                title(order.named.play.configuration.scheme),
                *(str(n) for n in (order.play.schedule.workers, plan.replicas, plan.samples)),
                "split" if order.split else "whole",
                plan.recompute.value,
                *(_seconds(order.seconds), _seconds(order.bound_seconds), f"{order.gap:.1%}"),
                order.method + (", stages cut anew" if order.recut else ""),
            )
        out.print(table)
        reason = orders.computed[0].synthesis.bound.reason
        out.print(Text(f"  Why the first takes no less than its bound: {reason}"))
    if orders.omissions:
        out.print(
            Text(f"  {len(orders.omissions)} more were not computed; --json lists the reasons", style="dim")
        )


_PART_WORDS = {
    "compute": "compute",
    "imbalance": "stage imbalance",
    "bubbles": "schedule bubbles",
    "messages": "messages",
    "allreduce": "all-reduces",
    "update": "update",
    "shared_cores": "waiting for cores",
    "broadcasts": "broadcasts of weights",
}


def _explained(explained: Why, best: Prediction) -> Iterator[str]:
    yield "Where its step goes"
    yield f"  {_parts(explained.parts)}"
    if explained.limit is not None:
        lost = getattr(explained.parts, explained.limit)
        yield (
            f"  What limits it most: {_PART_WORDS[explained.limit]}, {_seconds(lost)} of "
            f"{_seconds(best.step_seconds)} ({lost / best.step_seconds:.0%})"
        )
    larger = explained.in_more_memory
    if larger is not None:
        larger_plan = larger.prediction
        gain = best.step_seconds / larger_plan.step_seconds - 1
        yield (
            f"  Memory: with {byte_size(larger_plan.needed_bytes)} a device in place of "
            f"{byte_size(larger_plan.had_bytes)}, {_short(larger_plan)} would be {gain:.1%} faster"
        )
    else:
        yield "  Memory: no plan that was too large would be faster"
    if explained.second is None or explained.second_parts is None:
        return
    second = explained.second.play.prediction()
    ratio = second.step_seconds / best.step_seconds - 1
    is_equal = ratio < 5e-4
    comparison = "takes the same time" if is_equal else f"is {ratio:.1%} slower"
    yield f"The second-best plan, {_short(second)}, {comparison}"
    yield f"  {_parts(explained.second_parts)}"
    for change in explained.break_evens:
        word = "slower" if change.times > 1 else "faster"
        times = change.times if change.times > 1 else 1 / change.times
        yield f"  It wins if {change.what} are {times:.3g} times {word}"
    if not explained.break_evens and not is_equal:
        yield "  It stays behind even with messages or all-reduces 64x faster or slower"


def _parts(parts: Parts) -> str:
    shown = []
    total = sum(getattr(parts, name) for name in _PART_WORDS)
    for name, word in _PART_WORDS.items():
        value = getattr(parts, name)
        if abs(value) > 5e-4 * total:
            shown.append(f"{word} {_seconds(value)}")
    return " + ".join(shown)


def _short(prediction: Prediction) -> str:
    plan = prediction.configuration
    divided = _divided(plan)
    name = f"data parallelism by {plan.scheme}" if _is_data_parallel(prediction) else title(plan.scheme)
    return f"{name} (D={prediction.workers}, W={plan.replicas}, {divided}{_rest(plan)})"


def _divided(plan: Configuration) -> str:
    degrees = by_letter(plan.degrees).items()
    return "".join(f"{letter}={degree}, " for letter, degree in degrees if degree > 1)


def _is_data_parallel(prediction: Prediction) -> bool:
    return prediction.workers == 1 < prediction.configuration.replicas


def _rest(plan: Configuration) -> str:
    recomputation = f"recompute {plan.recompute.value}" if plan.recompute is not Recompute.NONE else ""
    return ", ".join(filter(None, [f"B={plan.samples}", choices(plan), recomputation]))


def _rejected(result: SearchResult) -> Any:
    table = table_of(
        "scheme",
        "tried",
        "too large",
        "slower by bound",
        "simulated",
        "smallest that is too large",
        text_columns=("scheme", "smallest that is too large"),
        pad_edge=False,
    )
    for rejected in result.rejections:
        closest = rejected.closest
        shown = ""
        if closest is not None:
            plan = closest.candidate
            options = dict(plan.options)
            workers = options.get("stages", options.get("workers"))
            shown = (
                f"D={workers}, {_divided(plan)}{_rest(plan)}: "
                f"worker {closest.worker} needs at least {byte_size(closest.needed_bytes)} "
                f"of {byte_size(closest.usable_bytes)}"
            )
        table.add_row(
            title(rejected.scheme),
            f"{rejected.candidates:,}",
            f"{rejected.too_large:,}",
            f"{rejected.slower:,}",
            f"{rejected.simulated:,}",
            shown,
        )
    return table


def _seconds(value: float) -> str:
    return seconds_text(value)
