"""Operators on virtual tensors: shapes are computed and memory is reserved, and no kernel runs.

A tensor is virtual if its storage is larger than ``SMALL_BYTES``: its memory is allocated and never touched,
so that it takes address space alone. What is smaller is computed, so that counters, flags and headers of
messages have their values. A small result of virtual tensors, such as a loss, is 1.

Invariant: views, in-place operators and results share storages as on real tensors, so autograd saves and
frees what it saves and frees in a run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.common.tensors.torch_private import TorchDispatchMode, schema_of
from counterflow.errors import ConfigError

from .kernel_memory import KernelMemory
from .ledger import Ledger

SMALL_BYTES = 16_384
"""Size of the largest storage that is computed."""


class _Kind(Enum):
    VIEW = "its result shares its argument's storage"
    REAL = "always runs"
    IN_PLACE = "changes an argument"
    VALUE = "reads a value"
    PURE = "makes new tensors"


_RUN = {"aten::_unsafe_view", "aten::resize_", "aten::set_", "aten::lift_fresh", "aten::_reshape_alias"}
"""Operators that run as they are."""

_READ = {"aten::_local_scalar_dense", "aten::equal"}

_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def is_virtual(tensor: Tensor) -> bool:
    """True if a tensor's memory is never touched."""
    return tensor.untyped_storage().nbytes() > SMALL_BYTES


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of an operator.

    Attributes:
        shapes: its tensors on the meta device.
        kernel_bytes: memory of the kernel beside them.
        runs: True if it and its arguments are small.
    """

    shapes: Any
    kernel_bytes: int
    runs: bool


class VirtualMode(TorchDispatchMode):
    """Mode of one worker's thread.

    Args:
        ledger: blocks of the worker.
        kernels: memory of kernels.
    """

    def __init__(self, ledger: Ledger, kernels: KernelMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._kernels = ledger, kernels
        self._kinds: dict[Any, _Kind] = {}
        self._results: dict[Hashable, _Result] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind is _Kind.VIEW or _on_meta(args, options):
            return func(*args, **options)
        if kind is _Kind.REAL:
            return self._counted(func(*args, **options))
        virtual = any(is_virtual(tensor) for tensor in _tensors(args, options))
        if kind is _Kind.VALUE:
            if not virtual:
                return func(*args, **options)
            return True if func.name() == "aten::equal" else _unit_value(args[0])
        if kind is _Kind.IN_PLACE:
            return self._in_place(func, args, options) if virtual else self._counted(func(*args, **options))
        return self._pure(func, args, options, virtual=virtual)

    def _counted(self, result: Any) -> Any:
        for tensor in _tensors((result,), {}):
            self._ledger.add(tensor)
        return result

    def _pure(self, func: Any, args: Any, options: dict[str, Any], *, virtual: bool) -> Any:
        key = _key(func, args, options)
        known = self._results.get(key) if key is not None else None
        if known is None:
            shapes = self._on_meta_device(func, args, options, virtual=virtual)
            if shapes is None:  # no shapes without values
                return self._counted(func(*args, **options))
            sizes = [_nbytes(tensor) for tensor in _tensors((shapes,), {})]
            runs = not virtual and all(size <= SMALL_BYTES for size in sizes)
            kernel = 0
            if not runs and any(True for _ in _tensors(args, options)):  # those of factories need nothing
                kernel = self._kernels.size(key or object(), func, args, options, sum(sizes))
            known = _Result(shapes, kernel, runs=runs)
            if key is not None:
                self._results[key] = known
        if known.runs and not virtual:
            return self._counted(func(*args, **options))
        if isinstance(known.shapes, Tensor):
            result = self._reserved(known.shapes)
        else:
            result = pytree.tree_map_only(Tensor, self._reserved, known.shapes)
        self._ledger.pulse(known.kernel_bytes)
        return result

    def _on_meta_device(self, func: Any, args: Any, options: dict[str, Any], *, virtual: bool) -> Any:
        # None: the operator has to run.
        if any(tag in func.tags for tag in _DYNAMIC):
            if virtual:
                raise ConfigError(
                    f"memory: {func.name()} makes tensors whose shapes depend on values, which are unknown "
                    "before a step; measure a step, or use shapes that do not depend on values"
                )
            return None
        on_meta, named = pytree.tree_map_only(Tensor, _like_on_meta, (args, options))
        if "device" in named or not any(True for _ in _tensors(args, options)):
            named |= {"device": torch.device("meta")}
        named.pop("pin_memory", None)
        try:
            return func(*on_meta, **named)
        except (NotImplementedError, RuntimeError):
            return None  # it has no shapes without values, or its arguments are wrong: running it tells

    def _reserved(self, shape: Tensor) -> Tensor:
        tensor = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        self._ledger.add(tensor)
        return tensor if is_virtual(tensor) else tensor.fill_(1)

    def _in_place(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Leave virtual arguments as they are, and set small ones that a virtual one would change to 1."""
        changed: list[Any] = []
        results: list[Any] = []
        for number, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else options.get(argument.name)
            results.append(value)
            changed += _tensors((value,), {})
        for tensor in changed:
            if not is_virtual(tensor):
                tensor.fill_(1)
        returns = schema_of(func).returns
        if not returns:
            return None
        if all(value.alias_info is not None for value in returns):
            return results[0] if len(returns) == 1 else tuple(results)
        on_meta, named = pytree.tree_map_only(Tensor, _like_on_meta, (args, options))
        outputs = func(*on_meta, **named)
        rest = iter(results)
        outputs = (outputs,) if len(returns) == 1 else outputs
        filled = [
            next(rest)
            if value.alias_info is not None
            else pytree.tree_map_only(Tensor, self._reserved, output)
            for value, output in zip(returns, outputs, strict=True)
        ]
        return filled[0] if len(returns) == 1 else tuple(filled)


def _kind(func: Any) -> _Kind:
    name, schema = func.name().partition(".")[0], schema_of(func)
    if name in _RUN:
        return _Kind.REAL
    if name in _READ:
        return _Kind.VALUE
    if schema.is_mutable:
        return _Kind.IN_PLACE
    if any(value.alias_info is not None for value in schema.returns):
        return _Kind.VIEW
    return _Kind.PURE


def _tensors(args: Any, options: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *options.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, {})


def _on_meta(args: Any, options: Mapping[str, Any]) -> bool:
    device = options.get("device")
    return (device is not None and torch.device(device).type == "meta") or any(
        tensor.is_meta for tensor in _tensors(args, options)
    )


def _nbytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _like_on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _unit_value(tensor: Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _key(func: Any, args: Any, options: Mapping[str, Any]) -> Hashable | None:
    """Key of calls with the same shapes; None: the call is like no other."""
    key = func, _described(args), _described([*options.items()])
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value
