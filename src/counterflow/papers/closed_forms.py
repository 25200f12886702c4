"""The papers' closed forms: bubble ratio, idle time, weights and activations of each scheme.

They are cross-checks of the simulator and never decide. Every function quotes its source; if a published form
differs from an exact simulation, its docstring says so and ``tables`` shows by how much. Numbers are exact
(``Fraction``). Units: time in forwards of one stage (F = 1); weights in stages; activations in (stage x
micro-batch), unless a docstring says models.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Range:
    """A number that differs between workers: its minimum and maximum over all workers."""

    least: Fraction
    most: Fraction

    @classmethod
    def of(cls, least: Fraction | int, most: Fraction | int | None = None) -> Range:
        """From ``least`` to ``most``; one number for all workers if ``most`` is omitted.

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

    Exact for the paper's orders at D = 4 (Figure 3). For K >= D/2 there are orders with less. For K < D/2 and
    D >= 6 most settings have no symmetric order with K/2 forwards first and a peak of K+Γ that reaches it: up
    to D = 12 only (6, 2, 2), (10, 4, 2), (10, 4, 3) and (12, 4, 2..4) have one, as (D, K, Γ).

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


def wpipe_activations(workers: int, micro_batches: int, groups: int = 2) -> Fraction:
    """(2M + (2G−3)N + 1)/(2G) models' activations of one micro-batch, in all workers together.

    The sum over the workers of M + (G−1)N − w stages, of which each is 1/(GN) of the model; exact. With two
    groups (2M+N+1)/4: the published figure at M = N and (M−N)/2 less above.

    Source: Counterflow.

    >>> wpipe_activations(workers=4, micro_batches=8), wpipe_activations(workers=4, micro_batches=8, groups=3)
    (Fraction(21, 4), Fraction(29, 6))
    """
    return Fraction(2 * micro_batches + (2 * groups - 3) * workers + 1, 2 * groups)


def wpipe_weights(groups: int = 2) -> Fraction:
    """(G+1)/G models' weights: two versions of the first group and one of each other.

    Source: WPipe, section 3.3 (G = 2); Counterflow.

    >>> wpipe_weights(), wpipe_weights(groups=3)
    (Fraction(3, 2), Fraction(4, 3))
    """
    return Fraction(groups + 1, groups)


def pipedream_published_activations(workers: int, micro_batches: int) -> Fraction:
    """(2M−N+1)/2 models' activations, for PipeDream and PipeDream-2BW. Source: WPipe, Table 1.

    Counts M − w on worker w, where 1F1B stashes N − w: the same at M = N.

    >>> pipedream_published_activations(workers=4, micro_batches=8)
    Fraction(13, 2)
    """
    return Fraction(2 * micro_batches - workers + 1, 2)


RECOMPUTED_ACTIVATIONS = {
    "gpipe": Fraction(1),
    "pipedream-2bw": Fraction(1),
    "wpipe": Fraction(1, 2),
}
"""Models' activations with recomputation, without stage inputs (WPipe, Table 1; PipeDream has none)."""


def messages(workers: int, partitions_per_worker: int = 1) -> int:
    """Messages of one micro-batch between workers: 2(pN−1), p = 1 for GPipe and 2BW, p = 2 for WPipe.

    Source: WPipe, section 3.4 (C_WPipe = 2(2N−1)·C_a, C_2BW = C_GPipe = 2(N−1)·C_a).

    >>> messages(workers=4), messages(workers=4, partitions_per_worker=2)
    (6, 14)
    """
    return 2 * (partitions_per_worker * workers - 1)
