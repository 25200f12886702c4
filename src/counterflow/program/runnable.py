"""Schedules that the checker accepts but the runtime cannot run, refused before anything starts."""

from __future__ import annotations

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule


def refuse_what_cannot_run(schedule: Schedule) -> None:
    """Refuse a schedule with ops that the runtime does not have.

    Raises:
        ConfigError: a backward has several micro-batches, or parts of one differ in size.
    """
    for op in schedule.ops():
        if not op.kind.is_forward and len(op.micro_batches) > 1:
            raise ConfigError(
                f"the schedule ({schedule.scheme}) has a backward of several micro-batches ({op}), which "
                "cannot be trained; give each micro-batch a backward of its own"
            )
    for work in schedule.workload.passes:
        parts = {share.micro_batches: share.parts for share in work.shares}
        for share in work.shares:
            if share.parts != parts[share.micro_batches]:
                raise ConfigError(
                    f"the schedule ({schedule.scheme}) divides the backward of micro-batch "
                    f"{share.micro_batches[0]} into parts of different sizes, which cannot be trained; "
                    "divide it evenly"
                )
