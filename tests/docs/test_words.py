"""Words that are not to come back in pages for people: one word a thing, the field's where it has one."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterflow.cli import application
from counterflow.cli.app import COMMANDS
from counterflow.training.load import known_keys

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"without a flush": "asynchronous",
    r"with a flush\b(?! before)": "synchronous",
    r"under way": "in flight",
    r"left away|leave one of them away": "default, use only one of them",
    r"\bso (many|often)\b": "given, this many, maximum",
    r"\bwhoever\b": "everybody who, the one that",
    r"\btold\b": "reported, received",
    r"\b(hears?|heard)\b": "receives, received",
    r"\b(for|to|of) who\b": "for those who",
    r"\bhand(s|ed|ing)? (it |them )?on\b": "pass on",
    r"\bjoints?\b": "detach point",
    r"\blikewise\b": "the noun again",
    r"\bthose that it\b": "the noun again",
    r"\bat the begin\b": "at the beginning",
    r"\bLet me\b": "",
    r"made small": "objective",
    r"reads like": "looks like",
    r"in a straight line": "extrapolated linearly",
    r"bit by bit": "bit-exactly",
    r"has none such": "has no such depth",
}
"""Replacements by phrase. Code and quoted messages are not searched."""

ANY = re.compile("|".join(INSTEAD), re.IGNORECASE)

SCRAP = re.compile(r"^Of (a|the) \w+\.$")
"""A help text or description of a key without its noun, such as Time or Seed."""

FRAGMENT = re.compile(r"(Of|Those|It is|Until|Who|Likewise|So many)\b")
"""Beginnings of a docstring that is no sentence about a thing: it needs the thing's noun."""

QUOTED = re.compile(
    r"```.*?^```|``[^`]*``|`[^`\n]*`|\"[^\"\n]*\"|“[^”]*”|^ *>>>[^\n]*$", re.DOTALL | re.MULTILINE
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _outside_of_code(text: str) -> str:
    """A text in which code and quoted messages are blank, with its lines unchanged."""
    return QUOTED.sub(lambda quoted: re.sub(r"[^\n]", " ", quoted[0]), text)


def _old_words(text: str) -> Iterator[tuple[int, str]]:
    """Words that are not to come back, each with its line in the text and what to write instead."""
    if not ANY.search(text):
        return
    for phrase, better in INSTEAD.items():
        for match in re.finditer(phrase, text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()), f"{match[0]!r}; write {better!r}"


def test_pages_use_the_fields_words() -> None:
    found = []
    for page in PAGES:
        text = _outside_of_code(page.read_text(encoding="utf-8"))
        found += [f"{page.name}, line {line + 1}: {word}" for line, word in _old_words(text)]
    assert found == []


Nodes = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    """All that each source file is made of."""
    return {
        path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted((ROOT / "src").rglob("*.py"))
    }


def _said(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """What people read of the program: help of commands, keys of a config, and texts of errors, by place."""
    runner = CliRunner(env={"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "400"})
    for name in COMMANDS:
        shown = runner.invoke(application(), [name, "--help"], prog_name="counterflow").stdout
        yield from ((f"counterflow {name} --help", " ".join(line.split())) for line in shown.splitlines())
    for key in known_keys():
        yield key.key, key.about
    for path, its in nodes.items():
        for node in its:
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                parts = [c.value for c in ast.walk(node.exc) if isinstance(c, ast.Constant)]
                yield f"{path.name}, line {node.lineno}", "".join(p for p in parts if isinstance(p, str))


def test_help_keys_and_errors_use_the_fields_words(nodes: Nodes) -> None:
    said = list(_said(nodes))
    found = [f"{place}: {word}" for place, text in said for _, word in _old_words(text)]
    found += [f"{place}: {text!r}; begin with the noun" for place, text in said if re.search(SCRAP, text)]
    assert found == []


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Docstrings of a module's parts and attributes, each with its line; names of arguments are blank."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                named = re.sub(r"^ *\w+:", "", inspect.cleandoc(text), flags=re.MULTILINE)
                yield node.lineno, _outside_of_code(named)


def _odd_docstrings(nodes: Iterable[ast.AST]) -> list[str]:
    found = []
    for line, text in _docstrings(nodes):
        found += [f"line {line + below}: {word}" for below, word in _old_words(text)]
        if FRAGMENT.match(text):
            found.append(f"line {line}: {text.splitlines()[0]!r} begins as a fragment; begin with the noun")
    return found


def test_docstrings_use_the_fields_words(nodes: Nodes) -> None:
    found = {}
    for path, its in nodes.items():
        if odd := _odd_docstrings(its):
            found[str(path.relative_to(ROOT))] = odd
    assert found == {}


def test_the_check_sees_docstrings_of_parts_and_attributes() -> None:
    source = '''
"""A module that is told of a step."""

LIMIT = 3
"""Of a request."""


def compare(told: int) -> None:
    """Compare ``told``.

    Args:
        told: a report.
        mine: likewise.
    """
'''
    assert _odd_docstrings(ast.walk(ast.parse(source))) == [
        "line 2: 'told'; write 'reported, received'",
        "line 5: 'Of a request.' begins as a fragment; begin with the noun",
        "line 13: 'likewise'; write 'the noun again'",
    ]


def test_the_check_sees_a_word_outside_of_code_alone() -> None:
    text = 'a step without a flush; `without a flush`; "without a flush"'
    assert len(re.findall("without a flush", QUOTED.sub("", text))) == 1
