"""What the engine cannot run of what the checker accepts, told before anything starts."""

from __future__ import annotations

from counterflow.errors import ConfigError

from .ir import OpKind, Schedule


def refuse_what_cannot_run(schedule: Schedule) -> None:
    """Refuse a schedule whose ops the engine does not have.

    Raises:
        ConfigError: a backward is split, or is of several micro-batches at once, or parts of one micro-batch
            differ in size.
    """
    for op in schedule.ops():
        if op.kind in (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENTS):
            raise ConfigError(
                f"the schedule ({schedule.scheme}) splits its backward ({op}): it can be checked, simulated "
                "and drawn, not trained; take one whose backwards are whole"
            )
        if op.kind is OpKind.BACKWARD and len(op.micro_batches) > 1:
            raise ConfigError(
                f"the schedule ({schedule.scheme}) has a backward of several micro-batches ({op}), which "
                "cannot be trained; give each micro-batch a backward of its own"
            )
    for one in schedule.workload.passes:
        parts = {share.micro_batches: share.parts for share in one.shares}
        for share in one.shares:
            if share.parts != parts[share.micro_batches]:
                raise ConfigError(
                    f"the schedule ({schedule.scheme}) divides the backward of micro-batch "
                    f"{share.micro_batches[0]} in parts of other sizes, which cannot be trained; "
                    "divide it evenly"
                )
