"""The workload: ops to compute, in no order. Plain, frozen data.

A workload is a placement, the micro-batches, and how work is shared and split; it lists all ops and their
needs. With an order of its ops on each worker it is a schedule.

Invariant: a workload has no order. It need not be right (``faults`` checks it), so edited files can be
inspected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from .op import Op, OpKind, Product
from .placement import Placement

Versions = tuple[tuple[int, ...], ...]
"""``versions[stage][period]``: the weight version that a period's work uses on a stage."""


@dataclass(frozen=True, slots=True)
class Share:
    """The micro-batches, or the part of one, that a backward differentiates.

    Attributes:
        micro_batches: the micro-batch, or several together.
        part: number of the part, from 0.
        parts: number of parts.
        split: the stages on which input gradient and weight gradients are ops of their own, ascending.
    """

    micro_batches: tuple[int, ...]
    part: int = 0
    parts: int = 1
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """Micro-batches that go through a pipe together, and the shares that their backwards differentiate one by
    one.
    """

    pipe: int
    micro_batches: tuple[int, ...]
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, order=True)
class SkipLink:
    """A skip connection: a value that a stage makes for a later, non-adjacent stage; its gradient goes back
    the same way.

    A value without a gradient may be the same for all micro-batches of a period; it is made with the first
    micro-batch that its stage runs on a pipe.

    >>> print(SkipLink(0, 3), SkipLink(0, 1, once=True))
    0 to 3 0 to 1, once

    Attributes:
        source: the stage that makes it.
        target: the stage that receives it.
        once: whether it is made once a period and pipe, not for each micro-batch, and has no gradient.
    """

    source: int
    target: int
    once: bool = False

    def __str__(self) -> str:
        return f"{self.source} to {self.target}{', once' if self.once else ''}"


