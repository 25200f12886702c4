"""Shape of a workload and promises of its scheme: all that bounds use of a schedule that is not built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from counterflow.schedule.ir import OptionValue
from counterflow.schedule.orders.slices import lengths_of
from counterflow.schedule.placement import Placement
from counterflow.schedule.scheme import SLICES, Scheme

Options = tuple[tuple[str, OptionValue], ...]


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The shape of a schedule's workload, without distinguishing micro-batches, for bounds.

    Attributes:
        placement: which worker holds which stage of which pipe.
        passes: number of micro-batches of an update on each pipe.
        together: maximum micro-batches that go through each pipe together; 1 if none do.
        parts: maximum parts into which a micro-batch's backward is divided.
        split: whether backwards may be split.
        most_stashed: upper bound of the micro-batches (of one stage) that a worker stashes; None: unknown.
        most_in_flight: upper bound of a pipe's micro-batches between their forward on stage 0 and their input
            gradient there; None: unknown.
        synchronous: whether updates flush the pipeline.
        lengths: relative lengths of the slices of a micro-batch; one: it is whole.
        all_parts: whether the backward of every micro-batch is divided into ``parts``.
    """

    placement: Placement
    passes: tuple[int, ...]
    together: tuple[int, ...]
    parts: int
    split: bool
    most_stashed: int | None
    most_in_flight: int | None
    synchronous: bool
    lengths: tuple[int, ...] = (1,)
    all_parts: bool = False

    @property
    def without_promise(self) -> tuple[object, ...]:
        """The shape without the scheme's promises about its order."""
        return (
            self.placement,
            self.passes,
            self.together,
            self.parts,
            self.split,
            self.synchronous,
            self.lengths,
        )

    def only_work_counts(self, *, barrier: bool) -> bool:
        """True if only the work bounds an update: steps overlap, or a backward is in parts and split.

        Args:
            barrier: whether a step begins when the previous one has ended on all workers.
        """
        return (self.split and self.parts > 1) or not self.synchronous or not barrier

    def sliced(self, lengths: tuple[int, ...]) -> WorkloadShape | None:
        """The shape with slices of these relative lengths, for which schemes promise nothing about an order;
        None if its micro-batches cannot be sliced.
        """
        if not self.synchronous or self.parts > 1 or max(self.together) > 1:
            return None
        return replace(self, most_stashed=None, most_in_flight=None, lengths=lengths)


def shape_of(scheme: Scheme, options: Options) -> WorkloadShape:
    """The shape of the schedule that a scheme makes, with ``slices`` among its options perhaps.

    Raises:
        ConfigError: the scheme makes no schedule with these options.
    """
    values = dict(options)
    if SLICES in values and scheme.option(SLICES) is None:
        lengths = lengths_of(values.pop(SLICES))
        unsliced = shape_of(scheme, tuple(values.items()))
        return unsliced.sliced(lengths) or unsliced
    # Options that only change the order make the same workload.
    needed = tuple(
        (name, v) for name, v in options if not (known := scheme.option(name)) or not known.order_only
    )
    shape = _shape(scheme, needed)
    promises = (promise and promise(**values) for promise in (scheme.most_stashed, scheme.most_in_flight))
    most_stashed, most_in_flight = promises
    # Micro-batches in flight on stage 0 are stashed there.
    both = [most for most in (most_stashed, most_in_flight) if most is not None]
    return replace(shape, most_stashed=most_stashed, most_in_flight=min(both, default=None))


@lru_cache(maxsize=1024)
def _shape(scheme: Scheme, options: Options) -> WorkloadShape:
    single = {"periods": 1} if scheme.option("periods") else {}
    workload = scheme.workload_of(dict(options) | single)
    pipes = workload.placement.pipes
    passes, together, parts, split = [0] * pipes, [1] * pipes, 1, False
    shares = {share.parts for pipe_pass in workload.passes for share in pipe_pass.shares}
    for pipe_pass in workload.passes:
        count = len(pipe_pass.micro_batches)
        passes[pipe_pass.pipe] += count
        together[pipe_pass.pipe] = max(together[pipe_pass.pipe], count)
        for share in pipe_pass.shares:
            parts = max(parts, share.parts)
            split = split or bool(share.split)
    return WorkloadShape(
        placement=workload.placement,
        passes=tuple(passes),
        together=tuple(together),
        parts=parts,
        split=split,
        most_stashed=None,  # see shape_of
        most_in_flight=None,
        synchronous=workload.synchronous,
        all_parts=len(shares) == 1,
    )
