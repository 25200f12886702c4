"""Costs as people write them, in a command or on a page: ``1.5``, ``1,1,2``, ``300MB``; parsed to ``Costs``.

Invariant: a text is parsed in one way everywhere; legal values are checked by ``Costs``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from counterflow.common.cli_fields import cli_fields
from counterflow.errors import ConfigError

from .costs import ByteCosts, Costs
from .op_costs import MOST_COST

COSTS = cli_fields(Costs, ByteCosts)
"""Costs that people may give, by the names of flags and of the page's forms."""

Named = Callable[[str], str]
"""Function that returns a cost's name for messages."""


def _plainly(name: str) -> str:
    return f"{name}="


def read(texts: Mapping[str, Any], named: Named = _plainly) -> dict[str, Any]:
    """Costs by name, with texts parsed to numbers; other values are unchanged.

    Raises:
        ConfigError: a text is not a number.

    >>> read({"forward": "1,2", "weight_bytes": "1.5KiB"})
    {'forward': (1.0, 2.0), 'weight_bytes': 1536.0}
    """
    values = dict(texts)
    for name, value in texts.items():
        if isinstance(value, str) and COSTS[name].spec.kind is str:
            values[name] = (bytes_of if COSTS[name].spec.metavar == "BYTES" else numbers_of)(
                name, value, named
            )
    return values


def costs_from(values: Mapping[str, Any]) -> Costs:
    """Costs for the simulator, from values by the names of ``read``.

    Raises:
        ConfigError: a cost is negative.
    """
    fields: dict[type, dict[str, Any]] = {Costs: {}, ByteCosts: {}}
    for name, value in values.items():
        fields[COSTS[name].record][COSTS[name].field] = value
    return Costs(**fields[Costs], memory=ByteCosts(**fields[ByteCosts]) if fields[ByteCosts] else None)


def numbers_of(name: str, text: str, named: Named = _plainly) -> float | tuple[float, ...]:
    """A number, or several separated by commas.

    Raises:
        ConfigError: the text is not a number.
    """
    what = f"a number, or numbers separated by commas, one per {'worker' if name == 'peak' else 'stage'}"
    return _numbers(named(name), text, float, what)


def bytes_of(name: str, text: str, named: Named = _plainly) -> float | tuple[float, ...]:
    """A size in bytes or several, as in 300MB or 1.5GiB.

    Raises:
        ConfigError: the text is not a size.
    """
    return _numbers(
        named(name), text, _bytes, "bytes as in 3e9, 300MB or 1.5GiB, or several, separated by commas"
    )


def _numbers(named: str, text: str, number: Callable[[str], float], wanted: str) -> float | tuple[float, ...]:
    values = []
    for part in text.split(","):
        try:
            values.append(number(part.strip()))
        except ValueError:
            raise ConfigError(f"{named}{text}: cannot read {part.strip()!r}; give {wanted}") from None
    return values[0] if len(values) == 1 else tuple(values)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)? *([kmgt]?i?b)?", text, re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    number, exponent, unit = match.groups(default="")
    size = float(number + exponent) * _UNITS[unit.upper()]
    if size > MOST_COST:
        raise ValueError(text)
    return size
