"""Facts and tables as HTML: how objects show themselves in notebooks.

Invariant: every text is escaped, and nothing outside the page is referenced. This module imports no other
room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def titled(title: str, *parts: str) -> str:
    """A bold title above parts that are HTML."""
    return f"<div><p><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def preformatted(text: str) -> str:
    """A text that may have several lines.

    >>> preformatted("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{escape(text)}</pre>"


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts.

    >>> table(["rule"], [["1 < 2"]])
    '<table><thead><tr><th>rule</th></tr></thead><tbody><tr><td>1 &lt; 2</td></tr></tbody></table>'
    """
    body = "".join(_row("td", row) for row in rows)
    return f"<table><thead>{_row('th', heads)}</thead><tbody>{body}</tbody></table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"
