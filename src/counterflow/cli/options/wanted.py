"""What ``counterflow plan`` is told of options and cuts; whether it can be met the planner says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.scheme import OptionType

from .flags import plain_value

if TYPE_CHECKING:
    from counterflow.planning.cost.stages import Cuts


def wanted_options(texts: Sequence[str]) -> tuple[tuple[str, tuple[OptionValue, ...]], ...]:
    """Each option's wanted values, from ``NAME=VALUE`` or ``SCHEME.NAME=VALUE``; several of a name add up.

    Raises:
        ConfigError: a text reads otherwise.

    >>> wanted_options(["chimera.pairs=1", "chimera.pairs=2", "split=false", "micro-batches=8"])
    (('chimera.pairs', (1, 2)), ('split', (False,)), ('micro_batches', (8,)))
    """
    found: dict[str, list[OptionValue]] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        scheme, dot, option = name.rpartition(".")
        if not (equals and option and value) or (dot and not scheme):
            raise ConfigError(
                f"--option {text}: must read NAME=VALUE or SCHEME.NAME=VALUE, as in chimera.pairs=1"
            )
        option = option.replace("-", "_")
        found.setdefault(f"{scheme}{dot}{option}", []).append(_value(option, value))
    return tuple((name, tuple(values)) for name, values in found.items())


def _value(option: str, text: str) -> OptionValue:
    known = next(iter(registry.options().get(option, {}).values()), None)
    if known is not None and known.kind is OptionType.FLAG and text in ("true", "false"):
        return text == "true"
    return plain_value(text)


def wanted_cuts(text: str | None) -> Cuts:
    """Where layers are cut: ``balanced``, ``even``, or the layers at which stages begin, with commas.

    Raises:
        ConfigError: it is something else.
    """
    from counterflow.planning.cost.stages import Cutting  # noqa: PLC0415  (numpy and pydantic take a while)

    if text is None:
        return Cutting.BALANCED
    if text in tuple(Cutting):
        return Cutting(text)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--cuts {text}: must be {' or '.join(Cutting)}, or the layers at which stages begin after the "
            "first, as in 13,25,37"
        ) from None
