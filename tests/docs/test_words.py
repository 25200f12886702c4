"""Words that are not to come back in pages for people: one word a thing, the field's where it has one."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_the_check_sees_a_word_outside_of_code_alone() -> None:
    text = 'a step without a flush; `without a flush`; "without a flush"'
    assert len(re.findall("without a flush", QUOTED.sub("", text))) == 1
