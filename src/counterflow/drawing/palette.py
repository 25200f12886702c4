"""The colours of every picture.

A lane (a pipe, or a chunk of a worker's stages) has a hue. Its forwards and recomputations are light, its
backwards and input gradients dark, its weight gradients between the two, so they differ in grey too. Hues
alternate between cool and warm. They were found by search for the largest smallest distance between all
shades (and the background) as seen with normal vision, protanopia, deuteranopia and tritanopia, the first
four first; ``tests/drawing/test_palette.py`` checks it.

Invariant: ``HUES`` alternates cool and warm, so pipes of the two directions never share a hue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Shade(Enum):
    """A colour of a hue, as an index into ``Hue.shades``."""

    LIGHT = 0
    DARK = 1
    MIDDLE = 2


@dataclass(frozen=True, slots=True)
class Hue:
    """A lane's colours, as ``#rrggbb``, and its hatch in a picture without colours."""

    name: str
    forward: str
    backward: str
    weights: str
    hatch: str = ""

    @property
    def shades(self) -> tuple[str, str, str]:
        """Forward, backward and weight gradients: a colour for each ``Shade``."""
        return self.forward, self.backward, self.weights


HUES = (
    Hue("blue", "#96c8fe", "#215dac", "#6783ed"),
    Hue("orange", "#fcbc48", "#986214", "#a7991c"),
    Hue("green", "#b6e2b1", "#074b02", "#798d62"),
    Hue("pink", "#fb86b2", "#833155", "#bc63a9"),
    Hue("violet", "#bd9cfc", "#513b7f", "#9f6bcc"),
    Hue("yellow", "#fdd977", "#6e5400", "#c7a762"),
    Hue("teal", "#62dfda", "#018073", "#6ca587"),
    Hue("red", "#fda19b", "#a73949", "#d85c46"),
)

_PATTERNS = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "||||", "oo")
"""The hatch of each hue's lane in a picture without colours."""

BACKGROUND = "#ffffff"
"""Colour of paper, and therefore of bubbles."""

INK = "#16181d"
"""Colour of text on paper and on forwards, of edges, and of the lines around the steady part."""

FAINT = "#6b7280"
"""Colour of axes and second lines."""

ON_DARK = "#ffffff"
"""Colour of text on backwards."""

INKS = Hue("text", INK, ON_DARK, INK)
"""Colour of text on each ``Shade``."""

NEUTRAL = Hue("grey", "#d3d7de", "#565d69", "#979ca5")
"""Colours in a legend that stand for all lanes."""

SYNC = "#e5e7eb"
"""Colour of gradient syncs: light grey under a hatch in ``SYNC_HATCH``."""

SYNC_HATCH = "#30343b"

GREY = Hue("grey", "#d8d8d8", "#585858", "#9e9e9e")
"""Colours of all lanes in a picture without colours."""

HATCHES = Hue("hatch", "#9a9a9a", "#8c8c8c", "#6e6e6e")
"""Hatch colours of a lane on each ``Shade``, in a picture without colours."""

MEMORY = "#9aa3b2"
"""Colour of the area under a worker's memory."""

HEAT = ("#f4f5f7", "#c3c9d4", "#8f99aa", "#5a6476", "#2b313c")
"""Colours of memory as a strip, from none to the maximum: greys that belong to no lane."""


def hue(lane_hue: int, *, grey: bool = False) -> Hue:
    """The hue of that number; numbers past the last start again.

    Args:
        lane_hue: number of the hue, from 0.
        grey: whether to use one grey for each shade instead of colours; then only the hatch distinguishes
            lanes.
    """
    place = lane_hue % len(HUES)
    return replace(GREY, hatch=_PATTERNS[place]) if grey else HUES[place]
