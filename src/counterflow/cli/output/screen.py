"""The console of commands, which shows control characters of names and obeys only its own styles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from .visible import OBEYED, visible


class Screen(Console):
    """A console whose styles are the only control characters that it prints."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Segments of an object, with their texts escaped."""
        for segment in super().render(renderable, options):
            if segment.control is None and OBEYED.search(segment.text):
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment
