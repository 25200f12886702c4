"""Rules of a schedule alone: its workload, the places and the order of its ops, versions, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from counterflow.common.plurals import plural
from counterflow.schedule.ir import Op, OpKind, Product, Schedule
from counterflow.schedule.op import maker_of
from counterflow.schedule.residency import stash_change

from ..pairs import is_pair
from .subject import CheckSubject


def complete(subject: CheckSubject) -> Iterator[str]:
    """Faults if a product of the workload is not made exactly once, by ops that share and split work as the
    workload says.
    """
    schedule = subject.schedule
    workload = schedule.workload
    yield from workload.faults()
    wanted = {_unversioned(op) for op in workload.ops()}
    counts: Counter[Op] = Counter()
    makers: dict[tuple[Product, tuple[object, ...]], OpKind] = {}
    for worker, order in enumerate(schedule.orders):
        for index, versioned in enumerate(order):
            op = _unversioned(versioned)
            counts[op] += 1
            place = f"worker {worker}, op {index}: {versioned}"
            if not _in_range(schedule, op):
                yield f"{place} is not one of {_extent(schedule)}"
            elif op not in wanted:
                yield f"{place} is not an op of the workload, which shares or splits this work in another way"
            if counts[op] == 2:
                yield f"{place} exists more than once"
            elif op.kind.gives is not None and counts[op] == 1:
                first = makers.setdefault((op.kind.gives, op[1:]), op.kind)
                if first is not op.kind:
                    product = op.kind.gives.value
                    yield f"{place} makes an {product} that {op._replace(kind=first)} makes too"
    for op in sorted(wanted - counts.keys(), key=lambda op: (op.pipe, op.micro_batches, op.stage, op.part)):
        yield f"{op} is in no order, though other stages of pipe {op.pipe} have its micro-batch"


def _unversioned(op: Op) -> Op:
    return op._replace(version=0) if op.version else op


def _in_range(schedule: Schedule, op: Op) -> bool:
    return (
        0 <= op.pipe < schedule.pipes
        and 0 <= op.stage < schedule.stages
        and len(op.micro_batches) > 0
        and all(0 <= m < schedule.total_micro_batches for m in op.micro_batches)
        and len({m // schedule.micro_batches for m in op.micro_batches}) == 1
        and 0 <= op.part < op.parts
        and (op.parts == schedule.workload.slices or not op.kind.is_forward)
    )


def _extent(schedule: Schedule) -> str:
    return (
        f"{plural(schedule.pipes, 'pipe')}, {plural(schedule.stages, 'stage')}, "
        f"{plural(schedule.total_micro_batches, 'micro-batch')}, groups within one update"
    )


def placed(subject: CheckSubject) -> Iterator[str]:
    """Ops in the order of a worker that does not hold their stage."""
    schedule = subject.schedule
    for worker, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            holder = schedule.placement.worker(op.pipe, op.stage)
            if holder != worker:
                yield (
                    f"worker {worker}, op {index}: {op}, but worker {holder} holds stage {op.stage} "
                    f"of pipe {op.pipe}"
                )


def own_first(product: Product, subject: CheckSubject) -> Iterator[str]:
    """Ops that precede the op of their own stage whose product they need."""
    sliced = subject.schedule.workload.slices > 1

    def keys(op: Op) -> list[tuple[object, ...]]:
        if product is Product.OUTPUT and not sliced:  # by micro-batch, however many were computed together
            return [(op.pipe, op.stage, m) for m in op.micro_batches]
        return [op[1:]]

    maker = maker_of(product)
    for worker, order in enumerate(subject.schedule.orders):
        done: set[tuple[object, ...]] = set()
        for index, op in enumerate(order):
            if op.kind is maker:
                done.update(keys(op))
            elif op.kind.first is product and not done.issuperset(keys(op)):
                yield f"worker {worker}, op {index}: {op} comes before its {maker.word}"


def recomputed_first(subject: CheckSubject) -> Iterator[str]:
    """Backwards that precede the recomputation of their share."""
    further = subject.schedule.workload.further_kinds
    for worker, order in enumerate(subject.schedule.orders):
        done: set[Op] = set()
        for index, op in enumerate(order):
            for kind in op.kind.after:
                if kind in further and op._replace(kind=kind) not in done:
                    yield f"worker {worker}, op {index}: {op} comes before its {kind.word}"
            if not op.kind.makes:
                done.add(op)


def slices_in_order(subject: CheckSubject) -> Iterator[str]:
    """Slices that precede the slice of their micro-batch from which they take a state, or its gradient."""
    slices = subject.schedule.workload.slices
    for worker, order in enumerate(subject.schedule.orders if slices > 1 else ()):
        done: set[tuple[Product | None, tuple[object, ...]]] = set()
        for index, op in enumerate(order):
            before = op._replace(part=op.part - op.kind.carries, version=0)
            done.add((op.kind.gives, op._replace(version=0)[1:]))
            if 0 <= before.part < slices and (op.kind.gives, before[1:]) not in done:
                yield f"worker {worker}, op {index}: {op} comes before slice {before.part}, which it needs"


def promised_versions(subject: CheckSubject) -> Iterator[str]:
    """Ops that use a weight version other than the promised one, or other than their forward's."""
    schedule = subject.schedule
    forward: dict[tuple[int, int, int], int] = {}
    for worker, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            place = f"worker {worker}, op {index}: {op}"
            promised = schedule.workload.version(op.stage, schedule.period_of(op))
            if promised is not None and op.version != promised:
                yield f"{place} uses version {op.version}, {schedule.scheme} promises {promised}"
            for m in op.micro_batches:
                first = forward.setdefault((op.pipe, op.stage, m), op.version)
                if first != op.version:
                    yield f"{place} uses version {op.version}, its forward used {first}"


def peak(subject: CheckSubject) -> Iterator[str]:
    """Ops with which a worker exceeds the limit of stashed forwards."""
    if subject.peak_limit is None:
        return
    for worker, order in enumerate(subject.schedule.orders):
        stashed = 0.0
        for index, op in enumerate(order):
            stashed += stash_change(op, subject.schedule.workload)
            if stashed > subject.peak_limit:
                yield (
                    f"worker {worker}, op {index}: {op} makes {stashed:g} stashed forwards, "
                    f"the limit is {subject.peak_limit:g}"
                )
                break


def pairs_fit(subject: CheckSubject) -> Iterator[str]:
    """Pairs that are not a forward beside a backward of another stage, or of which one op needs the other.

    That none needs the other by way of further workers is the rule of deadlocks.
    """
    schedule = subject.schedule
    if not schedule.pairs:
        return
    if len(schedule.pairs) != schedule.workers:
        yield f"pairs of {len(schedule.pairs)} workers, but there are {schedule.workers}"
        return
    graph = subject.needed_graph()
    for worker, (order, pairs) in enumerate(zip(schedule.orders, schedule.pairs, strict=True)):
        end = 0
        for begin, stop in pairs:
            ops = order[begin:stop]
            place = f"worker {worker}, ops {begin} to {stop - 1}: {', '.join(map(str, ops))}"
            if not end <= begin < stop <= len(order):
                yield f"{place} overlap an earlier pair, or the end of the order"
            elif not is_pair(ops):
                yield f"{place} are not a forward, and a backward of another stage"
            else:
                nodes = range(graph.first[worker] + begin, graph.first[worker] + stop)
                sources = (graph.source[node] for node in nodes)
                if needed := next((source for source in sources if source in nodes), None):
                    yield f"{place} need {graph.ops[needed]}, which is one of them"
            end = max(end, stop)
