"""Numbers with their nouns."""

from __future__ import annotations


def plural(count: float, noun: str) -> str:
    """A number and its noun, in the plural unless the number is 1.

    >>> plural(1, "worker"), plural(8, "micro-batch"), plural(1200, "stage"), plural(3, "copy")
    ('1 worker', '8 micro-batches', '1,200 stages', '3 copies')
    """
    return f"{count:,} {noun if count == 1 else _many(noun)}"


def _many(noun: str) -> str:
    if noun.endswith(("ch", "s", "x")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"
