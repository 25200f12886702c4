"""Options for the look of a picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """Options of a caller for the look of a picture.

    Attributes:
        width: width of the whole picture in inches; None: as wide as the ops' numbers need.
        font: name of a font that matplotlib finds; None: DejaVu Sans.
        grey: whether to use shades of grey instead of colours.
    """

    width: float | None = None
    font: str | None = None
    grey: bool = False


USUAL = Look()
