"""Comparisons of all schemes over several numbers of workers or micro-batches, or costs of a message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from counterflow.errors import ConfigError
from counterflow.simulation import Costs

from .compared import Compared
from .scheme_comparison import Comparison, Report, compare

SWEPT = {"workers": "workers", "micro_batches": "micro-batches", "p2p": "message"}
"""Sizes and costs that a sweep varies, with their nouns."""

_MOST_VALUES = 24
"""Maximum number of comparisons of a sweep."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A size or cost, and its values in ascending order."""

    name: str
    values: tuple[float, ...]

    @property
    def title(self) -> str:
        """Noun of the size or cost."""
        return SWEPT[self.name]


@dataclass(frozen=True, slots=True)
class Swept:
    """Comparisons, one per value of a sweep."""

    sweep: Sweep
    comparisons: tuple[Comparison, ...]

    @property
    def by_scheme(self) -> dict[str, list[Compared | None]]:
        """The fastest row of each scheme by value, and plain 1F1B; None: none within the limits."""
        tables = []
        for comparison in self.comparisons:
            table: dict[str, Compared] = {}
            for row in comparison.listed:
                of_baseline = comparison.baseline is not None and row.scheme == comparison.baseline.scheme
                table.setdefault(row.name if row.computed or of_baseline else row.scheme, row)
            tables.append(table)
        names = dict.fromkeys(name for table in reversed(tables) for name in table)
        return {name: [table.get(name) for table in tables] for name in names}


def parse_sweep(text: str) -> Sweep:
    """A sweep as people write it.

    Raises:
        ConfigError: the name is unknown, or a value is not a number.

    >>> parse_sweep("micro-batches=4,8,16")
    Sweep(name='micro_batches', values=(4.0, 8.0, 16.0))
    """
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in SWEPT:
        raise ConfigError(
            f"sweep={text}: give one of {', '.join(SWEPT)} and = with its values, separated by commas"
        )
    try:
        numbers = sorted({float(value) for value in values.split(",")})
    except ValueError:
        raise ConfigError(f"sweep={text}: the values must be numbers, separated by commas") from None
    if name != "p2p" and any(value != int(value) for value in numbers):
        raise ConfigError(f"sweep={text}: {SWEPT[name]} must be whole numbers")
    if len(numbers) > _MOST_VALUES:
        raise ConfigError(f"sweep={text}: at most {_MOST_VALUES} values are compared")
    return Sweep(name, tuple(numbers))


def compare_over(sweep: Sweep, *, report: Report | None = None, **arguments: Any) -> Swept:
    """Compare all schemes for each value of a sweep.

    Args:
        sweep: what varies.
        report: called with the progress.
        arguments: arguments of ``compare``; that of the sweep is replaced.

    Raises:
        ConfigError: as in ``compare``; or costs of messages are swept with a profile.
    """
    if sweep.name == "p2p" and arguments.get("profile") is not None:
        raise ConfigError("sweep=p2p: the profile has the costs of messages; sweep workers or micro_batches")
    comparisons = []
    total = len(sweep.values)
    for place, value in enumerate(sweep.values):
        if report is not None:
            report(place, total, f"{sweep.title} {value:g}")
        changed = dict(arguments)
        if sweep.name == "p2p":
            changed["costs"] = replace(arguments.get("costs") or Costs(), p2p=value)
        else:
            changed[sweep.name] = int(value)
        changed["seconds"] = arguments.get("seconds", 0.0) / total
        comparisons.append(compare(**changed))
    return Swept(sweep, tuple(comparisons))
