"""Effects of a recorded forward beyond its result: what it changes, draws and keeps in caches.

Code of opened modules is replaced by its steps, so it may have no effects: these are refused. Modules that
are called may have any, as they are called in every forward; only the effects of the run without values are
undone. A cache that only gains tensors of no input is no effect, as the steps compute the same tensors.

Invariant: after ``undo``, globals, closures and caches are as before the run.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .contents import ContextContent
from .instances import instances_of
from .namespaces import is_library
from .python_state import ABSENT, DictEntries, PythonState, WatchedContainer
from .tracing_internals import OF_TORCH, FakeTensor
from .untraceable import Unfollowed
from .walk import LRU_CACHE, Walk

LruCache = Any
"""A function with a cache, as ``functools.lru_cache`` makes it."""


def lru_caches(reachable: PythonState) -> list[LruCache]:
    """Functions with a cache of ``functools``: all that are of no library, and those that forwards reach."""
    caches = {id(cache): cache for cache in instances_of(LRU_CACHE) if not is_library(cache.__module__)}
    return [*(caches | reachable.caches).values()]  # objects that were frozen are in the second only


def globals_of(model: nn.Module) -> PythonState:
    """Globals, closures and class attributes that forwards of a model's modules can reach."""
    walk = Walk(model)
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        for base in kind.__mro__:
            if not is_library(base.__module__):
                for name, member in vars(base).items():
                    if not name.startswith("__") or name == "__call__":
                        walk.member(f"{base.__name__}.{name}", base, name, member)
    for path, module in model.named_modules():  # whose functions a copy shares
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                walk.value(f"{path}.{name}" if path else name, value)
    return walk.done()


