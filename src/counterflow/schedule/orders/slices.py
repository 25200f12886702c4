"""Micro-batches cut along their sequence: the order of any synchronous scheme, with slices that flow.

A slice flows like a micro-batch, so a scheme's order for N · n micro-batches is one for n slices of each of
N: the k-th forward of a pipe is slice k mod n of its micro-batch number ⌊k / n⌋. Backwards go the other way,
the last slice first, because later slices contribute to the gradients of earlier ones. So the k-th backward
is slice n − 1 − k mod n, and forwards are advanced by the smallest number with which each op comes after all
that it needs; if a worker would still wait, it runs a later op that its memory allows (``fill.py``). For 1F1B
this is Seq1F1B, advanced by n − 1.

If that takes more memory than running the n slices of each op in its place, one after another, the latter is
used.

Source: Li et al., TeraPipe (ICML 2021); Sun et al., Seq1F1B (arXiv 2406.03488) sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from counterflow.errors import ConfigError, DeadlockError

from ..ir import Op, OptionValue, Schedule
from ..residency import peak_activations
from ..workload import Share, Workload
from .fill import filled


def sliced_workload(workload: Workload, slices: int) -> Workload:
    """The same work with each micro-batch cut into slices.

    Args:
        workload: a synchronous workload whose micro-batches run one by one.
        slices: n, 1 or more.

    Raises:
        ConfigError: the workload is asynchronous, forwards contain several micro-batches, or backwards are
            divided.
    """
    if slices == 1:
        return workload
    if not workload.synchronous:
        raise ConfigError(
            f"slices={slices}: asynchronous schemes have no slices; choose a synchronous one, such as 1f1b"
        )
    passes = []
    for one in workload.passes:
        if len(one.micro_batches) > 1 or any(share.parts > 1 for share in one.shares):
            raise ConfigError(
                f"slices={slices}: micro-batches that run together, or are halved, cannot be sliced; choose "
                "concat=direct"
            )
        split = one.shares[0].split
        shares = tuple(Share(one.micro_batches, part, slices, split) for part in range(slices))
        passes.append(replace(one, shares=shares))
    return replace(workload, passes=tuple(passes), slices=slices)


def sliced(build: Callable[..., Schedule], options: Mapping[str, OptionValue], slices: int) -> Schedule:
    """The schedule of a scheme with sliced micro-batches.

    Args:
        build: the scheme's builder.
        options: the scheme's options, including ``micro_batches``.
        slices: n, 1 or more.

    Raises:
        ConfigError: the builder refuses the options, or the work cannot be sliced.

    >>> from counterflow.schedule.schemes import dapple
    >>> print(*sliced(dapple, {"stages": 2, "micro_batches": 1}, 2).orders[0])
    F0.0:0/2 F0.0:1/2 B0.0:1/2 B0.0:0/2
    """
    whole = build(**options)
    if slices == 1:
        return whole
    workload = sliced_workload(whole.workload, slices)
    named = replace(whole, options=(*whole.options, ("slices", slices)), workload=workload)
    in_place = tuple(tuple(part for op in order for part in _parts(op, slices)) for order in whole.orders)
    found = replace(named, orders=in_place)
    units = _by_units(build, options, named)
    if units is None or max(peak_activations(units)) > max(peak_activations(found)):
        return found
    return units


def _parts(op: Op, slices: int) -> list[Op]:
    """All slices of an op, in the order of their dependencies."""
    found = [op._replace(part=part, parts=slices) for part in range(slices)]
    return found if op.kind.whole else found[::-1]


def _by_units(
    build: Callable[..., Schedule], options: Mapping[str, OptionValue], sliced: Schedule
) -> Schedule | None:
    """The order for N · n micro-batches with slices in their places.

    None if pipes would share a micro-batch, or backwards run in reverse order of micro-batches.
    """
    n = sliced.workload.slices
    try:
        units = build(**{**options, "micro_batches": sliced.micro_batches * n})
    except ConfigError:  # the scheme may require other numbers of micro-batches
        return None
    own: dict[int, list[int]] = defaultdict(list)
    for one in sliced.workload.passes:
        own[one.pipe] += one.micro_batches
    number: dict[int, tuple[int, int]] = {}
    split: dict[tuple[int, int], tuple[int, ...]] = {}
    taken: Counter[int] = Counter()
    for one in sorted(units.workload.passes, key=lambda one: one.micro_batches):
        k = taken[one.pipe]
        taken[one.pipe] += 1
        if len(one.micro_batches) > 1 or k // n >= len(own[one.pipe]):
            return None
        number[one.micro_batches[0]] = micro_batch, part = own[one.pipe][k // n], k % n
        split[micro_batch, n - 1 - part] = one.shares[0].split  # its backward belongs to that slice

    def cut(op: Op) -> Op:
        micro_batch, part = number[op.micro_batches[0]]
        part = part if op.kind.whole else n - 1 - part
        return op._replace(micro_batches=(micro_batch,), part=part, parts=n)

    passes = tuple(
        replace(one, shares=tuple(replace(s, split=split[s.micro_batches[0], s.part]) for s in one.shares))
        for one in sliced.workload.passes
    )
    sliced = replace(sliced, workload=replace(sliced.workload, passes=passes))
    rows = [[cut(op) for op in order] for order in units.orders]
    for advance in range(max(map(len, rows))):
        advanced = replace(sliced, orders=tuple(tuple(_advanced(row, advance)) for row in rows))
        limits = peak_activations(advanced)
        try:
            filled(advanced, limits, movable=lambda _: False)
        except DeadlockError:
            continue
        return filled(advanced, limits)
    return None


def _advanced(row: Sequence[Op], count: int) -> list[Op]:
    """The order in which ``count`` more forwards, if that many exist, come before each other op."""
    forwards = [op for op in row if op.kind.whole]
    found: list[Op] = []
    done = before = 0
    for op in row:
        if op.kind.whole:
            before += 1
            continue
        found += forwards[done : before + count]
        done = max(done, min(before + count, len(forwards)))
        found.append(op)
    return found + forwards[done:]
