"""Schedule of a run whose all-to-alls of experts run beside the compute of other micro-batches."""

from __future__ import annotations

from dataclasses import replace

from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.program.pairs import with_pairs
from counterflow.schedule.ir import Schedule


def as_overlapped(schedule: Schedule, execution: Execution, *, shares_process: bool) -> Schedule:
    """The schedule with its pairs if ``overlap_experts`` asks for them, otherwise without.

    Args:
        schedule: the schedule as it recomputes.
        execution: options of the run.
        shares_process: True if the workers are threads of one process.

    Raises:
        ConfigError: the schedule has no pairs, or they cannot run at once with the same numbers.
    """
    if not execution.overlap_experts:
        return replace(schedule, pairs=()) if schedule.pairs else schedule
    for conflict, reason in (
        (not schedule.synchronous, f"{schedule.scheme} is asynchronous; take a synchronous scheme"),
        (shares_process, "workers are threads, which have no all-to-all; start a process for each"),
        (
            execution.autocast is not None,
            "autocast has one cache of cast weights for all threads; take compute_dtype, or a "
            "MixedPrecisionPolicy of fully_shard",
        ),
        (execution.compile, "a compiled stage cannot be interrupted at an all-to-all; leave compile out"),
    ):
        if conflict:
            raise ConfigError(f"overlap_experts: {reason}")
    paired = with_pairs(schedule)
    if not paired.pairs:
        raise ConfigError(
            f"overlap_experts: {schedule} has no forward next to a backward of another stage that could "
            "begin with it; take dualpipe or dualpipe-v, or leave it out"
        )
    return paired
