"""Python objects that layers of several stages reach: refused where one stage changes what another reads.

Each worker has an object of its own, or other workers' layers come to it at other times than in one process.

Objects are compared around some steps and evaluations. An entry that is changed again and again is a message
between layers. A new one, or a longer table, may be a cache that each stage fills by itself: after the first
step and the first evaluation the workers compare what they hold.

Invariant: what is shared is read off the user's model before any of it is copied, alike on all workers.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import cast

from counterflow.common.doubling import is_doubling
from counterflow.common.numbering import number_of
from counterflow.errors import ConfigError

from ...transport.base import Transport
from ..named_layer import LOSS, NamedLayer, place_of
from .reach import Kind, Path, Reach, Reached, Root, reach_of
from .sources import Use, use_of
from .subjects import Snapshot, content, plain_key

_FIRST_CALLS = 4
"""Steps, and evaluations, around which objects are compared; then 4, 8, 16, ..."""

_REMEDY = "pass it on through inputs and outputs, or give cuts that put both in one stage"

_COMPARED = 2
"""First steps, and evaluations, after which workers compare what they hold."""


@dataclass(frozen=True, slots=True)
class SharedObject:
    """An object that several stages reach.

    Attributes:
        paths: by stage, the paths by which its layers reach it.
    """

    paths: Mapping[int, Sequence[Path]]

    @property
    def title(self) -> str:
        """Title that identifies the object on all workers."""
        return repr(next(iter(self.paths.items()))[1][0])


@dataclass(frozen=True, slots=True)
class SharedObjects:
    """The objects that several stages of a model reach.

    Attributes:
        objects: the objects, by title.
        codes: by stage, the code of its layers.
        names: layers for messages, by number.
    """

    objects: Mapping[str, SharedObject]
    codes: Sequence[Sequence[CodeType]]
    names: Mapping[int, str]

    def refuse(self, shared: SharedObject, writers: Sequence[int], changed: set[Hashable]) -> None:
        """Refuse a change if another stage reads what one of some stages may have changed.

        Raises:
            ConfigError: it does.
        """
        uses = self._uses(shared, changed)
        for writer in writers:
            reader = next((s for s, use in uses.items() if s != writer and Use.READ in use), None)
            if not uses[writer].writes or reader is None:
                continue
            writer_path, reader_path = shared.paths[writer][0], shared.paths[reader][0]
            raise ConfigError(
                f"{self.names[_layer(writer_path)]} changes {_shown(writer_path, changed)} in a forward, and "
                f"{self.names[_layer(reader_path)]} in another stage reads {_shown(reader_path, changed)}, "
                f"which it has of its own there, or reads at another time than in one process "
                f"(stages {writer} and {reader}); {_REMEDY}"
            )

    def refuse_failed(
        self,
        stages: Collection[int],
        entries: Mapping[str, set[Hashable]],
        changed_by: Mapping[str, Collection[int]],
        error: Exception,
    ) -> None:
        """Refuse an object that the line that failed names, and that another stage changes.

        Args:
            stages: stages of the worker whose forward failed.
            entries: by object, the entries that it has there.
            changed_by: by object, the stages of this worker that have it and saw it changed in this call.
            error: what failed.

        Raises:
            ConfigError: there is one.
        """
        lines = [
            (frame.f_code, linecache.getline(frame.f_code.co_filename, line))
            for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        missing = error.args[:1] if isinstance(error, KeyError) else (getattr(error, "name", None),)
        for title, shared in self.objects.items():
            changed = entries.get(title, set()) | {plain_key(key) for key in missing if key is not None} or {
                0
            }
            uses = self._uses(shared, changed)
            for reader in [stage for stage in stages if Use.READ in uses.get(stage, Use.NONE)]:
                named = {str(name) for path in shared.paths[reader] for _, name in path[-1:]}
                here = any(
                    code in self.codes[reader] and named & set(re.findall(r"\w+", line))
                    for code, line in lines
                )
                # A call of a function or a class, in each stage, may be a write: it is no change by itself.
                changed_stages = changed_by.get(title, ())
                writer = next(
                    (
                        s
                        for s, use in uses.items()
                        if s != reader and (Use.WRITE in use or (use.writes and s in changed_stages))
                    ),
                    None,
                )
                if not here or writer is None:
                    continue
                writer_path, path = shared.paths[writer][0], shared.paths[reader][0]
                raise ConfigError(
                    f"{self.names[_layer(path)]} fails ({type(error).__name__}: {error}) where it reads "
                    f"{_shown(path, set())}, which {self.names[_layer(writer_path)]} in another stage "
                    f"changes: a worker has one of its own (stages {writer} and {reader}); {_REMEDY}"
                ) from error

    def _uses(self, shared: SharedObject, changed: Collection[Hashable]) -> dict[int, Use]:
        return {stage: use_of(paths, self.codes[stage], changed) for stage, paths in shared.paths.items()}


def shared_objects(
    layers: Sequence[Sequence[NamedLayer]], loss: NamedLayer | None, loss_function: object
) -> SharedObjects:
    """The objects that several stages reach.

    Args:
        layers: layers by stage.
        loss: the loss function, if it has weights or buffers.
        loss_function: the loss function.
    """
    if len(layers) == 1:
        return SharedObjects({}, (), {})
    reaches = tuple(
        reach_of(_roots(members, loss_function if stage == len(layers) - 1 else None))
        for stage, members in enumerate(layers)
    )
    by_key: dict[Hashable, dict[int, Reached]] = {}
    for stage, reach in enumerate(reaches):
        for key, reached in reach.reached.items():
            by_key.setdefault(key, {})[stage] = reached
    shared = [
        SharedObject({stage: reached.paths for stage, reached in reached_by_stage.items()})
        for reached_by_stage in by_key.values()
        if len(reached_by_stage) > 1 and _is_python(reached_by_stage)
    ]
    names = {layer.index: place_of(layer) for members in layers for layer in members}
    names[LOSS] = "the loss function" if loss is None else place_of(loss)
    objects = {item.title: item for item in shared}
    return SharedObjects(objects, [tuple(reach.codes) for reach in reaches], names)


def _roots(layers: Sequence[NamedLayer], loss_function: object) -> list[Root]:
    roots: list[Root] = [(layer.index, layer.module) for layer in layers]
    return roots if loss_function is None else [*roots, (LOSS, loss_function)]


def _is_python(reached: Mapping[int, Reached]) -> bool:
    # True unless it is a buffer that all these stages have registered
    registered = {Kind.LAYER, Kind.MEMBER}
    tensor = any(entry.subject.is_tensor for entry in reached.values())
    return not tensor or any(
        kind not in registered for entry in reached.values() for path in entry.paths for kind, _ in path
    )


def _layer(path: Path) -> int:
    return cast("int", path[0][1])


def _shown(path: Path, changed: set[Hashable]) -> str:
    text = "self" if path[1:] and path[1][0] in {Kind.MEMBER, Kind.ATTRIBUTE} else ""
    for kind, name in path[1:]:
        if kind in {Kind.NAME, Kind.VARIABLE, Kind.MODULE}:
            text = str(name)
        elif kind in {Kind.MEMBER, Kind.ATTRIBUTE}:
            text += f".{name}"
        elif kind is Kind.KEY:
            text += f"[{name!r}]"
    text = text.lstrip(".") or "self"
    entry = min(map(str, changed - {""}), default="")
    return text if not entry or text.endswith(entry) else f"{entry!r} of {text}"


class ObjectWatch:
    """A worker's watch over the objects that its stages share with others.

    Args:
        shared: the shared objects of the model.
        stages: the worker's stages: their layers as they run here, and the loss function.
        transport: transport to the other workers.
        exact: whether one worker runs all stages in the order of the layers.
    """

    def __init__(
        self,
        shared: SharedObjects,
        stages: Mapping[int, Sequence[Root]],
        transport: Transport,
        *,
        exact: bool,
    ) -> None:
        self._shared, self._transport = shared, transport
        counts = transport.gather([float(len(shared.objects))])
        self._active = any(row[0] for row in counts) and not exact
        own_objects = (
            {stage: _by_path(reach_of(roots)) for stage, roots in stages.items()} if self._active else {}
        )
        self._here: dict[str, list[tuple[int, Reached]]] = {}
        """Shared objects by title: of each of this worker's stages what it has."""
        for title, item in shared.objects.items():
            candidates = (
                (stage, own_objects.get(stage, {}).get(paths[0])) for stage, paths in item.paths.items()
            )
            here = [(stage, reached) for stage, reached in candidates if reached is not None]
            if here:
                self._here[title] = here
        self._calls = {True: 0, False: 0}
        self._snapshots: dict[str, list[tuple[int, Snapshot]]] = {}
        self._changed: dict[str, set[Hashable]] = {}
        self._training = True

    def note(self, *, training: bool) -> None:
        """Note what objects hold, before forwards."""
        self._snapshots.clear()
        if not self._active:
            return
        self._training = training
        calls = self._calls[training]
        self._calls[training] += 1
        if calls < _FIRST_CALLS or is_doubling(calls):
            self._snapshots = {
                title: [(stage, Snapshot(reached.subject)) for stage, reached in here]
                for title, here in self._here.items()
            }
            self._changed.clear()

    def check(self) -> None:
        """Refuse a forward that changed since ``note`` what another stage reads.

        Raises:
            ConfigError: one did.
        """
        first = self._calls[self._training] == 1
        for title, snapshots in self._snapshots.items():
            for stage, snapshot in snapshots:
                replaced, added = snapshot.changed()
                if replaced and not first:
                    self._shared.refuse(self._shared.objects[title], [stage], replaced)
                if replaced or added:
                    self._changed.setdefault(title, set()).update(replaced | added)

    def explain(self, error: Exception) -> None:
        """Refuse an object that a forward that failed reads, and that another stage changes.

        Raises:
            ConfigError: there is one.
        """
        if self._active:
            stages = {stage for here in self._here.values() for stage, _ in here}
            entries = {
                title: {plain_key(key) for _, reached in here for key in reached.subject.entries()}
                for title, here in self._here.items()
            }
            changed_by = {
                title: [stage for stage, snapshot in snapshots if any(snapshot.changed())]
                for title, snapshots in self._snapshots.items()
            }
            self._shared.refuse_failed(stages, entries, changed_by, error)

    def compare(self) -> None:
        """After the first steps and evaluations: refuse what workers hold otherwise; all workers call it.

        Raises:
            ConfigError: a stage changed an object that is another one on another worker, where it is read.
        """
        if not self._active or self._calls[self._training] > _COMPARED:
            self._snapshots.clear()
            return
        self.check()
        self._snapshots.clear()  # what they hold is of this step
        row_here = {
            title: (
                self._changed.get(title, set()),
                {stage: number_of(content(reached.subject.entries())) for stage, reached in here},
            )
            for title, here in self._here.items()
        }
        rows = cast("list[dict[str, _Contents]]", self._transport.gather_objects(row_here))
        for title, shared in self._shared.objects.items():
            of_object = [row[title] for row in rows if title in row]
            changed = {entry for entries, _ in of_object for entry in entries}
            if changed and len({digest for _, contents in of_object for digest in contents.values()}) > 1:
                writers = {stage for entries, contents in of_object if entries for stage in contents}
                self._shared.refuse(shared, sorted(writers), changed)


_Contents = tuple[set[Hashable], dict[int, int]]
"""Entries of an object that one worker changed, and by stage a digest of the contents."""


def _by_path(reach: Reach) -> dict[Path, Reached]:
    return {path: reached for reached in reach.reached.values() for path in reached.paths}
