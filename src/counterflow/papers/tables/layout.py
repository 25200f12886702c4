"""A published table with a measured column beside it.

Invariant: a row whose measured value is not what its formula says names a note that says why
(``Table`` refuses one that does not). What it does not do: print itself.
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
"""What ``Row.cells`` has, in order."""


class Relation(Enum):
    """How a published value is meant."""

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
        source: whose formula this is: a table or section of a paper, or Counterflow.
        formula: the formula as it is published.
        value: the formula at the setting; None where it gives none.
        measured: what the simulator finds.
        relation: how the formula is meant.
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
        """Measured minus formula, at the least and at the most loaded worker."""
        if self.value is None:
            return None
        least = self.measured.least - self.value.least
        return Range(least, self.measured.most - self.value.most)

    @property
    def deviates(self) -> bool:
        """Whether the measured value is another than the formula's; where that is a bound, above it."""
        if self.difference is None:
            return False
        if self.relation is Relation.AT_MOST:
            return self.difference.most > 0
        return self.difference != Range.of(0)

    def cells(self) -> tuple[str, ...]:
        """The row as text, a cell for each of ``COLUMNS``."""
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
        ValueError: a row deviates and has no note, or names a note that is not there.
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
