"""How a picture looks where a caller has a say in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """What a caller may choose of a picture.

    Attributes:
        width: of the whole picture, in inches; None: as wide as the ops' numbers need.
        font: a font's name, one that matplotlib finds; None: DejaVu Sans.
        grey: shades of grey in place of colours.
    """

    width: float | None = None
    font: str | None = None
    grey: bool = False


USUAL = Look()
