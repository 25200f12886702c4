"""The papers' closed forms of a step's time, to be compared with a simulated one.

They assume that all stages are as slow as those of the slowest worker, and ignore memory and the order of
messages. They are shown next to a prediction and never decide: the planner does not import them. The form is
None if no paper implies one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from counterflow.planning.play import Play, sync_seconds
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.op import OpKind

from .closed_forms import gems_makespan
from .performance_models import chimera_critical_path, chimera_step, mixpipe_step, unoverlapped


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Inputs of the closed forms, in seconds.

    Attributes:
        forward: F, of one stage on one micro-batch.
        backward: B, including recomputation if there is any.
        message: C_p2p, one message between neighbours.
        allreduce: of a stage's gradients over its copies: one number for all stages, or one a stage.
        sync_mode: when a worker takes part in an all-reduce.
    """

    forward: float
    backward: float
    message: float
    allreduce: float | tuple[float, ...]
    sync_mode: Sync = Sync.EAGER_OPT

    def unoverlapped(self, schedule: Schedule) -> float:
        """The longest part of a worker's all-reduces that nothing hides.

        Source: Chimera, equation 1.
        """
        sums = self.allreduce if isinstance(self.allreduce, tuple) else (self.allreduce,) * schedule.stages
        if not any(sums):
            return 0.0
        forward, backward = self.forward + self.message, self.backward + self.message
        return max(unoverlapped(schedule, forward, backward, sums, self.sync_mode))


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Result of a closed form.

    Attributes:
        seconds: seconds of a step.
        source: source of the form.
    """

    seconds: float
    source: str

    def difference(self, simulated_seconds: float) -> float | None:
        """The form's seconds over the simulated ones, minus 1; None if a step takes no time."""
        return self.seconds / simulated_seconds - 1 if simulated_seconds else None


def closed_form(schedule: Schedule, times: StageTimes) -> ClosedForm | None:
    """The papers' closed form of a step of this schedule; None if there is none.

    >>> from counterflow.schedule.schemes import chimera
    >>> closed_form(chimera(stages=6, micro_batches=6), StageTimes(1.0, 2.0, 0.0, 0.0))
    ClosedForm(seconds=26.0, source='Chimera, equation 1')
    """
    form = _FORMS.get(schedule.scheme)
    return form(schedule, times) if form else None


def planned_closed_form(play: Play) -> ClosedForm | None:
    """The papers' closed form of a configuration that the planner simulated; None if there is none.

    The forms assume workers of equal speed.

    >>> from counterflow.planning import Configuration, Predictor
    >>> from counterflow.planning.task import load_example
    >>> task = load_example("chimera-bert48")
    >>> dapple = Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, replicas=8, samples=16)
    >>> planned_closed_form(Predictor(task.model, task.profile, task.cluster).play(dapple)).source
    'Chimera, Table 2'
    """
    if play.network.slowness and {*play.network.slowness} != {1.0}:
        return None
    stages, recomputed = play.stages, play.configuration.recompute is not Recompute.NONE
    forward, backward = stages.seconds(OpKind.FORWARD), stages.seconds(OpKind.BACKWARD)
    if recomputed:
        backward = [seconds + layers for seconds, layers in zip(backward, stages.recomputation, strict=True)]
    message = max(
        latency + per_byte * max(play.stages.message_bytes[:-1], default=0.0)
        for latencies, per_bytes in zip(
            play.network.latency_seconds, play.network.seconds_per_byte, strict=True
        )
        for latency, per_byte in zip(latencies, per_bytes, strict=True)
    )
    times = StageTimes(
        seconds_of_slowest(play.schedule, forward),
        seconds_of_slowest(play.schedule, backward),
        message,
        sync_seconds(play.stages, play.network) if play.network.copies > 1 else 0.0,
        play.configuration.sync,
    )
    form = closed_form(play.schedule, times)
    return form and ClosedForm(form.seconds * play.updates, form.source)


