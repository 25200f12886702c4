"""From a workload and costs to the problem that a search solves; unsupported workloads are refused before it
begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind, Product
from counterflow.schedule.modes import Recompute
from counterflow.schedule.residency import stash_change
from counterflow.schedule.workload import Workload
from counterflow.simulation import Costs, Link, Piece
from counterflow.simulation.costs import stage_bytes
from counterflow.simulation.op_costs import per_stage

from .problem import (
    ACTIVATIONS,
    BYTES,
    CLOSE,
    GradientSum,
    Letter,
    Limit,
    Need,
    Objective,
    Problem,
    Store,
    peaks,
)


def problem_of(
    workload: Workload,
    costs: Costs | None = None,
    *,
    peak: Limit | None = None,
    memory_bytes: Limit | None = None,
    objective: Objective | str = Objective.MAKESPAN,
) -> Problem:
    """The problem of ordering a workload.

    Args:
        workload: a synchronous workload, with micro-batches one by one, whole or in slices. If the costs
            recompute stages, it has recomputations, which may run anywhere before their backwards.
        costs: seconds and bytes; default: a forward costs 1, a backward 2, messages nothing.
        peak: maximum activations that a worker stashes, in (stage x micro-batch) units, from a forward's
            start to the end of its weight gradients.
        memory_bytes: maximum bytes of a worker, including weights and optimiser state; needs
            ``costs.memory`` or ``costs.ops``.
        objective: ``makespan`` or ``steady``.

    Raises:
        ConfigError: the workload has doubled forwards, divided backwards or several periods, costs do not
            fit it, or a limit is too small for one micro-batch.
    """
    costs = Costs() if costs is None else costs
    try:
        objective = Objective(objective)
    except ValueError:
        raise ConfigError(f"objective={str(objective)!r}: legal: {', '.join(Objective)}") from None
    _refuse(workload)
    if costs.recomputes_ahead and not workload.recomputes:
        workload = workload.recomputing(recomputes=True)
    letters, links = _letters(workload, costs)
    stores = []
    if peak is not None:
        stores.append(_activations(workload, letters, _limits("peak", peak, workload.placement.workers)))
    if memory_bytes is not None:
        stores.append(_bytes(workload, costs, letters, memory_bytes))
    for store in stores:
        _refuse_too_little(workload, letters, store)
    travels = any(need.seconds for letter in letters for need in letter.needs)
    return Problem(
        workload,
        costs,
        objective,
        letters,
        tuple(stores),
        _sums(workload, costs, letters),
        costs.agreement if objective is Objective.MAKESPAN else 0.0,
        links,
        lanes=travels and costs.link is Link.ONE_AT_A_TIME,
        busy=travels and not costs.overlap,
    )


def _refuse(workload: Workload) -> None:
    for fault in workload.faults():
        raise ConfigError(f"the workload is not right: {fault}")
    if not workload.synchronous or workload.periods != 1:
        raise ConfigError(
            "orders are computed for one synchronous mini-batch, but this workload is asynchronous; choose a "
            "synchronous one"
        )
    if not workload.trains:
        raise ConfigError("orders are computed for training, but this workload has no backwards")
    if any(skip.once for skip in workload.skips):
        raise ConfigError("orders are not computed for values that are sent once per step; leave these out")
    shares: set[tuple[int, ...]] = set()
    for batch in workload.passes:
        if len(batch.micro_batches) != 1 or any(share.parts != workload.slices for share in batch.shares):
            raise ConfigError(
                "orders are computed for micro-batches that run one by one, but this workload has doubled "
                "forwards or divided backwards"
            )
        shares.update(share.split for share in batch.shares)
    if len(shares) > 1:
        raise ConfigError(
            "orders are computed only if all micro-batches and slices split the backwards of the same stages"
        )


def _letters(workload: Workload, costs: Costs) -> tuple[tuple[Letter, ...], int]:
    placement = workload.placement
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for batch in workload.passes:
        first.setdefault(batch.pipe, batch.micro_batches[0])
        count[batch.pipe] = count.get(batch.pipe, 0) + 1
    ops = [op for op in workload.ops() if first[op.pipe] == op.micro_batches[0]]
    kinds = list(OpKind)

    def place(op: Op) -> tuple[int, ...]:
        return placement.worker(op.pipe, op.stage), op.pipe, op.stage, kinds.index(op.kind), op.part

    ops.sort(key=place)
    number = {op: n for n, op in enumerate(ops)}
    seconds = costs.of_ops(workload.placement.stages)
    travels = _travelling(workload, costs)
    links: dict[tuple[int, int], int] = {}
    letters = []
    for op in ops:
        worker = placement.worker(op.pipe, op.stage)
        takes = seconds.seconds(Piece.of(op, worker, workload))
        if not 0 <= takes < math.inf:
            raise ConfigError(f"{op} takes {takes} seconds: must be finite, 0 or more")
        needs = []
        for need in workload.needs(op):
            sender = placement.worker(need.pipe, need.stage)
            if sender == worker:
                needs.append(Need(number[need]))
            else:
                link = links.setdefault((sender, costs.way(sender, worker)), len(links))
                needs.append(Need(number[need], travels(need, op), link))
        many = count[op.pipe]
        letters.append(
            Letter(op.kind, op.pipe, op.stage, worker, many, takes, tuple(needs), op.part, op.parts)
        )
    return tuple(letters), len(links)


def _travelling(workload: Workload, costs: Costs) -> Callable[[Op, Op], float]:
    worker = workload.placement.worker
    sizes = per_stage("message_bytes", costs.message_bytes, workload.placement.stages)
    skips = {(s.source, s.target): n for n, s in enumerate(workload.skips)}
    skip_sizes = per_stage("skip_bytes", costs.skip_bytes, len(workload.skips)) if skips else []

    def seconds(maker: Op, taker: Op) -> float:
        sender, receiver = worker(maker.pipe, maker.stage), worker(taker.pipe, taker.stage)
        latency, per_byte = (_of_link(x, sender, receiver) for x in (costs.p2p, costs.p2p_per_byte))
        lower, upper = sorted((maker.stage, taker.stage))
        size = sizes[lower] if upper == lower + 1 else skip_sizes[skips[lower, upper]]
        return latency + per_byte * size * workload.work(maker)

    return seconds


def _of_link(value: float | Sequence[Sequence[float]], sender: int, receiver: int) -> float:
    return float(value) if isinstance(value, (int, float)) else float(value[sender][receiver])


def _limits(name: str, value: Limit, workers: int) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        value = [value] * workers
    if len(value) != workers:
        raise ConfigError(
            f"{name}: {plural(len(value), 'number')} for {plural(workers, 'worker')}; give one, or one "
            "per worker"
        )
    for number in value:
        if not number > 0:
            raise ConfigError(f"{name}={number:g}: must be above 0")
    return tuple(float(number) for number in value)


def _activations(workload: Workload, letters: Sequence[Letter], most: tuple[float, ...]) -> Store:
    ops = [Op(x.kind, x.stage, (0,), part=x.part, parts=x.parts) for x in letters]
    change = [stash_change(op, workload) for op in ops]
    at_start = tuple(max(c, 0.0) for c in change)
    return Store(ACTIVATIONS, at_start, tuple(min(c, 0.0) for c in change), most)


def _bytes(workload: Workload, costs: Costs, letters: Sequence[Letter], limit: Limit) -> Store:
    if costs.memory is None:
        raise ConfigError("memory_bytes: needs the bytes of each stage; give costs with `memory`")
    placement = workload.placement
    memory = stage_bytes(costs.memory, Recompute(costs.recompute), placement.stages)
    most = []
    for worker, all_bytes in enumerate(_limits("memory_bytes", limit, placement.workers)):
        base = sum(memory[stage].fixed + memory[stage].weights for _, stage in placement.stages_on(worker))
        if base >= all_bytes:
            raise ConfigError(
                f"memory_bytes={all_bytes:,.0f}: worker {worker} holds {base:,.0f} bytes of weights, "
                "gradients and optimiser state before its first op"
            )
        most.append(all_bytes - base)
    ops = costs.of_ops(placement.stages)
    slices = [Op(x.kind, x.stage, (0,), part=x.part, parts=x.parts) for x in letters]
    pieces = [Piece.of(op, x.worker, workload) for op, x in zip(slices, letters, strict=True)]
    changes = [ops.bytes(piece) for piece in pieces]
    return Store(BYTES, tuple(a for a, _ in changes), tuple(b for _, b in changes), tuple(most))


def _refuse_too_little(workload: Workload, letters: Sequence[Letter], store: Store) -> None:
    for worker, most in enumerate(store.most):
        for pipe in range(workload.placement.pipes):
            ops = [n for n, x in enumerate(letters) if x.worker == worker and x.pipe == pipe]
            if not ops:
                continue
            forwards = [n for n in ops if letters[n].kind.is_forward]
            word = forwards + sorted(
                (n for n in ops if n not in forwards),
                key=lambda n: (-letters[n].stage, -letters[n].part, letters[n].turn),
            )
            limited = replace(store, most=(most,))
            (need,) = peaks(limited, (tuple(word),))
            if need > most * (1 + CLOSE):
                raise ConfigError(
                    f"worker {worker} may hold {most:,.10g} {store.name}, but one micro-batch needs "
                    f"{need:,.10g}; allow more"
                )


def _sums(workload: Workload, costs: Costs, letters: Sequence[Letter]) -> tuple[GradientSum, ...]:
    seconds: list[float] = per_stage("sync", costs.sync, workload.placement.stages)
    sums = []
    for stage in range(workload.placement.stages):
        workers = sorted({worker for _, worker in workload.placement.copies(stage)})
        if len(workers) * costs.replicas > 1 and seconds[stage]:
            makers = tuple(
                n
                for n, x in enumerate(letters)
                if x.stage == stage and Product.WEIGHT_GRADIENTS in x.kind.makes
            )
            sums.append(GradientSum(makers, tuple(workers), seconds[stage]))
    return tuple(sums)
