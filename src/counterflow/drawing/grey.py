"""A picture without colours, for papers that are printed in black."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgba_array


def in_grey(drawn: Artist) -> None:
    """Replace every colour by the grey of the same lightness."""
    for artist in drawn.findobj():
        for name in ("facecolor", "edgecolor", "color", "hatchcolor", "markeredgecolor"):
            setter, getter = getattr(artist, f"set_{name}", None), getattr(artist, f"get_{name}", None)
            if setter is None or getter is None or (name == "color" and hasattr(artist, "set_facecolor")):
                continue
            rgba = to_rgba_array(getter())
            if len(rgba):
                rgba[:, :3] = (rgba[:, :3] @ _LIGHTNESS)[:, None]
                setter(rgba if len(rgba) > 1 else tuple(rgba[0]))


_LIGHTNESS = np.array([0.2126, 0.7152, 0.0722])
"""Weights of red, green and blue (ITU-R BT.709)."""
