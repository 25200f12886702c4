"""The papers' figures that ``counterflow reproduce`` knows, by name."""

from __future__ import annotations

from .chimera import FIGURE_10, FIGURE_14, FIGURE_15, FIGURE_16, FIGURE_17, FIGURE_18
from .others import HANAYO_11, HANAYO_12, MIXPIPE_8, MIXPIPE_9, MIXPIPE_10A, MIXPIPE_10B, WPIPE_8
from .published import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        FIGURE_10,
        FIGURE_14,
        FIGURE_15,
        FIGURE_16,
        FIGURE_17,
        FIGURE_18,
        MIXPIPE_8,
        MIXPIPE_9,
        MIXPIPE_10A,
        MIXPIPE_10B,
        HANAYO_11,
        HANAYO_12,
        WPIPE_8,
    )
}
"""In the papers' order."""
