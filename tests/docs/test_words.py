"""Words that are not to come back in pages for people: one word a thing, the field's where it has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from counterflow.cli import application
from counterflow.cli.app import COMMANDS
from counterflow.training.load import known_keys

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"without a flush": "asynchronous",
    r"with a flush\b(?! before)": "synchronous",
    r"under way": "in flight",
    r"left away": "default",
    r"\bso many\b": "given, this many",
    r"\bwhoever\b": "everybody who, the one that",
    r"\b(is|are|was|were|and) told\b": "reported",
    r"\b(hears|heard)\b": "receives, received",
    r"\b(for|to|of) who\b": "for those who",
    r"\bhand(s|ed)? (it |them )?on\b": "pass on",
    r"\bjoints?\b": "detach point",
    r"\bLet me\b": "",
}
"""By a phrase what to write; what stands in code or quotes a message is left alone."""

QUOTED = re.compile(r"```.*?^```|`[^`\n]*`|\"[^\"\n]*\"|“[^”]*”", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE = {"json.md", "supported-models.md", "reproducing.md"}
"""From records, from tests' names, from the papers' figures: their texts stand in the code."""


def test_pages_use_the_fields_words() -> None:
    found = []
    for page in PAGES:
        if page.name in MADE:
            continue
        text = QUOTED.sub(lambda quoted: re.sub(r"[^\n]", " ", quoted[0]), page.read_text(encoding="utf-8"))
        for phrase, better in INSTEAD.items():
            for match in re.finditer(phrase, text, re.IGNORECASE):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{page.name}, line {line}: {match[0]!r}; write {better!r}")
    assert found == []


ODD = {
    r"made small": "objective",
    r"told no error": "exited without an error message",
    r"reads like": "looks like",
    r"in a straight line": "extrapolated linearly",
    r"leave one of them away": "use only one of them",
    r"\b(each|every) so many\b": "steps between ...",
    r"\bso (many|often)\b": "this many, maximum",
    r"bit by bit": "bit-exactly",
    r"under way": "in flight",
    r"left away": "default",
    r"has none such": "has no such depth",
    r"^Of (a|the) \w+\.$": "a noun: Time of ..., Seed of ...",
}
"""Of help, keys and errors: what was said once, and what to write."""


def _said() -> Iterator[tuple[str, str]]:
    """What people read of the program: help of commands, keys of a config, and texts of errors, by place."""
    runner = CliRunner(env={"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "400"})
    for name in COMMANDS:
        shown = runner.invoke(application(), [name, "--help"], prog_name="counterflow").stdout
        yield from ((f"counterflow {name} --help", " ".join(line.split())) for line in shown.splitlines())
    for key in known_keys():
        yield key.key, key.about
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                parts = [c.value for c in ast.walk(node.exc) if isinstance(c, ast.Constant)]
                yield f"{path.name}, line {node.lineno}", "".join(p for p in parts if isinstance(p, str))


def test_help_keys_and_errors_use_the_fields_words() -> None:
    found = [
        f"{place}: {match[0]!r}; write {better!r}"
        for place, text in _said()
        for phrase, better in ODD.items()
        if (match := re.search(phrase, text))
    ]
    assert found == []


def test_the_check_sees_a_word_outside_of_code_alone() -> None:
    text = 'a step without a flush; `without a flush`; "without a flush"'
    assert len(re.findall("without a flush", QUOTED.sub("", text))) == 1