@dataclass(frozen=True)
class Workload:
    """All ops of some periods, and what each of them needs.

    Attributes:
        placement: which worker holds which stage of which pipe.
        micro_batches: micro-batches of one period (one update of every stage). Micro-batch m belongs to
            period ``m // micro_batches``.
        passes: passes through the pipes, by micro-batch.
        periods: number of updates of every stage, 1 or more.
        synchronous: whether a flush ends the only period, so that no work uses old weights.
        versions: the weight versions promised to each stage and period; None: no promise. Every
            synchronous workload uses version 0.
        trains: whether gradients are computed; otherwise only outputs (an evaluation).
        skips: skip connections, ascending.
        lengths: relative lengths of the slices into which each micro-batch is cut along its sequence; one:
            micro-batches are whole. With several, each forward is of one slice, and all parts are slices.
        further_kinds: kinds of ops without a product that each share has too, such as recomputations.
    """

    placement: Placement
    micro_batches: int
    passes: tuple[Pass, ...]
    periods: int = 1
    synchronous: bool = True
    versions: Versions | None = None
    trains: bool = True
    skips: tuple[SkipLink, ...] = ()
    lengths: tuple[int, ...] = (1,)
    further_kinds: tuple[OpKind, ...] = ()

    @property
    def recomputes(self) -> bool:
        """True if an op of its own computes a stage again before each backward."""
        return OpKind.RECOMPUTATION in self.further_kinds

    def recomputing(self, *, recomputes: bool) -> Workload:
        """Return the workload with recomputations, or without."""
        kinds = tuple(kind for kind in self.further_kinds if kind is not OpKind.RECOMPUTATION)
        return replace(self, further_kinds=(*kinds, OpKind.RECOMPUTATION) if recomputes else kinds)

    @property
    def total_micro_batches(self) -> int:
        """Micro-batches of all periods together."""
        return self.micro_batches * self.periods

    @property
    def slices(self) -> int:
        """Number of slices of each micro-batch."""
        return len(self.lengths)

    @property
    def sample_parts(self) -> int:
        """The most parts into which backwards divide a micro-batch's samples; a slice has all of them."""
        parts = (share.parts for work in self.passes for share in work.shares)
        return 1 if self.slices > 1 else max(parts, default=1)

    def work(self, op: Op) -> float:
        """Work of an op in micro-batches: 2 for a doubled forward, 0.5 for a half backward, its share of the
        sequence for a slice.
        """
        if self.slices == 1:
            return op.work
        return len(op.micro_batches) * self.lengths[op.part] / sum(self.lengths)

    def period_of(self, op: Op) -> int:
        """The period to whose gradients ``op`` adds, or whose samples it reads."""
        return op.micro_batches[0] // self.micro_batches

    def version(self, stage: int, period: int) -> int | None:
        """The weight version promised to a stage in a period; None: no promise, or no such period."""
        if self.synchronous:
            return 0
        return None if self.versions is None or period >= self.periods else self.versions[stage][period]

    # -- ops

    def ops(self) -> Iterator[Op]:
        """Every op, by micro-batch, then stage; versions as promised.

        >>> from .placement import linear
        >>> print(*plain(linear(2), 1, split=True).ops())
        F0.0 F0.1 I0.0 W0.0 I0.1 W0.1
        """
        stages = range(self.placement.stages)
        for work in self.passes:
            if not work.micro_batches:  # backwards without a forward, which ``faults`` reports
                continue
            used = [self.version(s, work.micro_batches[0] // self.micro_batches) or 0 for s in stages]
            for part in range(self.slices):
                for s in stages:
                    yield Op(OpKind.FORWARD, s, work.micro_batches, work.pipe, part, self.slices, used[s])
            for share in work.shares:
                for s in stages:
                    for kind in (*self.further_kinds, *kinds_of(share, s)):
                        yield Op(kind, s, share.micro_batches, work.pipe, share.part, share.parts, used[s])

    def needs(self, op: Op) -> tuple[Op, ...]:
        """The ops whose products an op takes: of its own stage first, then of the stage before or after.

        A backward takes the graph of its recomputation, if it has one, and otherwise that of its forward.

        Then follow ops at the other end of a skip connection, if it exists for each micro-batch, and last the
        op of the slice before or after, which leaves a state or its gradient.

        Raises:
            KeyError: the op does not belong to this workload.

        >>> from .placement import linear
        >>> work = plain(linear(2), 1)
        >>> [[str(need) for need in work.needs(op)] for op in work.ops()]
        [[], ['F0.0'], ['F0.0', 'B0.1'], ['F0.1']]
        """
        work = self._pass_of[op.micro_batches[0]]
        period = self.period_of(op)

        key = op.micro_batches, op.part, op.parts
        share = next((s for s in work.shares if (s.micro_batches, s.part, s.parts) == key), None)
        if share is None and not op.kind.is_forward:
            raise KeyError(op)

        def maker(product: Product, stage: int) -> Op:
            version = op.version if stage == op.stage else self.version(stage, period) or 0
            if share is None or product is Product.OUTPUT:
                part = op.part if self.slices > 1 else 0
                return Op(OpKind.FORWARD, stage, work.micro_batches, op.pipe, part, self.slices, version)
            kind = next(kind for kind in kinds_of(share, stage) if product in kind.makes)
            return Op(kind, stage, share.micro_batches, op.pipe, share.part, share.parts, version)

        needed = [] if op.kind.first is None else [maker(op.kind.first, op.stage)]
        if preceding := [kind for kind in op.kind.after if kind in self.further_kinds]:
            needed = [op._replace(kind=kind) for kind in preceding]
        takes = op.kind.takes
        if takes is not None:
            ends = [(op.stage - takes.goes, op.stage)[:: takes.goes]]
            ends = [end for end in ends if 0 <= end[0] < end[1] < self.placement.stages]
            ends += [(skip.source, skip.target) for skip in self.skips if not skip.once]
            for end in ends:
                before, after = end[:: takes.goes]
                if after == op.stage:
                    needed.append(maker(takes, before))
        before_it = op.part - op.kind.carries
        if self.slices > 1 and op.kind.carries and op.kind.gives and 0 <= before_it < self.slices:
            kinds = (kinds_of(s, op.stage) for s in work.shares if s.part == before_it)
            kind = op.kind if op.kind.is_forward else next(k for k in next(kinds) if op.kind.gives in k.makes)
            needed.append(op._replace(kind=kind, part=before_it))
        return tuple(needed)

    @cached_property
    def _pass_of(self) -> dict[int, Pass]:
        return {m: work for work in self.passes for m in work.micro_batches}

    # -- is it right?

    def faults(self) -> Iterator[str]:
        """Reasons why the ops do not make every product of every micro-batch exactly once."""
        passes: dict[int, list[Pass]] = defaultdict(list)
        for work in self.passes:
            for m in work.micro_batches:
                passes[m].append(work)
        for m in range(self.total_micro_batches):
            pipes = sorted({work.pipe for work in passes[m]})
            if len(pipes) > 1:
                shown = " and ".join(map(str, pipes))
                yield f"micro-batch {m} is on pipes {shown}; only one is allowed"
            elif not pipes:
                yield f"micro-batch {m} has no forward"
            elif len(passes[m]) > 1:
                yield f"micro-batch {m} of pipe {pipes[0]}: {len(passes[m])} forwards per stage, expected 1"
        for work in self.passes:
            yield from self._uncovered(work)
        yield from self._bad_skips()

    def _bad_skips(self) -> Iterator[str]:
        for number, skip in enumerate(self.skips):
            least = skip.source + (1 if skip.once else 2)
            if not 0 <= skip.source < least <= skip.target < self.placement.stages:
                yield (
                    f"skip {skip}: expected a stage and one after {'it' if skip.once else 'the next'}, of "
                    f"{self.placement.stages} stages"
                )
            elif skip in self.skips[:number]:
                yield f"skip {skip} exists more than once"

    def _uncovered(self, work: Pass) -> Iterator[str]:
        covered: dict[int, list[tuple[Fraction, Fraction]]] = {m: [] for m in work.micro_batches}
        for share in work.shares:
            if not covered.keys() >= set(share.micro_batches):
                yield (
                    f"pipe {work.pipe}: a backward of micro-batches {share.micro_batches} "
                    "that no one forward made together"
                )
                continue
            span = Fraction(share.part, share.parts), Fraction(share.part + 1, share.parts)
            for m in share.micro_batches:
                covered[m].append(span)
        for m, spans in covered.items() if self.trains else ():
            at = Fraction(0)
            for start, stop in (*sorted(spans), (Fraction(1), Fraction(1))):
                if start > at:
                    yield f"micro-batch {m} of pipe {work.pipe}: no backward of {_extent(at, start)}"
                if start < at:
                    twice = _extent(start, min(stop, at))
                    yield f"micro-batch {m} of pipe {work.pipe}: more than one backward of {twice}"
                at = max(at, stop)

    # -- others like it

    def of_periods(self, periods: int) -> Workload:
        """A copy with another number of periods; additional periods are like the last one, each with a
        version more.
        """
        count = self.micro_batches
        forwards = [p for p in self.passes if p.micro_batches]
        passes = [p for p in forwards if p.micro_batches[0] < count * periods]
        last = [p for p in forwards if p.micro_batches[0] // count == self.periods - 1]
        for more in range(1, periods - self.periods + 1):
            passes += [_moved(work, more * count) for work in last]
        versions = self.versions
        if versions is not None:
            late = range(1, periods - self.periods + 1)
            versions = tuple((*row[:periods], *(row[-1] + more for more in late)) for row in versions)
        return replace(self, passes=tuple(passes), periods=periods, versions=versions)

    def evaluation(self) -> Workload:
        """The workload of only the forwards of one period, of whole micro-batches."""
        passes = tuple(replace(p, shares=()) for p in self.of_periods(1).passes)
        return replace(
            self,
            passes=passes,
            periods=1,
            synchronous=True,
            versions=None,
            trains=False,
            lengths=(1,),
            further_kinds=(),
        )


def kinds_of(share: Share, stage: int) -> tuple[OpKind, ...]:
    """The kinds of op that differentiate a share on a stage."""
    return OpKind.BACKWARD.halves if stage in share.split else (OpKind.BACKWARD,)


def plain(
    placement: Placement,
    micro_batches: int,
    *,
    pipe_of: Callable[[int], int] | Sequence[int] = lambda _: 0,
    split: bool = False,
    periods: int = 1,
    version: Callable[[int, int], int] | None = None,
) -> Workload:
    """A workload in which every micro-batch runs alone.

    Args:
        placement: which worker holds which stage.
        micro_batches: number of micro-batches of one period.
        pipe_of: the pipe of each micro-batch.
        split: whether backwards are split on every stage.
        periods: number of updates of every stage; 1 if synchronous.
        version: for an asynchronous workload, the weight version that a (stage, period) uses.
    """
    split_stages = tuple(range(placement.stages)) if split else ()
    pipe = pipe_of if callable(pipe_of) else pipe_of.__getitem__
    passes = tuple(
        Pass(pipe(m), (m,), (Share((m,), split=split_stages),)) for m in range(micro_batches * periods)
    )
    if version is None:
        return Workload(placement, micro_batches, passes, periods)
    versions = tuple(tuple(version(s, t) for t in range(periods)) for s in range(placement.stages))
    return Workload(placement, micro_batches, passes, periods, synchronous=False, versions=versions)


def passes_of(ops: Iterable[Op]) -> tuple[Pass, ...]:
    """Division of orders' work into passes: their forwards, and the shares that backwards
    differentiate.

    A backward whose micro-batches no forward made together is a pass of its own, without micro-batches.
    """
    forwards: set[tuple[tuple[int, ...], int]] = set()
    shares: dict[tuple[int, tuple[int, ...], int, int], set[int]] = defaultdict(set)
    for op in ops:
        if op.kind.is_forward:
            forwards.add((op.micro_batches, op.pipe))
        else:
            split = shares[op.pipe, op.micro_batches, op.part, op.parts]
            if op.kind.half:
                split.add(op.stage)
    group_of = {(m, pipe): group for group, pipe in forwards for m in group}
    by_pass: dict[tuple[tuple[int, ...], int], list[Share]] = {key: [] for key in sorted(forwards)}
    for (pipe, batches, part, parts), split in sorted(shares.items()):
        groups = {group_of.get((m, pipe), ()) for m in batches}
        group = groups.pop() if len(groups) == 1 else ()
        by_pass.setdefault((group, pipe), []).append(Share(batches, part, parts, tuple(sorted(split))))
    return tuple(Pass(pipe, group, tuple(row)) for (group, pipe), row in by_pass.items())


def _moved(work: Pass, by: int) -> Pass:
    def moved(micro_batches: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(m + by for m in micro_batches)

    shares = tuple(replace(share, micro_batches=moved(share.micro_batches)) for share in work.shares)
    return Pass(work.pipe, moved(work.micro_batches), shares)


def _extent(start: Fraction, stop: Fraction) -> str:
    return "it" if stop - start == 1 else f"its part from {start} to {stop}"
