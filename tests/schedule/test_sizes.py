"""What is too large to be built is refused before anything is built."""

from __future__ import annotations

import pytest

from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.scheme import OptionType


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option.name)
        for name, known in registry.SCHEMES.items()
        for option in known.options
        if option.kind is OptionType.NUMBER
    ],
)
def test_no_number_makes_a_schedule_too_large_to_build(name: str, option: str) -> None:
    given: dict[str, int | str] = {o.name: 4 for o in registry.SCHEMES[name].options if o.required}
    with pytest.raises(ConfigError):
        registry.build(name, given | {option: 10**19})
