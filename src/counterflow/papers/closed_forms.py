"""The papers' closed forms: bubble ratio, idle time, weights and activations of each scheme.

They stand beside the simulator as cross-checks and never decide. Every function quotes its source; where
a published form differs from an exact simulation its docstring says so and ``tables`` shows by how
much. Numbers are exact (``Fraction``). Units: time in forwards of one stage (F = 1); weights in stages;
activations in (stage x micro-batch), unless a docstring says models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from counterflow.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class Range:
    """A number that differs from worker to worker: the least and the most over all workers."""

    least: Fraction
    most: Fraction

    @classmethod
    def of(cls, least: Fraction | int, most: Fraction | int | None = None) -> Range:
        """From ``least`` to ``most``; one number for all workers if ``most`` is left out.

        >>> print(Range.of(5, 8), Range.of(2))
        5..8 2
        """
        return cls(Fraction(least), Fraction(least if most is None else most))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


# --- Flushed pipelines in one direction: GPipe, DAPPLE ---------------------------------------------------


def flushed_bubble_ratio(stages: int, micro_batches: int) -> Fraction:
    """(D−1)/(N+D−1), for any F and B.

    Source: GPipe and DAPPLE in Chimera, Table 2; GPipe in WPipe, Table 1.

    >>> flushed_bubble_ratio(stages=4, micro_batches=4)
    Fraction(3, 7)
    """
    return Fraction(stages - 1, micro_batches + stages - 1)


def flushed_idle(stages: int, forward: int = 1, backward: int = 2) -> Fraction:
    """(D−1)(F+B). Source: Chimera, section 2 (2(D−1) bubbles in equal slots).

    >>> flushed_idle(stages=4)
    Fraction(9, 1)
    """
    return Fraction((stages - 1) * (forward + backward))


def grouped_idle(
    stages: int, groups: int, forward: Fraction | int = 1, backward: Fraction | int = 2
) -> Fraction:
    """1/g of GPipe's idle time, for the same model and at least as many micro-batches as workers.

    Args:
        stages: D, the number of workers.
        groups: g, chunks of the model on each worker.
        forward: a worker's whole forward of one micro-batch, all its chunks together.
        backward: the same for the backward.

    Source: WPipe, appendix A.4, Figure 15.

    >>> grouped_idle(stages=4, groups=2)
    Fraction(9, 2)
    """
    return (stages - 1) * (Fraction(forward) + Fraction(backward)) / groups


def gpipe_activations(micro_batches: int) -> Range:
    """N on every worker. Source: Chimera, Table 2.

    >>> print(gpipe_activations(8))
    8
    """
    return Range.of(micro_batches)


def one_forward_one_backward_activations(stages: int) -> Range:
    """From 1 on the last worker to D on the first, for N >= D.

    Source: DAPPLE, PipeDream and PipeDream-2BW in Chimera, Table 2.

    >>> print(one_forward_one_backward_activations(8))
    1..8
    """
    return Range.of(1, stages)


# --- GEMS ----------------------------------------------------------------------------------------------


def gems_bubble_ratio(stages: int) -> Fraction:
    """(D−1)/(D+1/2): the limit for many micro-batches with B = 2F.

    Source: Chimera, Table 2; MixPipe, Table I.

    >>> gems_bubble_ratio(stages=4)
    Fraction(2, 3)
    """
    return Fraction(2 * (stages - 1), 2 * stages + 1)


def gems_makespan(stages: int, micro_batches: int, forward: int = 1, backward: int = 2) -> Fraction:
    """D·F + N·D·B + (N−1)·F, exact for B >= F. Source: Counterflow; no paper gives it.

    >>> gems_makespan(stages=4, micro_batches=2)
    Fraction(21, 1)
    """
    n = micro_batches
    return Fraction(stages * forward + n * stages * backward + (n - 1) * forward)


# --- Chimera -------------------------------------------------------------------------------------------


def chimera_bubble_ratio(stages: int, micro_batches: int, pairs: int = 1) -> Fraction:
    """(D−2f)/(2fN+D−2f); with one pair (D−2)/(2N+D−2).

    Exact in equal slots for N a multiple of D with ``direct``.

    Source: Chimera, Table 2 (f = 1) and Table 3.

    >>> chimera_bubble_ratio(stages=8, micro_batches=8)
    Fraction(3, 11)
    >>> chimera_bubble_ratio(stages=8, micro_batches=8, pairs=2)
    Fraction(1, 9)
    """
    bubbles = stages - 2 * pairs
    return Fraction(bubbles, 2 * pairs * micro_batches + bubbles)


def chimera_middle_bubble_ratio(stages: int, micro_batches: int) -> Fraction:
    """(D−2)/(3N/2+D−2): with B = 2F and the bubbles this leaves in the middle of the unit.

    Exact at N = D, and for ``forward-doubling`` at every multiple of 2D when a backward lasts as long as
    a doubled forward.

    Source: Chimera, section 2.

    >>> chimera_middle_bubble_ratio(stages=4, micro_batches=4)
    Fraction(1, 4)
    """
    return Fraction(2 * (stages - 2), 3 * micro_batches + 2 * (stages - 2))


def chimera_direct_idle(stages: int, units: int) -> Fraction:
    """2(D−2) + (K−1)(D−2) with B = 2F: K = N/D units, the middle bubbles of each.

    Source: Counterflow; Chimera, section 3.5 describes the bubbles without a number.

    >>> chimera_direct_idle(stages=4, units=2)
    Fraction(6, 1)
    """
    return Fraction((units + 1) * (stages - 2))


def chimera_critical_path(stages: int) -> tuple[int, int]:
    """(C_f, C_b): D forwards and 2D−2 backwards, at N = D and f = 1.

    Source: Chimera, section 3.4; Figure 6 is D = 6.

    >>> chimera_critical_path(stages=6)
    (6, 10)
    """
    return stages, 2 * stages - 2


def chimera_weights(pairs: int = 1) -> Fraction:
    """2f stages. Source: Chimera, Tables 2 and 3.

    >>> chimera_weights(pairs=2)
    Fraction(4, 1)
    """
    return Fraction(2 * pairs)


def chimera_activations(stages: int, pairs: int = 1) -> Range:
    """From D − D/(2f) + 1 to D; with one pair D/2 + 1 to D.

    Source: Chimera, Table 2 (f = 1) and Table 3.

    >>> print(chimera_activations(stages=8), chimera_activations(stages=8, pairs=2))
    5..8 7..8
    """
    return Range.of(stages - Fraction(stages, 2 * pairs) + 1, stages)


# --- MixPipe -------------------------------------------------------------------------------------------


def mixpipe_idle(stages: int, injected: int, early_forwards: int = 0) -> Fraction:
    """5D−3K−4−3Γ in units of F, with B = 2F and N = D.

    Exact for the paper's orders at D = 4 (Figure 3); not reachable with a peak of K+Γ for K < D/2 at
    D >= 6; not the best for K >= D/2.

    Source: MixPipe, section III-A, where N_bubbles = (5D−3K−4)/3 − Γ counts bubbles of F + B.

    >>> mixpipe_idle(stages=4, injected=2, early_forwards=1)
    Fraction(7, 1)
    """
    return Fraction(5 * stages - 3 * injected - 4 - 3 * early_forwards)


def mixpipe_bubble_ratio(stages: int, injected: int, early_forwards: int = 0) -> Fraction:
    """The idle time above over the makespan 3D + idle; N = D, B = 2F.

    Source: MixPipe, equation 1: D + N_bubbles times t_stage.

    >>> mixpipe_bubble_ratio(stages=4, injected=4)
    Fraction(1, 4)
    """
    idle = mixpipe_idle(stages, injected, early_forwards)
    return idle / (3 * stages + idle)


def mixpipe_chimera_bubble_ratio(stages: int) -> Fraction:
    """(D−2)/(3D−2) for Chimera at N = D, counting D/2−1 bubbles of F + B: no middle bubbles.

    Source: MixPipe, Table I.

    >>> mixpipe_chimera_bubble_ratio(stages=4)
    Fraction(1, 5)
    """
    return Fraction(stages - 2, 3 * stages - 2)


def mixpipe_activations(injected: int, early_forwards: int = 0) -> Range:
    """At most K+Γ on every worker (reached by the two middle ones). Source: MixPipe, section III-A.

    >>> print(mixpipe_activations(injected=4, early_forwards=1))
    5
    """
    return Range.of(injected + early_forwards)


def mixpipe_max_idle(stages: int) -> Fraction:
    """(D/2−1)(F+B) with ``injected="max"``, in units of F at B = 2F.

    Source: MixPipe, section III-C (D/2−1 bubbles of F + B).

    >>> mixpipe_max_idle(stages=8)
    Fraction(9, 1)
    """
    return Fraction(3 * (stages - 2), 2)


def mixpipe_max_activations(stages: int) -> Range:
    """3D/2−1 with ``injected="max"``. Source: MixPipe, section III-C.

    >>> print(mixpipe_max_activations(stages=8))
    11
    """
    return Range.of(Fraction(3 * stages, 2) - 1)


# --- Hanayo --------------------------------------------------------------------------------------------


def hanayo_idle(workers: int, units: int = 1) -> Fraction:
    """2(K+1)(P−1) for N = K·P with B = 2F, in forwards of one of the 2·P·waves stages.

    At K = 1 this is (P−1)·T_B/waves with the paper's T_B, a worker's backward of one micro-batch.

    Source: Hanayo, section 3.4 (numerator of equation 1) for K = 1; Counterflow for K > 1.

    >>> hanayo_idle(workers=4)
    Fraction(12, 1)
    """
    return Fraction(2 * (units + 1) * (workers - 1))


def hanayo_bubble_ratio(workers: int, waves: int) -> Fraction:
    """2(P−1)/(3·P·waves+2(P−1)), exact at N = P with B = 2F. Source: Counterflow.

    >>> hanayo_bubble_ratio(workers=2, waves=1)
    Fraction(1, 4)
    """
    return Fraction(2 * (workers - 1), 3 * workers * waves + 2 * (workers - 1))


def hanayo_published_bubble_ratio(workers: int, waves: int) -> Fraction:
    """(2P−2)/(3PW+P−1): equation 1 with B = 2F and free messages.

    Its denominator has only half of the idle time in it, so it is larger than the exact one.

    Source: Hanayo, section 3.4.

    >>> hanayo_published_bubble_ratio(workers=2, waves=1)
    Fraction(2, 7)
    """
    return Fraction(2 * workers - 2, 3 * workers * waves + workers - 1)


def hanayo_equation_1(
    workers: int,
    waves: int,
    forward: Fraction | int = 1,
    backward: Fraction | int = 2,
    message: Fraction | int = 0,
) -> Fraction:
    """Bubble ratio with messages.

    Args:
        workers: P, 2 or more.
        waves: W.
        forward: T_F, a worker's whole forward of one micro-batch.
        backward: T_B, its whole backward.
        message: T_C, one message.

    Source: Hanayo, equation 1.

    >>> hanayo_equation_1(workers=2, waves=1) == hanayo_published_bubble_ratio(2, 1)
    True
    """
    p, w = Fraction(workers), Fraction(waves)
    t_f, t_b, t_c = Fraction(forward), Fraction(backward), Fraction(message)
    above = t_b / w + (1 + 2 * w + 2 / p + (p - 2) / 3) * t_c
    share = p / (p - 1)
    below = share * t_f + (1 / (2 * w) + share) * t_b + ((p - 2) / 2 + 4 * w) * t_c
    return above / below


def hanayo_activations(workers: int, waves: int) -> Range:
    """From 2·waves·P − (P−1) stages to 2·waves·P: in micro-batches, divided by 2·waves, at most P.

    Source: Hanayo, section 3.4 (as other schemes); exact from Counterflow.

    >>> print(hanayo_activations(workers=4, waves=1))
    5..8
    """
    whole = 2 * waves * workers
    return Range.of(whole - (workers - 1), whole)


# --- Asynchronous schemes ------------------------------------------------------------------------------


def pipedream_weights(stages: int) -> Range:
    """D − s versions of stage s: from 1 to D. Source: Chimera, Table 2; WPipe, section 2.

    >>> print(pipedream_weights(stages=8))
    1..8
    """
    return Range.of(1, stages)


def pipedream_buffers(workers: int) -> Fraction:
    """(N+1)/2 models' weights in all workers together. Source: WPipe, Table 1.

    >>> pipedream_buffers(workers=4)
    Fraction(5, 2)
    """
    return Fraction(workers + 1, 2)


GPIPE_BUFFERS = Fraction(0)
"""Models' weights that GPipe buffers. WPipe's Table 1 does not count the one version that is in use."""

PIPEDREAM_2BW_BUFFERS = Fraction(2)
"""Models' weights that PipeDream-2BW buffers (WPipe, Table 1)."""

