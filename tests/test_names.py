"""Names are nouns: packages without pronouns and participles as names stay so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

REMAINING_BINDINGS = {"measure": 34, "planning": 3, "runtime": 12, "schedule": 5}
"""Bindings with such a name by room, of which there may be fewer but never more; elsewhere there is none."""

REMAINING = {"Made"}
"""Classes and modules that still have such a name."""


@pytest.fixture(scope="module")
def house() -> Iterator[Any]:
    """The script that counts them, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield import_module("house")


@pytest.fixture(scope="module")
def modules(house: Any) -> list[Any]:
    return list(house.modules().values())


def test_no_room_has_more_such_names_than_remain(modules: list[Any]) -> None:
    wrong: dict[str, list[tuple[Any, ...]]] = {}
    for module in modules:
        wrong.setdefault(module.room, []).extend((module.name, *place) for place in module.forbidden())
    more = {room: names for room, names in wrong.items() if len(names) > REMAINING_BINDINGS.get(room, 0)}
    assert not more, "rename them after the thing: benchmarks/house.py has the words"


def test_no_class_or_module_is_named_by_a_pronoun(house: Any, modules: list[Any]) -> None:
    names = {module.path.stem for module in modules} | {module.path.parent.name for module in modules}
    names |= {node.name for m in modules for node in m.nodes if isinstance(node, ast.ClassDef)}
    assert {name for name in names if house.is_forbidden(name)} <= REMAINING


def test_a_pronoun_is_seen(house: Any) -> None:
    text = "class Told:\n    def ask(self, found, *, its=1):\n        self.held, one = found\n"
    module = house.Module("x", house.ROOT / "x.py", text, ast.parse(text))
    names = {name for _, name in module.forbidden()}
    assert names == {"Told", "ask", "found", "held", "its", "one"}
