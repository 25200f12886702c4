"""Cuts of a plan improved by moving single layers between neighbouring stages, by simulated steps.

Cuts follow rules that estimate a step from the work of stages alone. Messages, sums of gradients and bubbles
of an order may make other cuts faster; a simulation knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..play import Play
from ..predict import Predictor

LESS = 1 - 1e-9
"""Share of a time above which there is no gain, because sums of floats round."""


def recut(predictor: Predictor, play: Play, stops: Callable[[], bool] = lambda: False) -> Play:
    """The same order with the cuts that no move of one layer to a neighbouring stage makes faster.

    Args:
        predictor: predictor of the plan's degrees.
        play: the simulated plan.
        stops: asked before each move; True ends the search.

    Returns:
        A play that fits, whose cuts are explicit; ``play`` itself if no move is faster.
    """
    best, improved = play, True
    while improved:
        improved = False
        for stage in range(len(best.stages.cuts)):
            for by in (-1, 1):
                if stops():
                    return best
                moved = _moved(predictor, best, stage, by)
                if moved is not None and moved.fits and moved.seconds < best.seconds * LESS:
                    best, improved = moved, True
    return best


def _moved(predictor: Predictor, play: Play, stage: int, by: int) -> Play | None:
    # The stage after ``stage`` begins ``by`` layers later; None: a stage would be empty.
    cuts = list(play.stages.cuts)
    cuts[stage] += by
    ends = [0, *cuts, len(play.inputs.model.layers)]
    if not ends[stage] < ends[stage + 1] < ends[stage + 2]:
        return None
    configuration = replace(play.configuration, cuts=tuple(cuts))
    return predictor.play_order(configuration, play.schedule, play.mini_batch)
