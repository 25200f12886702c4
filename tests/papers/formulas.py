"""Published formulas that only tests hold beside the simulator; those of the tables are in ``papers``."""

from __future__ import annotations

from fractions import Fraction

from counterflow.papers.closed_forms import (
    Range,
)


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


def chimera_direct_idle(stages: int, units: int) -> Fraction:
    """2(D−2) + (K−1)(D−2) with B = 2F: K = N/D units, the middle bubbles of each.

    Source: Counterflow; Chimera, section 3.5 describes the bubbles without a number.

    >>> chimera_direct_idle(stages=4, units=2)
    Fraction(6, 1)
    """
    return Fraction((units + 1) * (stages - 2))


def hanayo_idle(workers: int, units: int = 1) -> Fraction:
    """2(K+1)(P−1) for N = K·P with B = 2F, in forwards of one of the 2·P·waves stages.

    At K = 1 this is (P−1)·T_B/waves with the paper's T_B, a worker's backward of one micro-batch.

    Source: Hanayo, section 3.4 (numerator of equation 1) for K = 1; Counterflow for K > 1.

    >>> hanayo_idle(workers=4)
    Fraction(12, 1)
    """
    return Fraction(2 * (units + 1) * (workers - 1))


def hanayo_activations(workers: int, waves: int) -> Range:
    """From 2·waves·P − (P−1) stages to 2·waves·P: in micro-batches, divided by 2·waves, at most P.

    Source: Hanayo, section 3.4 (as other schemes); exact from Counterflow.

    >>> print(hanayo_activations(workers=4, waves=1))
    5..8
    """
    whole = 2 * waves * workers
    return Range.of(whole - (workers - 1), whole)


def one_forward_one_backward_model_activations(workers: int) -> Fraction:
    """(N+1)/2 models' activations: the sum of the N − w stages that worker w stashes.

    Source: Counterflow.

    >>> one_forward_one_backward_model_activations(workers=4)
    Fraction(5, 2)
    """
    return Fraction(workers + 1, 2)