class Effects:
    """Effects of one run.

    Args:
        model: the copy that runs.
        opened: paths of the modules whose code is replaced by steps.
        reachable: globals and closures, as before the run.
        caches: functions with a cache.
        lasts: tells whether a tensor is the same in every forward.
        reads: attributes of modules that the code of opened ones reads, as ``Record.reads``.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Collection[str],
        reachable: PythonState,
        caches: Collection[LruCache],
        lasts: Callable[[Tensor], bool],
        *,
        reads: Mapping[tuple[str, str], str],
    ) -> None:
        self._model, self._opened, self._reachable, self._lasts = model, opened, reachable, lasts
        self._caches = caches
        self._misses = {id(cache): cache.cache_info().misses for cache in caches}
        self._module_attributes = self._attributes()
        self._reads = {pair: reader for pair, reader in reads.items() if pair[0] not in opened}
        self._attributes_read = self._called_attributes()
        self._begin = self._draws = _generator_states(reachable.mentions)
        self._contexts: dict[ContextContent, object] = {}
        """Values of variables of ``contextvars`` before the last call of a module."""
        self._called_contexts: dict[ContextContent, object] = {}
        """Values that called modules have set."""
        self.live: list[str] = []
        """Names of the values that called modules change."""

    def _attributes(self) -> PythonState:
        walk = Walk(self._model)
        for path, module in self._model.named_modules():
            if path in self._opened:
                for name, value in vars(module).items():
                    if name not in OF_TORCH:
                        walk.value(f"{path}.{name}" if path else name, value)
        return walk.done()

    def _called_attributes(self) -> dict[tuple[str, str], PythonState]:
        if not self._reads:
            return {}
        walk, modules, states = Walk(self._model), dict(self._model.named_modules()), {}
        for path, name in sorted(self._reads):
            if path in modules:
                walk.state = states[path, name] = PythonState()
                walk.attributes(path, modules[path], [name])
        return states

    def written(self) -> dict[str, str]:
        """Attributes that the code of opened modules reads of called ones, and that have changed since the
        begin of the run; by name, the reader.
        """
        states = self._called_attributes()
        return {
            name: reader
            for pair, reader in self._reads.items()
            for name in self._attributes_read.get(pair, PythonState()).differences(
                states.get(pair, PythonState())
            )
        }

    def refusal(self) -> str | None:
        """Effect of the code of opened modules since the last call of a module; None: there is none.

        Variables of ``contextvars`` may be set until the module ends (``resetting``).
        """
        self._contexts = self._values_of_contexts()
        for watch in (*self._module_attributes.changed(), *self._reachable.changed()):
            if not (isinstance(watch, ContextContent) or self._is_cache(watch)):
                return f"changes {watch.label}"
        for cache in self._filled():
            if not all(map(self._lasts, _tensors_of(cache))):
                return f"keeps a tensor of one forward for the next in the cache of {cache.__name__}"
        if _generator_states(self._reachable.mentions) != self._draws:
            return "draws from a random generator of Python or NumPy"
        return None

    @contextmanager
    def resetting(self, path: str) -> Iterator[None]:
        """Context of the code of an opened module, which may set variables of ``contextvars`` for a while.

        Args:
            path: path of the module.

        Raises:
            Unfollowed: it leaves one set.
        """
        before = self._values_of_contexts()
        yield
        for watch, value in before.items():
            if not any(watch.current() is known for known in (value, self._called_contexts.get(watch))):
                raise Unfollowed(path, f"changes {watch.label}")

    def _values_of_contexts(self) -> dict[ContextContent, object]:
        watches = self._reachable.watches
        return {watch: watch.current() for watch in watches if isinstance(watch, ContextContent)}

    def accept(self) -> None:
        """Accept the effects of a called module, of which those outside the copy are undone."""
        for watch in self._reachable.changed():
            if not isinstance(watch, ContextContent):
                self.live.append(watch.label)
                watch.restore()
            elif watch.current() is not self._contexts.get(watch, ABSENT):
                self.live.append(watch.label)
                self._called_contexts[watch] = watch.current()
        if self._module_attributes.changed():
            before, self._module_attributes = self._module_attributes, self._attributes()
            self.live += before.differences(self._module_attributes)
        self._clear()
        self._draws = _generator_states(self._reachable.mentions)

    def undo(self) -> None:
        """Undo all effects outside the copy."""
        for watch in self._reachable.changed():
            watch.restore()
        self._clear()
        if _generator_states(self._reachable.mentions) != self._begin:
            _restore_generators(self._begin)
        del (
            self._model,
            self._module_attributes,
            self._attributes_read,
            self._lasts,
        )  # which free the copy at once

    def _filled(self) -> list[LruCache]:
        return [c for c in self._caches if c.cache_info().misses != self._misses[id(c)]]

    def _clear(self) -> None:
        for cache in self._filled():
            if any(True for _ in _tensors_of(cache)):
                cache.cache_clear()
            self._misses[id(cache)] = cache.cache_info().misses

    def _is_cache(self, watch: WatchedContainer) -> bool:
        """Tell whether a container only gained tensors that are the same in every forward."""
        if not isinstance(watch, DictEntries):
            return False
        added = watch.added()
        return bool(added) and all(
            isinstance(t, FakeTensor) and self._lasts(t) for value in added for t in _leaves(value)
        )


def _tensors_of(cache: LruCache) -> Iterator[Tensor]:
    for entry in gc.get_referents(cache):
        results = entry.values() if type(entry) is dict and entry is not vars(cache) else (entry,)
        for result in results:
            yield from (leaf for leaf in _leaves(result) if isinstance(leaf, FakeTensor))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _generator_states(mentions: Collection[str]) -> tuple[Any, ...]:
    of_python = random.getstate() if any(name.startswith("random") for name in mentions) else None
    of_numpy = None
    if any(name.startswith("numpy.random") for name in mentions):
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        of_numpy = kind, keys.tobytes(), *rest
    return of_python, of_numpy


def _restore_generators(states: tuple[Any, ...]) -> None:
    of_python, of_numpy = states
    if of_python is not None:
        random.setstate(of_python)
    if of_numpy is not None:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = of_numpy
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
