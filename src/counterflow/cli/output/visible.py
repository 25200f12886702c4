"""Text for a terminal that contains names from files: characters that a terminal obeys are shown instead.

Invariant: what commands print contains no control characters of a name, whatever file it is from.
"""

from __future__ import annotations

import logging
import re

import typer

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and those that change the direction of the text around them."""


def visible(text: str) -> str:
    r"""A text with its control characters escaped as in Python.

    >>> visible("a\x1b]0;b\x07\n")
    'a\\x1b]0;b\\x07\n'
    """
    return OBEYED.sub(lambda match: ascii(match.group())[1:-1], text)


def visible_json(text: str) -> str:
    r"""A JSON text with its control characters escaped as in JSON; it has the same value.

    >>> visible_json('"a\x9bb"')
    '"a\\u009bb"'
    """
    return OBEYED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text.

    Args:
        text: the text.
        err: whether it goes to stderr.
        nl: whether a newline follows.
    """
    typer.echo(visible(text), err=err, nl=nl)


_CHOICES = "counterflow.auto"
"""Logger of what ``schedule="auto"`` measures and chooses."""


class VisibleFormatter(logging.Formatter):
    """Formats messages of the library for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a message, escaped; a choice that is reported is no warning, and has no level."""
        return visible(record.getMessage() if record.name == _CHOICES else super().format(record))
