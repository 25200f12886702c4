"""The papers' figures that ``counterflow reproduce`` knows, by name."""

from __future__ import annotations

from .figure import Figure
from .figures_of_chimera import FIGURE_10, FIGURE_14, FIGURE_15, FIGURE_17, FIGURE_18
from .figures_of_others import HANAYO_11, MIXPIPE_8, MIXPIPE_9, WPIPE_8

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        FIGURE_10,
        FIGURE_14,
        FIGURE_15,
        FIGURE_17,
        FIGURE_18,
        MIXPIPE_8,
        MIXPIPE_9,
        HANAYO_11,
        WPIPE_8,
    )
}
"""In the papers' order."""
