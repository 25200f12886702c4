"""The performance models of Chimera, MixPipe and Hanayo: their equations as functions.

Units: time in one unit of the caller's, seconds or forwards; sizes in samples and bytes. The equations take
all stages to be equally long and no message to wait for another. They are shown beside a simulation
(``formulas.py``) and decide nothing: the planner simulates.

Not here: Rabenseifner's all-reduce of Chimera's section 3.4, which is in ``planning/inputs/cluster.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync
from counterflow.schedule.op import Product
from counterflow.simulation import Costs, simulate

from .closed_forms import mixpipe_idle

# --- Chimera -------------------------------------------------------------------------------------------


def chimera_critical_path(stages: int, micro_batches: int | None = None) -> tuple[int, int]:
    """Forwards and backwards on the critical path, (C_f, C_b): D and 2D−2 at N = D.

    For N = K·D with direct concatenation D + 2(K−1) and K·(2D−2). Both are exact if a backward takes at least
    as long as a forward.

    Args:
        stages: D, even.
        micro_batches: N, a multiple of D; None means D.

    Source: Chimera, section 3.4; Figure 6 is D = 6. Counterflow for K > 1.

    >>> chimera_critical_path(stages=6), chimera_critical_path(stages=4, micro_batches=8)
    ((6, 10), (6, 12))
    """
    units = 1 if micro_batches is None else micro_batches // stages
    return stages + 2 * (units - 1), units * (2 * stages - 2)


def chimera_step(
    forward: float,
    backward: float,
    message: float,
    critical_path: tuple[int, int],
    unoverlapped: Sequence[float] = (0.0,),
) -> float:
    """Time of a step: T = (F_t + Comm_p2p)·C_f + (B_t + Comm_p2p)·C_b + max_i Comm_unoverlapped(i).

    Args:
        forward: F_t, of one stage on one micro-batch.
        backward: B_t, with recomputation if there is any.
        message: Comm_p2p, one message between neighbours.
        critical_path: (C_f, C_b), as of ``chimera_critical_path``.
        unoverlapped: by worker, the part of its all-reduces that no free region hides (``unoverlapped``).

    Source: Chimera, equation 1.

    >>> chimera_step(forward=1.0, backward=2.0, message=0.0, critical_path=(6, 10))
    26.0
    """
    forwards, backwards = critical_path
    return (forward + message) * forwards + (backward + message) * backwards + max(unoverlapped)


def unoverlapped(
    schedule: Schedule,
    forward: float,
    backward: float,
    sums: Sequence[float],
    mode: Sync = Sync.EAGER_OPT,
) -> tuple[float, ...]:
    """Seconds, by worker, of its all-reduces that the free regions of the order do not hide.

    A stage's all-reduce begins when all copies of its gradients are there, or later as ``mode`` says, and a
    worker's all-reduces follow each other. What lasts beyond the last op of the step is not overlapped. The
    regions a, b and c of Figure 6 are what lies between these moments and the end.

    Args:
        schedule: a synchronous schedule.
        forward: of one stage on one micro-batch, with its message, as the equation counts it.
        backward: the same of a backward.
        sums: by stage, Comm_allreduce.
        mode: when a worker takes part; ``eager-opt`` is the paper's choice (section 3.2).

    Source: Chimera, section 3.4.

    >>> from counterflow.schedule.schemes import chimera
    >>> unoverlapped(chimera(stages=4, micro_batches=4), 1.0, 2.0, (3.0,) * 4)
    (3.0, 4.0, 4.0, 3.0)
    """
    played = simulate(schedule, Costs(forward=forward, backward=backward))
    ends = [0.0] * schedule.workers
    last: dict[tuple[int, int], float] = {}
    for span in played.timeline:
        ends[span.worker] = span.end
        if Product.WEIGHT_GRADIENTS in span.op.kind.makes:
            last[span.worker, span.op.stage] = span.end
    starts: dict[int, float] = {}
    for (worker, stage), end in last.items():
        idles = any(gap.worker == worker and end <= gap.start < ends[worker] for gap in played.gaps)
        eager = mode is Sync.EAGER or (mode is Sync.EAGER_OPT and idles)
        starts[stage] = max(starts.get(stage, 0.0), end if eager else ends[worker])
    beyond = []
    for worker in range(schedule.workers):
        at = 0.0
        for start, stage in sorted((starts[stage], -stage) for holder, stage in last if holder == worker):
            at = max(at, start) + sums[-stage]
        beyond.append(max(0.0, at - played.makespan))
    return tuple(beyond)


# --- MixPipe -------------------------------------------------------------------------------------------


def mixpipe_bubbles(stages: int, injected: int, early_forwards: int = 0) -> Fraction:
    """Bubbles of a step: N_bubbles = (5D−3K−4)/3 − Γ, each as long as a forward and a backward.

    Source: MixPipe, section III-A; see ``closed_forms.mixpipe_idle`` for what orders reach it.

    >>> mixpipe_bubbles(stages=4, injected=2, early_forwards=1)
    Fraction(7, 3)
    """
    return mixpipe_idle(stages, injected, early_forwards) / 3


def mixpipe_step(
    stages: int, stage_seconds: float, injected: int, early_forwards: int = 0, sums: float = 0.0
) -> float:
    """Time of a step of N = D micro-batches: (D + N_bubbles)·t_stage, and what is not hidden of all-reduces.

    Args:
        stages: D.
        stage_seconds: t_stage, a forward and a backward of one stage on one micro-batch.
        injected: K.
        early_forwards: Γ.
        sums: the part of t_comm^a2a that is not overlapped.

    Source: MixPipe, the denominators of equations 1 and 6.

    >>> mixpipe_step(stages=4, stage_seconds=3.0, injected=2, early_forwards=1)
    19.0
    """
    return float(stages + mixpipe_bubbles(stages, injected, early_forwards)) * stage_seconds + sums


def mixpipe_throughput(
    samples: float, replicas: int, compute: float, messages: float = 0.0, sums: float = 0.0
) -> float:
    """Samples in a unit of time: T = B̂/(t_comp + t_comm^p2p + t_comm^a2a).

    Args:
        samples: B·N, samples of a step of one pipeline group.
        replicas: W.
        compute: t_comp, ``mixpipe_step``.
        messages: t_comm^p2p.
        sums: t_comm^a2a.

    Source: MixPipe, equation 6; equation 1 is W = 1 without communication.

    >>> mixpipe_throughput(samples=4 * 4, replicas=2, compute=19.0, messages=1.0)
    1.6
    """
    return samples * replicas / (compute + messages + sums)


@dataclass(frozen=True, slots=True)
class MixPipeModel:
    """Quantities that MixPipe measures to choose K and Γ: equations 2 to 5, for one depth.

    Attributes:
        stages: D.
        layers: L, of the whole model.
        base_size: B_base, samples of the micro-batch that was measured.
        base_flops: FLOPs(B_base), operations of a layer's forward and backward on these samples.
        base_activation_bytes: M_a(B_base), what one stage's forward saves of these samples.
        weight_bytes: M_θ, of a stage's weights, gradients and optimizer states.
        budget_bytes: M_budget, of a device.
        performance: FLOPS, operations in a second of the device as a function of the operations of a call.
    """

    stages: int
    layers: int
    base_size: float
    base_flops: float
    base_activation_bytes: float
    weight_bytes: float
    budget_bytes: float
    performance: Callable[[float], float]

    def flops(self, size: float) -> float:
        """FLOPs(B) = B/B_base · FLOPs(B_base). Source: MixPipe, equation 3."""
        return size / self.base_size * self.base_flops

    def stage_seconds(self, size: float) -> float:
        """t_stage = L/D · FLOPs(B)/FLOPS(FLOPs(B)), in seconds. Source: MixPipe, equation 2."""
        flops = self.flops(size)
        return self.layers / self.stages * flops / self.performance(flops)

    def largest_size(self, injected: int, early_forwards: int = 0) -> float:
        """B_largest = (M_budget − 2M_θ)·B_base/((K+Γ)·M_a(B_base)), in samples, not rounded; 0 or less if
        the weights alone do not fit.

        Source: MixPipe, equation 4.
        """
        room = self.budget_bytes - 2 * self.weight_bytes
        return room * self.base_size / ((injected + early_forwards) * self.base_activation_bytes)

    def throughput(self, injected: int, early_forwards: int = 0) -> float:
        """Samples a second of N = D micro-batches of B_largest samples, rounded down; 0 if not even one fits.

        Source: MixPipe, equation 1.
        """
        size = int(self.largest_size(injected, early_forwards))
        if size < 1:
            return 0.0
        step = mixpipe_step(self.stages, self.stage_seconds(size), injected, early_forwards)
        return mixpipe_throughput(size * self.stages, 1, step)

    def best(self) -> tuple[int, int]:
        """K and Γ with the largest throughput; of equal ones, those that save the fewest activations.

        Every even K from 2 to D and every Γ from 0 to (D−K)/2 is tried. The paper writes Γ from 1 on, which
        would leave nothing for K = D.

        Source: MixPipe, equation 5.
        """
        settings = [(k, g) for k in range(2, self.stages + 1, 2) for g in range((self.stages - k) // 2 + 1)]
        return max(settings, key=lambda setting: (self.throughput(*setting), -sum(setting)))


# --- Hanayo --------------------------------------------------------------------------------------------


def hanayo_equation_1(
    workers: int,
    waves: int,
    forward: float | Fraction = Fraction(1),
    backward: float | Fraction = Fraction(2),
    message: float | Fraction = Fraction(0),
) -> float | Fraction:
    """Bubble ratio of N = P micro-batches with messages.

    (T_B/W + (1 + 2W + 2/P + (P−2)/3)·T_C) / (P/(P−1)·T_F + (1/(2W) + P/(P−1))·T_B + ((P−2)/2 + 4W)·T_C).

    Its denominator has only half of the idle time in it, so without messages it is larger than the exact
    ratio.

    Args:
        workers: P, 2 or more.
        waves: W.
        forward: T_F, a worker's whole forward of one micro-batch.
        backward: T_B, its whole backward.
        message: T_C, one message.

    Returns:
        A ``Fraction`` if all times are; else a float.

    Source: Hanayo, equation 1.

    >>> hanayo_equation_1(workers=2, waves=1)
    Fraction(2, 7)
    """
    p, w = Fraction(workers), Fraction(waves)
    above = backward / w + (1 + 2 * w + 2 / p + (p - 2) / 3) * message
    share = p / (p - 1)
    below = share * forward + (1 / (2 * w) + share) * backward + ((p - 2) / 2 + 4 * w) * message
    return above / below