WPIPE_BUFFERS = Fraction(1)
"""Models' weights that WPipe buffers: G0, half a model, twice; G1's one version is not counted (Table 1)."""


def wpipe_published_activations(workers: int, micro_batches: int) -> Fraction:
    """(4M−N+1)/4 models' activations of one micro-batch, in all workers together.

    The sum of M (G0) and M − w (G1) half-stages over the workers. Source: WPipe, equation 2 and Table 1.

    >>> wpipe_published_activations(workers=4, micro_batches=8)
    Fraction(29, 4)
    """
    return Fraction(4 * micro_batches - workers + 1, 4)


def wpipe_activations(workers: int, micro_batches: int) -> Fraction:
    """(2M+N+1)/4 models' activations: the sum of the M + N − w half-stages that worker w holds at most.

    The published figure at M = N and (M−N)/2 less above. Source: Counterflow.

    >>> wpipe_activations(workers=4, micro_batches=8)
    Fraction(21, 4)
    """
    return Fraction(2 * micro_batches + workers + 1, 4)


def pipedream_published_activations(workers: int, micro_batches: int) -> Fraction:
    """(2M−N+1)/2 models' activations, for PipeDream and PipeDream-2BW. Source: WPipe, Table 1.

    Counts M − w on worker w, where 1F1B stashes N − w: the same at M = N.

    >>> pipedream_published_activations(workers=4, micro_batches=8)
    Fraction(13, 2)
    """
    return Fraction(2 * micro_batches - workers + 1, 2)


