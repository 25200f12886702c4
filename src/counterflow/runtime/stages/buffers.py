"""Buffers of a stage's modules: snapshots, and copies in their place.

Invariant: a buffer that nothing changes in place is copied once: torch counts such changes (``_version``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from counterflow.api.counters import summed
from counterflow.common.tensors.torch_private import buffers_of, keeps_statistics

Contents = tuple[Tensor | None, ...]
"""Contents of buffers at one time."""


class Buffers:
    """Buffers of some modules, which a forward may change: counters, averages, power iterations.

    Running statistics of batch norms are not part of snapshots, as training does not read them.

    Args:
        modules: the modules; the buffers of their children are included.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inside = {id(child): child for module in modules for child in module.modules()}
        places = [(module, name) for module in inside.values() for name in buffers_of(module)]
        self.norms = [(module, name) for module, name in places if keeps_statistics(module)]
        self.places = [(module, name) for module, name in places if not keeps_statistics(module)]
        self.summed = [place for place, (module, name) in enumerate(self.places) if name in summed(module)]
        """Places of the counters among these."""
        self._seen: list[tuple[Tensor | None, int]] | None = None
        self._contents: Contents = (None,) * len(self.places)
        self._changing: set[int] = set()

    @property
    def change(self) -> bool:
        """True if forwards change a buffer, as far as snapshots show, or a running statistic."""
        return bool(self.norms or self._changing)

    def snapshot(self) -> Contents:
        """Return the buffers' contents, without running statistics; they must not be changed."""
        first = self._seen is None
        if self._seen is None:
            self._seen = [(None, 0)] * len(self.places)
        changed: dict[int, Tensor | None] = {}
        for index, (module, name) in enumerate(self.places):
            buffer = buffers_of(module).get(name)
            seen = self._seen[index]
            version = 0 if buffer is None else buffer._version  # noqa: SLF001
            if buffer is not seen[0] or version != seen[1]:
                self._seen[index] = buffer, version
                changed[index] = None if buffer is None else buffer.detach().clone()
        if changed:
            if not first:
                self._changing.update(changed)
            self._contents = tuple(changed.get(i, content) for i, content in enumerate(self._contents))
        return self._contents

    def restore(self, contents: Contents) -> None:
        """Set the buffers' contents to a snapshot."""
        current = self.snapshot()
        places = zip(self.places, contents, current, strict=True)
        self._replace([(module, name, old) for (module, name), old, new in places if old is not new])

    @contextmanager
    def swapped_in(self, contents: Contents) -> Iterator[None]:
        """Context with copies of a snapshot in place of the buffers; changes of the copies are dropped."""
        current = self.snapshot()
        replacements = [
            (*self.places[index], content)
            for index, content in enumerate(contents)
            if index in self._changing or content is not current[index]
        ]
        replacements += [(module, name, buffers_of(module)[name]) for module, name in self.norms]
        before = [(module, name, buffers_of(module).get(name)) for module, name, _ in replacements]
        self._replace(replacements)
        try:
            yield
        finally:
            for module, name, buffer in before:
                buffers_of(module)[name] = buffer
            self.restore(current)  # of buffers that were changed for the first time there is no copy

    @staticmethod
    def _replace(contents: Sequence[tuple[nn.Module, str, Tensor | None]]) -> None:
        copies: dict[int, Tensor] = {}
        for module, name, content in contents:
            buffer = buffers_of(module).get(name)
            if content is None:
                buffers_of(module)[name] = None
            elif buffer is None:
                buffers_of(module)[name] = content.clone()
            else:
                if id(buffer) not in copies:
                    copies[id(buffer)] = content.clone()
                buffers_of(module)[name] = copies[id(buffer)]
