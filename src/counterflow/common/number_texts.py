"""Numbers as people read them: in few digits, and bytes in binary units.

Invariant: the same number always gives the same text.
"""

from __future__ import annotations


def compact(value: float, digits: int = 4) -> str:
    """``value`` in about ``digits`` significant digits, without trailing zeros or an exponent.

    >>> compact(30.0), compact(33.33333), compact(123456.7), compact(0.25)
    ('30', '33.33', '123457', '0.25')
    """
    magnitude = abs(value)
    places = digits - 1
    while magnitude >= 10 and places > 0:
        magnitude /= 10
        places -= 1
    if 0 < magnitude < 0.1:
        return f"{value:.{digits}g}"
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def byte_size(size: float, digits: int = 4) -> str:
    """``size`` bytes in the binary unit that leaves 1 to 1023 before the point.

    >>> byte_size(0), byte_size(1536), byte_size(13.256 * 2**30), byte_size(13.256 * 2**30, digits=3)
    ('0 B', '1.5 KiB', '13.26 GiB', '13.3 GiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{compact(size, digits)} {unit}"