def one_forward_one_backward_model_activations(workers: int) -> Fraction:
    """(N+1)/2 models' activations: the sum of the N − w stages that worker w stashes.

    Source: Counterflow.

    >>> one_forward_one_backward_model_activations(workers=4)
    Fraction(5, 2)
    """
    return Fraction(workers + 1, 2)


RECOMPUTED_ACTIVATIONS = {
    "gpipe": Fraction(1),
    "pipedream-2bw": Fraction(1),
    "wpipe": Fraction(1, 2),
}
"""Models' activations with recomputation, stage inputs left out (WPipe, Table 1; PipeDream has none)."""


def messages(workers: int, partitions_per_worker: int = 1) -> int:
    """Messages of one micro-batch between workers: 2(pN−1), p = 1 for GPipe and 2BW, p = 2 for WPipe.

    Source: WPipe, section 3.4 (C_WPipe = 2(2N−1)·C_a, C_2BW = C_GPipe = 2(N−1)·C_a).

    >>> messages(workers=4), messages(workers=4, partitions_per_worker=2)
    (6, 14)
    """
    return 2 * (partitions_per_worker * workers - 1)


# --- By schedule ---------------------------------------------------------------------------------------


def published_bubble_ratio(schedule: Schedule) -> Fraction | None:
    """The papers' bubble ratio of a schedule; None where no paper gives one.

    It knows nothing of costs: see the function of each scheme for what it assumes.

    >>> from counterflow.schedule.schemes import dapple, interleaved
    >>> published_bubble_ratio(dapple(stages=4, micro_batches=4))
    Fraction(3, 7)
    >>> published_bubble_ratio(interleaved(workers=4, micro_batches=4)) is None
    True
    """
    form = _BUBBLE_RATIOS.get(schedule.scheme)
    return form(schedule) if form else None


