"""Constraints on a plan, as flags of ``counterflow plan``; the planner says whether they can be met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from counterflow.common.cli_fields import cli_fields
from counterflow.errors import ConfigError
from counterflow.planning.inputs.model import Model
from counterflow.planning.search.constraints import Constraints, cuts_of
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.scheme import OptionType

from .flags import Flags, cli_flag, plain_value

_FIELDS = cli_fields(Constraints)

_PANEL = "Limits on plans: each may be repeated; without one, everything is tried"


class PlanLimits(Flags):
    """Constraints on a plan."""

    @classmethod
    def flags(cls) -> dict[str, Any]:
        """Every constraint of the planner."""
        return {name: cli_flag(field, _PANEL) for name, field in _FIELDS.items()}

    def constraints(self, model: Model) -> Constraints:
        """The constraints as the planner accepts them.

        Args:
            model: what is planned, whose layers a layout names.

        Raises:
            ConfigError: a text has another form.
        """
        texts = {name: value for name, value in self.values.items() if value}
        read = {_FIELDS[name].field: _read(name, value) for name, value in texts.items() if name != "cuts"}
        if "cuts" in texts:
            read["cuts"] = cuts_of(texts["cuts"], model)
        return Constraints(**read)


def _read(name: str, value: Any) -> Any:
    return _READERS[name](value) if name in _READERS else value


def wanted_options(texts: Sequence[str]) -> tuple[tuple[str, tuple[OptionValue, ...]], ...]:
    """The accepted values of each option, from ``NAME=VALUE`` or ``SCHEME.NAME=VALUE``; values of the same
    name are collected.

    Raises:
        ConfigError: a text has another form.

    >>> wanted_options(["chimera.pairs=1", "chimera.pairs=2", "split=false", "micro-batches=8"])
    (('chimera.pairs', (1, 2)), ('split', (False,)), ('micro_batches', (8,)))
    """
    values_by_name: dict[str, list[OptionValue]] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        scheme, dot, option = name.rpartition(".")
        if not (equals and option and value) or (dot and not scheme):
            raise ConfigError(
                f"--option {text}: must be NAME=VALUE or SCHEME.NAME=VALUE, as in chimera.pairs=1"
            )
        option = option.replace("-", "_")
        values_by_name.setdefault(f"{scheme}{dot}{option}", []).append(_value(option, value))
    return tuple((name, tuple(values)) for name, values in values_by_name.items())


def _value(option: str, text: str) -> OptionValue:
    known = next(iter(registry.options().get(option, {}).values()), None)
    if known is not None and known.kind is OptionType.FLAG and text in ("true", "false"):
        return text == "true"
    return plain_value(text)


_READERS: dict[str, Callable[[Any], Any]] = {
    "option": wanted_options,
}
"""Parsers of flags whose texts have a form of their own."""
