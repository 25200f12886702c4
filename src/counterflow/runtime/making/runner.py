"""What runs a schedule on this worker: its proved lists, and who executes them."""

from __future__ import annotations

from collections.abc import Callable

from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.program.check import checked_program
from counterflow.program.lowering import Ends, Shared
from counterflow.program.segments import segments, steps
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync

from ..execution.interpreter import Interpreter
from ..execution.runner import Runner
from ..execution.step import Workers
from ..parameters.weights import Weights
from ..transport.base import Transport


def runner_of(
    schedule: Schedule,
    execution: Execution,
    make: Callable[..., Interpreter],
    *,
    workers: Workers,
    weights: Weights,
    statistics: tuple[int, ...],
) -> Runner:
    """The runner of a schedule, with its lists as they are proved.

    Args:
        schedule: what is run.
        execution: how.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        statistics: the stages with running statistics.

    Raises:
        ConfigError: the schedule does not go with the options or the weights.
        ScheduleError: the checker does not accept it.
    """
    transport, shared = workers.transport, Shared(weights.ties, statistics)
    if not schedule.synchronous:
        if execution.skip_non_finite:
            raise ConfigError(
                f"{schedule.scheme} updates each stage before all gradients are known, so that "
                "skip_non_finite cannot skip an update everywhere; take a synchronous scheme"
            )
        cut = segments(schedule, replicas=workers.replicas, matching=transport.matching, shared=shared)
        if weights.shared:
            raise ConfigError(
                f"{schedule.scheme} updates each stage at its own time, and {weights.shared[0]} is a weight "
                "of several stages; do not tie them, or take a synchronous scheme"
            )
    else:
        ends = Ends(execution.barrier, execution.waits_for_norm, weights.hooked)
        program = checked_program(
            schedule,
            replicas=workers.replicas,
            sync=when_summed(execution.sync, transport),
            times=execution.op_times,
            matching=transport.matching,
            shared=shared,
            ends=ends,
        )
        cut = steps(program, ends)
    return Runner(cut, make, workers, weights, execution)


def when_summed(asked: Sync, transport: Transport) -> Sync:
    """When gradients are summed: last, if a worker that a sum holds does not make what others need for it."""
    return Sync.END if transport.launches_hold else asked
