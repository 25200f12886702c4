"""Lists and dicts in arguments, which a call may change."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any


def containers_in(tree: Any) -> Iterator[Any]:
    """Lists and dicts of a tree of tuples, lists and dicts, in order; one that is there twice comes twice."""
    if isinstance(tree, (list, dict)):
        yield tree
    if isinstance(tree, (list, tuple, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from containers_in(part)


class ContainerEntries:
    """Entries of containers, to be compared with their later ones.

    Args:
        containers: lists and dicts.
    """

    def __init__(self, containers: list[Any]) -> None:
        self._containers = containers
        self._entries = list(map(_entries, containers))

    def changed(self) -> dict[int, Any]:
        """Containers that have other entries now, by their number."""
        return {
            number: container
            for number, (container, old) in enumerate(zip(self._containers, self._entries, strict=True))
            if len(now := _entries(container)) != len(old) or not all(map(is_, now, old))
        }


def replace_entries(container: Any, content: Any) -> None:
    """Replace all entries of a list or dict."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _entries(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)
