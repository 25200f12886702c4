"""Names are nouns: packages without pronouns and participles as names stay so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

CLEAN = (
    *("root", "api", "capture", "checkpoints", "cli", "common", "data", "drawing", "explore", "integrations"),
    *("models", "papers", "program", "synthesis", "training"),
)
"""Rooms none of whose bindings is one of the words; add a room when its last one is renamed."""

REMAINING = {"Made", "Asked", "Came", "Given", "Found", "Told", "_Held", "given", "told"}
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


@pytest.mark.parametrize("room", CLEAN)
def test_a_clean_room_stays_clean(modules: list[Any], room: str) -> None:
    wrong = [(m.name, *place) for m in modules if m.room == room for place in m.forbidden()]
    assert not wrong, "rename them after the thing: benchmarks/house.py has the words"


def test_no_class_or_module_is_named_by_a_pronoun(house: Any, modules: list[Any]) -> None:
    names = {module.path.stem for module in modules} | {module.path.parent.name for module in modules}
    names |= {node.name for m in modules for node in m.nodes if isinstance(node, ast.ClassDef)}
    assert {name for name in names if house.is_forbidden(name)} <= REMAINING


def test_a_pronoun_is_seen(house: Any) -> None:
    text = "class Told:\n    def ask(self, found, *, its=1):\n        self.held, one = found\n"
    module = house.Module("x", house.ROOT / "x.py", text, ast.parse(text))
    names = {name for _, name in module.forbidden()}
    assert names == {"Told", "ask", "found", "held", "its", "one"}