def _of_gpipe(schedule: Schedule) -> Fraction:
    groups = schedule.stages // schedule.workers
    return flushed_bubble_ratio(schedule.workers, groups * schedule.micro_batches)


def _of_mixpipe(schedule: Schedule) -> Fraction | None:
    options = dict(schedule.options)
    injected, early = options.get("injected"), options.get("early_forwards")
    if schedule.micro_batches != schedule.stages:
        return None
    if not isinstance(injected, int) or not isinstance(early, int):
        return None
    return mixpipe_bubble_ratio(schedule.stages, injected, early)


_BUBBLE_RATIOS: dict[str, Callable[[Schedule], Fraction | None]] = {
    "gpipe": _of_gpipe,
    "dapple": lambda s: flushed_bubble_ratio(s.stages, s.micro_batches),
    "gems": lambda s: gems_bubble_ratio(s.stages),
    "chimera": lambda s: chimera_bubble_ratio(s.stages, s.micro_batches, s.pipes // 2),
    "mixpipe": _of_mixpipe,
    "hanayo": lambda s: hanayo_published_bubble_ratio(s.workers, s.stages // (2 * s.workers)),
    "pipedream": lambda _: Fraction(0),
    "pipedream-2bw": lambda _: Fraction(0),
    "wpipe": lambda _: Fraction(0),
}
