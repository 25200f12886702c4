"""What is too large to be built is refused before anything is built."""

from __future__ import annotations

import pytest

from counterflow.errors import ConfigError
from counterflow.schedule import registry, schemes
from counterflow.schedule.scheme import OptionType
from counterflow.schedule.scheme_keywords import Sizes


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


def test_the_keywords_of_type_checkers_are_the_options_of_all_schemes() -> None:
    assert set(Sizes.__annotations__) == set(registry.options())


def test_the_other_name_of_the_depth_does_not_hide_what_is_missing_or_unknown() -> None:
    with pytest.raises(ConfigError, match=r"zb-v needs micro_batches \(N: micro-batches of a mini-batch"):
        schemes.zb_v(stages=2)
    with pytest.raises(ConfigError, match="zb-v has no option 'microbatches'; its options: workers, micro"):
        schemes.zb_v(stages=2, microbatches=8)  # type: ignore[call-overload]
