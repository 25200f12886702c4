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

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from counterflow.errors import ConfigError, DeadlockError

from ..ir import Op, OptionValue, Schedule
from ..residency import peak_activations
from ..workload import Share, Workload
from .fill import filled


def lengths_of(slices: object) -> tuple[int, ...]:
    """Relative lengths of slices, from what people give.

    Args:
        slices: number of slices of equal length; or their lengths, as a text such as ``512+256+256`` or as
            a sequence of numbers. A sequence of as many positions as their sum is cut into exactly these,
            another in proportion.

    Returns:
        The lengths; all 1 if they are equal.

    Raises:
        ConfigError: it is neither, or a length is below 1.

    >>> lengths_of(3), lengths_of("512+256+256"), lengths_of([64, 64])
    ((1, 1, 1), (512, 256, 256), (1, 1))
    """
    lengths: list[int] = []
    if isinstance(slices, str) and slices.isdecimal():
        slices = int(slices)
    if type(slices) is int and slices >= 1:
        return (1,) * slices
    if isinstance(slices, str) and _LENGTHS.fullmatch(slices):
        lengths = [*map(int, slices.split("+"))]
    elif isinstance(slices, Sequence) and all(type(length) is int for length in slices):
        lengths = [*slices]
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            f"slices={slices!r}: must be a whole number, 1 or more, or lengths such as 512+256+256"
        )
    return (1,) * len(lengths) if len({*lengths}) == 1 else tuple(lengths)


_LENGTHS = re.compile(r"\d+(\+\d+)+")


def slices_option(lengths: Sequence[int]) -> OptionValue:
    """Lengths of slices as the value of an option: their number if they are equal.

    >>> slices_option((1, 1, 1)), slices_option((512, 256, 256))
    (3, '512+256+256')
    """
    return len(lengths) if len({*lengths}) == 1 else "+".join(map(str, lengths))


def sliced_workload(workload: Workload, slices: object) -> Workload:
    """The same work with each micro-batch cut into slices.

    Args:
        workload: a synchronous workload whose micro-batches run one by one.
        slices: number of slices, or their lengths.

    Raises:
        ConfigError: the workload is asynchronous, forwards contain several micro-batches, or backwards are
            divided.
    """
    lengths = lengths_of(slices)
    if len(lengths) == 1:
        return workload
    if not workload.synchronous:
        raise ConfigError(
            f"slices={len(lengths)}: asynchronous schemes have no slices; choose a synchronous one, such as "
            "1f1b"
        )
    passes = []
    for work in workload.passes:
        if len(work.micro_batches) > 1 or any(share.parts > 1 for share in work.shares):
            raise ConfigError(
                f"slices={len(lengths)}: micro-batches that run together, or are halved, cannot be sliced; "
                "choose concat=direct"
            )
        split = work.shares[0].split
        shares = tuple(Share(work.micro_batches, part, len(lengths), split) for part in range(len(lengths)))
        passes.append(replace(work, shares=shares))
    return replace(workload, passes=tuple(passes), lengths=lengths)


def sliced(build: Callable[..., Schedule], options: Mapping[str, OptionValue], slices: object) -> Schedule:
    """The schedule of a scheme with sliced micro-batches. The order is that of slices of equal length.

    Args:
        build: the scheme's builder.
        options: the scheme's options, including ``micro_batches``.
        slices: number of slices, or their lengths.

    Raises:
        ConfigError: the builder refuses the options, or the work cannot be sliced.

    >>> from counterflow.schedule.schemes import dapple
    >>> print(*sliced(dapple, {"stages": 2, "micro_batches": 1}, 2).orders[0])
    F0.0:0/2 F0.0:1/2 B0.0:1/2 B0.0:0/2
    """
    lengths = lengths_of(slices)
    unsliced, n = build(**options), len(lengths)
    if n == 1:
        return unsliced
    named = replace(
        unsliced,
        options=(*unsliced.options, ("slices", slices_option(lengths))),
        workload=sliced_workload(unsliced.workload, n),
    )
    in_place = tuple(tuple(part for op in order for part in _parts(op, n)) for order in unsliced.orders)
    in_turn = replace(named, orders=in_place)
    units = _by_units(build, options, named)
    if units is not None and max(peak_activations(units)) <= max(peak_activations(in_turn)):
        in_turn = units
    return replace(in_turn, workload=replace(in_turn.workload, lengths=lengths))


def _parts(op: Op, slices: int) -> list[Op]:
    parts = [op._replace(part=part, parts=slices) for part in range(slices)]
    return parts if op.kind.is_forward else parts[::-1]


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
    by_pipe: dict[int, list[int]] = defaultdict(list)
    for work in sliced.workload.passes:
        by_pipe[work.pipe] += work.micro_batches
    number: dict[int, tuple[int, int]] = {}
    split: dict[tuple[int, int], tuple[int, ...]] = {}
    used: Counter[int] = Counter()
    for work in sorted(units.workload.passes, key=lambda work: work.micro_batches):
        k = used[work.pipe]
        used[work.pipe] += 1
        if len(work.micro_batches) > 1 or k // n >= len(by_pipe[work.pipe]):
            return None
        number[work.micro_batches[0]] = micro_batch, part = by_pipe[work.pipe][k // n], k % n
        split[micro_batch, n - 1 - part] = work.shares[0].split  # its backward belongs to that slice

    def cut(op: Op) -> Op:
        micro_batch, part = number[op.micro_batches[0]]
        part = part if op.kind.is_forward else n - 1 - part
        return op._replace(micro_batches=(micro_batch,), part=part, parts=n)

    passes = tuple(
        replace(work, shares=tuple(replace(s, split=split[s.micro_batches[0], s.part]) for s in work.shares))
        for work in sliced.workload.passes
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
    forwards = [op for op in row if op.kind.is_forward]
    advanced: list[Op] = []
    done = before = 0
    for op in row:
        if op.kind.is_forward:
            before += 1
            continue
        advanced += forwards[done : before + count]
        done = max(done, min(before + count, len(forwards)))
        advanced.append(op)
    return advanced + forwards[done:]
