"""Imitation of ``torch.cuda.CUDAGraph`` on a pretended device: operators recorded at fixed addresses.

A capture records the operators below autograd with the tensors that they use. A replay runs no Python of the
layers: it runs the operators again, from the recorded memory into the recorded memory. So a static tensor
that is not filled, a weight that has moved, or a buffer that is used again too early gives other numbers, as
on a GPU. It imitates the following rules:

* A capture computes nothing: its tensors have no values before a replay, and what it changed is restored.
* Nothing may wait for the device, read it, communicate or set the seed of a generator.
* Memory allocated in a capture belongs to the pool. A replay overwrites all memory of the pool that was free
  when its graph was captured, and all that later graphs of the pool allocated.
* Memory outside of the pool that was freed since the capture contains anything.

It does not imitate copies out of pinned memory, which a GPU reads again at each replay; they are refused.
Draws of a replay go on from the state of the generator, as on a GPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.tensors.torch_private import (
    TorchDispatchMode,
    schema_of,
    storage_uses,
    without_functions,
    without_modes,
)

from . import streams
from .device_memory import spoil, tensors_in

NOT_PERMITTED = "operation not permitted when stream is capturing"
"""Error of CUDA for what a capture cannot contain."""

_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _ThreadCapture(threading.local):
    graph: CUDAGraph | None = None


_thread = _ThreadCapture()


def refuse_in_capture(action: str) -> None:
    """Refuse what a capture cannot contain.

    Raises:
        RuntimeError: this thread captures a graph.
    """
    if _thread.graph is not None:
        raise RuntimeError(f"CUDA error: {NOT_PERMITTED} ({action})")


class Pool:
    """Memory of some graphs, in the order of their captures."""

    def __init__(self) -> None:
        self.graphs: list[CUDAGraph] = []
        self.references: Counter[int] = Counter()
        """References to each storage by recorded operators."""

    def is_free(self, memory: Tensor) -> bool:
        """True if no tensor but recorded ones has a storage."""
        return storage_uses(memory) <= self.references[_address(memory)] + 1


def graph_pool_handle() -> Pool:
    """A new pool."""
    return Pool()


class CUDAGraph:
    """Recorded operators, and the memory that they use."""

    def __init__(self) -> None:
        self.memory: dict[int, Tensor] = {}
        """Storages that the capture allocated."""
        self._outside: dict[int, Tensor] = {}
        """Storages that it uses of those outside of the pool."""
        self._operators: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._pool = Pool()
        self._free: list[Tensor] = []
        """Storages of the pool that were free when the capture began."""
        self._seed = 0
        self._recorder: _Recorder | None = None

    def capture_begin(self, pool: Pool | None = None, **_: object) -> None:
        """Record all further operators of this thread."""
        refuse_in_capture("another capture")
        if pool is not None:
            self._pool = pool
        pool = self._pool
        earlier = [memory for graph in pool.graphs for memory in graph.memory.values()]
        self._free = [memory for memory in earlier if pool.is_free(memory)]
        pool.graphs.append(self)
        self._seed = torch.default_generator.initial_seed()
        self._recorder = _Recorder(self)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        _thread.graph = self

    def capture_end(self) -> None:
        """End the record; its tensors have no values from now on."""
        _thread.graph = None
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorder = None
        with _alone():
            for memory, content in reversed(self._changed):
                memory.copy_(content)
        self._changed.clear()
        for memory in self.memory.values():
            spoil(memory)

    def replay(self) -> None:
        """Run the operators again."""
        refuse_in_capture("a replay")
        streams.settle("replays a graph")
        later = self._pool.graphs[self._pool.graphs.index(self) + 1 :]
        moved = [memory for memory in self._outside.values() if self._pool.is_free(memory)]
        for memory in (*self._free, *(m for graph in later for m in graph.memory.values()), *moved):
            spoil(memory)
        with _alone():
            for operator, args, kwargs, targets in self._operators:
                results = list(tensors_in((operator(*args, **kwargs),)))
                for target, place in targets:
                    target.copy_(results[place])

    def reset(self) -> None:
        """Forget the record and free its memory."""
        self._operators.clear()
        self.memory.clear()
        self._outside.clear()

    def pool(self) -> Pool:
        """Pool of its memory."""
        return self._pool

    # -- of the recorder

    def draw(self) -> None:
        """Note that an operator draws.

        Raises:
            RuntimeError: the seed was set in the capture.
        """
        if torch.default_generator.initial_seed() != self._seed:
            raise RuntimeError("set_current_seed can be called during stream capture only with the same seed")

    def save_changed(self, tensors: Iterable[Tensor]) -> None:
        """Save memory outside of the capture before an operator changes it."""
        for tensor in tensors:
            if _address(tensor) not in self.memory:
                with _alone():
                    self._changed.append((tensor.data, tensor.data.clone()))

    def record(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator that has run."""
        inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            address = _address(tensor)
            if address not in self._outside and not any(
                address in graph.memory for graph in self._pool.graphs
            ):
                self._outside[address] = self._alias(tensor)
        known = {_address(tensor) for tensor in inputs}
        targets = []
        for place, tensor in enumerate(tensors_in((result,))):
            if _address(tensor) in known:  # a view, or an argument that was changed
                continue
            if _address(tensor) not in self.memory:
                self.memory[_address(tensor)] = self._alias(tensor)
            if operator_name(operator) not in _UNFILLED:
                targets.append((self._alias(tensor), place))
        args, kwargs = pytree.tree_map_only(Tensor, self._alias, (args, kwargs))
        self._operators.append((operator, args, kwargs, targets))

    def _alias(self, tensor: Tensor) -> Tensor:
        """The same memory, with a version counter of its own."""
        with _alone():
            alias = tensor.data
        self._pool.references[_address(alias)] += 1
        return alias


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        with without_functions():
            if _DYNAMIC & set(func.tags) and not _has_integer_indices(func, args):
                refuse_in_capture(f"{func} reads its tensors")
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._graph.draw()
            self._graph.save_changed(_changed_by(func, args, kwargs))
            result = func(*args, **kwargs)
            self._graph.record(func, args, kwargs, result)
        return result


def _has_integer_indices(operator: Any, args: Any) -> bool:
    if operator_name(operator) not in {"index", "index_put", "index_put_", "_index_put_impl_"}:
        return False
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


def _changed_by(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = schema_of(operator).arguments
    # Schemas of batch norms do not say that they change their statistics.
    statistics = operator_name(operator).endswith("batch_norm")
    changed = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (statistics and argument.name.startswith("running_"))
    ]
    return list(tensors_in(changed))


@cache
def operator_name(operator: Any) -> str:
    """Name of an operator, without its namespace."""
    return str(schema_of(operator).name.partition("::")[2])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _alone:  # noqa: N801 - a context
    """Context of operators that the device runs, without modes, gradients or versions."""

    def __enter__(self) -> None:
        self._contexts = (without_modes(), torch.no_grad(), torch.inference_mode(mode=False))
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)


class graph:  # noqa: N801 - the name in torch.cuda
    """Imitates ``torch.cuda.graph``.

    Args:
        cuda_graph: graph to capture.
        pool: pool of its memory; None: one of its own.
    """

    def __init__(self, cuda_graph: CUDAGraph, pool: Pool | None = None, **_: object) -> None:
        self._graph, self._pool = cuda_graph, pool

    def __enter__(self) -> None:
        """Begin the capture."""
        self._graph.capture_begin(self._pool)

    def __exit__(self, *error: object) -> None:
        """End the capture."""
        self._graph.capture_end()
