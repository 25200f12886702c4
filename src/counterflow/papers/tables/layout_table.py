"""A published table with a measured column beside it.

Invariant: a row whose measured value differs from its formula names a note with the reason (``Table`` refuses
one that does not). Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from ..closed_forms import Range

COLUMNS = (
    "scheme",
    "quantity",
    "setting",
    "source",
    "formula",
    "value",
    "measured",
    "difference",
    "note",
)
"""Columns of ``Row.cells``, in order."""


class Relation(Enum):
    """Relation between a published value and the measured one."""

    EXACTLY = "="
    AT_MOST = "≤"
    TENDS_TO = "→"


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one scheme.

    Attributes:
        scheme: the scheme with the options that matter, as text.
        quantity: what is counted, with its unit.
        setting: micro-batches, and the times where they matter.
        source: source of the formula: a table or section of a paper, or Counterflow.
        formula: the formula as published.
        value: value of the formula at the setting; None if it gives none.
        measured: value by the simulator.
        relation: relation between formula and measured value.
        notes: keys of the table's notes that explain this row.
    """

    scheme: str
    quantity: str
    setting: str
    source: str
    formula: str
    value: Range | None
    measured: Range
    relation: Relation = Relation.EXACTLY
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> Range | None:
        """Measured minus formula, at the minimum and at the maximum over workers."""
        if self.value is None:
            return None
        least = self.measured.least - self.value.least
        return Range(least, self.measured.most - self.value.most)

    @property
    def deviates(self) -> bool:
        """True if the measured value differs from the formula's or, for a bound, exceeds it."""
        if self.difference is None:
            return False
        if self.relation is Relation.AT_MOST:
            return self.difference.most > 0
        return self.difference != Range.of(0)

    def cells(self) -> tuple[str, ...]:
        """The row as texts, one per column of ``COLUMNS``."""
        value = "" if self.value is None else f"{self.relation.value} {_shown(self.value)}"
        difference = "" if self.difference is None else _shown(self.difference, sign="+")
        return (
            self.scheme,
            self.quantity,
            self.setting,
            self.source,
            self.formula,
            value,
            _shown(self.measured),
            difference,
            " ".join(self.notes),
        )


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a paper, reproduced.

    Raises:
        ValueError: a row deviates and has no note, or names an unknown note.
    """

    name: str
    title: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: Mapping[str, str]

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.deviates and not row.notes:
                raise ValueError(
                    f"{self.name}: {row.scheme}, {row.quantity}, {row.setting}: measured "
                    f"{row.measured}, {row.formula} gives {row.value}, and no note says why"
                )
            for note in row.notes:
                if note not in self.notes:
                    raise ValueError(f"{self.name}: {row.scheme}: no note {note!r}")


def _shown(value: Range, sign: str = "") -> str:
    least, most = (_number(end, sign) for end in (value.least, value.most))
    return least if value.least == value.most else f"{least}..{most}"


def _number(value: Fraction, sign: str) -> str:
    plus = sign if value > 0 else ""
    return f"{plus}{value.numerator}" if value.denominator == 1 else f"{plus}{float(value):.4g}"