def seconds_of_slowest(schedule: Schedule, seconds: list[float]) -> float:
    """Seconds of a stage, averaged over the stages of the slowest worker."""
    by_worker = [
        [seconds[stage] for _, stage in schedule.placement.stages_on(worker)]
        for worker in range(schedule.workers)
    ]
    return max(sum(of_stages) / len(of_stages) for of_stages in by_worker)


def _flushed(schedule: Schedule, t: StageTimes) -> ClosedForm | None:
    depth, n = schedule.workers, schedule.micro_batches
    if schedule.stages != depth:
        return None
    seconds = (n + depth - 1) * (t.forward + t.backward) + 2 * (depth - 1) * t.message
    seconds += t.unoverlapped(schedule)
    return ClosedForm(seconds, "Chimera, Table 2")


def _chimera(schedule: Schedule, t: StageTimes) -> ClosedForm | None:
    options = dict(schedule.options)
    depth, n = schedule.stages, schedule.micro_batches
    if options.get("pairs") != 1 or options.get("concat") != "direct" or n % depth:
        return None
    path, beyond_ops = chimera_critical_path(depth, n), (t.unoverlapped(schedule),)
    seconds = chimera_step(t.forward, t.backward, t.message, path, beyond_ops)
    beyond = "" if n == depth else ", and Figure 7 b"
    return ClosedForm(seconds, f"Chimera, equation 1{beyond}")


def _gems(schedule: Schedule, t: StageTimes) -> ClosedForm | None:
    # D·F + N·D·B + (N−1)·F: one micro-batch at a time goes down and up.
    depth, n = schedule.stages, schedule.micro_batches
    forwards = gems_makespan(depth, n, 1, 0)
    backwards = gems_makespan(depth, n, 0, 1)
    messages = n * (depth - 1) + depth - 1
    seconds = float(forwards) * t.forward + float(backwards) * t.backward + messages * t.message
    return ClosedForm(seconds + t.unoverlapped(schedule), "Counterflow, from Chimera, section 2")


def _mixpipe(schedule: Schedule, t: StageTimes) -> ClosedForm | None:
    options = dict(schedule.options)
    depth, injected, early = schedule.stages, options.get("injected"), options.get("early_forwards")
    if schedule.micro_batches != depth or not isinstance(injected, int) or not isinstance(early, int):
        return None
    seconds = mixpipe_step(depth, t.forward + t.backward, injected, early, t.unoverlapped(schedule))
    return ClosedForm(seconds, "MixPipe, equations 1 and 6")


def _hanayo(schedule: Schedule, t: StageTimes) -> ClosedForm | None:
    workers, n = schedule.workers, schedule.micro_batches
    if n != workers:
        return None
    stages_per_worker = schedule.stages // workers  # stages of a worker: 2·waves
    work = n * stages_per_worker * (t.forward + t.backward)
    idle = (workers - 1) * stages_per_worker * t.backward / (stages_per_worker / 2)
    return ClosedForm(work + idle + t.unoverlapped(schedule), "Hanayo, section 3.4")


def _unflushed(schedule: Schedule, t: StageTimes) -> ClosedForm | None:
    stages_per_worker = schedule.stages // schedule.workers
    seconds = schedule.micro_batches * stages_per_worker * (t.forward + t.backward)
    return ClosedForm(seconds, "Chimera, Table 2" if schedule.scheme != "wpipe" else "WPipe, Table 1")


_FORMS: dict[str, Callable[[Schedule, StageTimes], ClosedForm | None]] = {
    "gpipe": _flushed,
    "dapple": _flushed,
    "gems": _gems,
    "chimera": _chimera,
    "mixpipe": _mixpipe,
    "hanayo": _hanayo,
    "pipedream": _unflushed,
    "pipedream-2bw": _unflushed,
    "wpipe": _unflushed,
}
