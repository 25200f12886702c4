"""Values that stages send to each other: any pytree, flattened to its structure and its tensors.

Invariant: a lone tensor has no structure and costs nothing but its message; a structure is sent with the
first message of its kind, and from then on the tensors alone.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from counterflow.common.mappings import (
    PLAIN,
    PackedSpec,
    flat_with_paths,
    packed_spec,
    register_mapping_classes,
    unpacked_spec,
)
from counterflow.common.numbering import number_of
from counterflow.common.tensors.graphs import pointer
from counterflow.common.tensors.torch_private import storage_uses
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError
from counterflow.schedule.ir import SkipLink

from .masks import Rest, closed, opened

Value = Any
"""Input or output of a stage."""


class Keyworded(NamedTuple):
    """Arguments of the first layer, by position (None: no such argument) and by keyword."""

    positional: Any
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Facts of a tensor that its receiver needs to post the receive.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of its values.
        requires_grad: True if its gradient is sent back.
        on_host: True if it is in host memory, on whatever device its worker computes: lengths, numbers.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device.type == "cpu")

    def place(self, device: torch.device) -> torch.device:
        """Device of the tensor on a worker that computes on ``device``."""
        return _HOST if self.on_host else device


class Unit(NamedTuple):
    """Unit of one backward: a micro-batch, or one of the ``parts`` it is halved into.

    ``slot`` distinguishes the mini-batches that are in flight at once.
    """

    micro_batch: int
    part: int = 0
    parts: int = 1
    slot: int = 0

    @property
    def shape(self) -> Unit:
        """The unit whose shapes this one's messages have: that of the first slot."""
        return self if not self.slot else self._replace(slot=0)

    def rows(self, samples: int) -> slice:
        """Rows of the unit among the ``samples`` of its micro-batch."""
        return slice(samples * self.part // self.parts, samples * (self.part + 1) // self.parts)


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of a value, which with its tensors makes the value.

    Attributes:
        spec: its tree of tuples, lists, dicts and other containers that torch's pytrees traverse.
        at: for each leaf, the index of its tensor; -1: a constant, -2: a number.
        constants: types and values of its constants.
        numbers: types of its ints and floats, which may differ from one micro-batch to the next and are sent
            as one tensor after the rest.
        flat: tuple or list, for a value that is a tuple or list of tensors alone.
        masks: True if it contains block masks.
        shares: True if two of its tensors have elements in the same memory, which messages take apart.
    """

    spec: pytree.TreeSpec
    at: tuple[int, ...]
    constants: tuple[tuple[type, object], ...] = ()
    numbers: tuple[type, ...] = ()
    flat: type | None = None
    masks: bool = False
    shares: bool = field(default=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, from which every process makes its own structure."""
        return _structure, (
            *(packed_spec(self.spec), self.at, self.constants, self.numbers, self.flat),
            *(self.masks, self.shares),
        )


def _structure(spec: PackedSpec, *rest: Any) -> Structure:
    structure = Structure(unpacked_spec(spec), *rest)
    if structure.flat is None or structure.shares or len(structure.at) > _LONGEST:
        return structure
    # One object for all equal structures, so that they are compared by identity.
    return _flat.setdefault((structure.flat, len(structure.at)), structure)


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """Facts of a value that its receiver needs to post the receive.

    Attributes:
        structure: its structure; None for a lone tensor.
        tensors: specs of its tensors.
        missing: among the tensors that require a gradient, indices of those that have none.
    """

    structure: Structure | None
    tensors: Sequence[TensorSpec]
    missing: frozenset[int] = frozenset()

    @classmethod
    def of(cls, structure: Structure | None, tensors: Sequence[Tensor]) -> ValueLayout:
        """Layout of a flattened value."""
        return cls(structure, [TensorSpec.of(tensor) for tensor in tensors])


Shapes = dict[tuple[int | SkipLink, Unit], ValueLayout]
"""Layouts of outputs and of skip values, by their stage or skip connection and the unit (``Unit.shape``)."""


_HOST = torch.device("cpu")

CONSTANT, NUMBER = -1, -2
_EXACT = 2**53
"""Ints up to this are exact as float64."""

_LARGEST_MEMORY = 2**28
"""Elements up to which the common elements of two tensors are looked for."""

_flat: dict[tuple[type, int], Structure] = {}
"""Structures of tuples and lists of tensors, by length, which is at most ``_LONGEST``."""
_LONGEST = 64


def flatten_value(value: object, place: str) -> tuple[Structure | None, list[Tensor]]:
    """Flatten a value to its structure and its tensors, each once.

    Args:
        value: tensors, numbers, texts, None and the like in tuples, lists, dicts and other containers that
            are registered with torch's pytrees.
        place: stage or layer that returned it, for the message.

    Raises:
        ConfigError: it contains anything else, or a tensor that is not dense.
    """
    if isinstance(value, Tensor):
        return None, [_dense(value, place)]
    kind = type(value)
    if kind is tuple or kind is list:
        count = len(value)  # type: ignore[arg-type]
        if all(isinstance(v, Tensor) for v in value) and len({id(v) for v in value}) == count:  # type: ignore[attr-defined]
            structure, shares = _flat.get((kind, count)), _share_elements(value)  # type: ignore[arg-type]
            if structure is None or shares:
                spec = pytree.tree_flatten(value)[1]
                structure = Structure(spec, tuple(range(count)), flat=kind, shares=shares)
                if count <= _LONGEST and not shares:
                    _flat[kind, count] = structure
            return structure, [_dense(tensor, place) for tensor in value]  # type: ignore[attr-defined]
    return _flatten_value(value, place)


def _dense(tensor: Tensor, place: str) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ConfigError(f"{place} gives {not_dense(tensor)}")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()  # made outside of inference mode
    return tensor


def not_dense(tensor: Tensor) -> str:
    """Clause of an error about a sparse or nested tensor: the reason, and a remedy."""
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return (
        f"a {kind} tensor; pass on the dense tensors that it is made of (indices and values, values and "
        "offsets), and make it in the layer that needs it"
    )


def _flatten_value(value: object, place: str) -> tuple[Structure, list[Tensor]]:
    leaves, spec = pytree.tree_flatten(value)
    masks = any(isinstance(leaf, BlockMask) for leaf in leaves)
    if masks:
        leaves, spec = pytree.tree_flatten(opened(value))
    at: list[int] = []
    tensors: list[Tensor] = []
    constants: list[tuple[type, object]] = []
    numbers: list[float] = []
    places: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            at.append(places.setdefault(id(leaf), len(tensors)))
            if at[-1] == len(tensors):
                tensors.append(_dense(leaf, place))
        elif type(leaf) is float or (type(leaf) is int and abs(leaf) <= _EXACT):
            at.append(NUMBER)
            numbers.append(leaf)
        elif isinstance(leaf, (*PLAIN, Rest)):
            at.append(CONSTANT)
            constants.append((type(leaf), leaf))
        elif register_mapping_classes(leaf):
            return _flatten_value(value, place)
        else:
            raise ConfigError(_refused(value, leaf, place))
    kinds, shares = tuple(type(number) for number in numbers), _share_elements(tensors)
    if numbers:  # as bits: no gradient is made for them, and they are not rounded
        tensors.append(torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64))
    return Structure(spec, tuple(at), tuple(constants), kinds, masks=masks, shares=shares), tensors


def _share_elements(tensors: Sequence[Tensor]) -> bool:
    if len(tensors) < 2:
        return False
    by_memory: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for tensor in tensors:
        address = 0 if tensor.layout is not torch.strided or tensor.is_nested else pointer(tensor)
        if address:
            layouts = by_memory.setdefault(address, [])
            layouts.append((tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))
    return len(by_memory) < len(tensors) and any(
        _have_common_element(*pair) for layouts in by_memory.values() for pair in combinations(layouts, 2)
    )


@lru_cache(maxsize=1024)
def _have_common_element(*layouts: tuple[tuple[int, ...], tuple[int, ...], int]) -> bool:
    # Layouts are shapes, strides and offsets in one memory.
    ends = [
        offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        for shape, strides, offset in layouts
    ]
    if any(0 in shape for shape, *_ in layouts) or max(offset for *_, offset in layouts) >= min(ends):
        return False
    if max(ends) > _LARGEST_MEMORY:
        return True
    used = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    first, second = (used.as_strided(*layout) for layout in layouts)
    first.fill_(value=True)
    return bool(second.any())


def _refused(value: object, leaf: object, place: str) -> str:
    path = next(path for path, candidate in flat_with_paths(value)[0] if candidate is leaf)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
    where = f" at {path}" if path else ""
    return (
        f"{place} gives a {kind}{where}; stages pass on tensors, numbers, texts and None, in tuples, lists, "
        "dicts and other pytrees: make it of these in the layer that needs it, or register its class with "
        "torch.utils._pytree.register_pytree_node"
    )


def unflatten_value(structure: Structure | None, tensors: Sequence[Tensor]) -> Any:
    """Make the value of a structure and its tensors."""
    if structure is None:
        return tensors[0]
    if structure.flat is not None:
        return structure.flat(tensors)
    constants = iter(structure.constants)
    numbers: Iterator[float] = iter(())
    if structure.numbers:
        numbers = iter(tensors[-1].detach().view(torch.float64).tolist())
    kinds = iter(structure.numbers)
    leaves: list[Any] = []
    for at in structure.at:
        if at >= 0:
            leaves.append(tensors[at])
        else:
            leaves.append(next(constants)[1] if at == CONSTANT else next(kinds)(next(numbers)))
    value = pytree.tree_unflatten(leaves, structure.spec)
    return closed(value) if structure.masks else value


def described(structures: Sequence[Structure | None], counts: Sequence[int]) -> Tensor:
    """Description that precedes values of unknown structure; empty if they are lone tensors.

    Raises:
        ConfigError: the structures contain an object that cannot be sent to another worker.
    """
    if all(structure is None for structure in structures):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        data = pickle.dumps((tuple(structures), tuple(counts)))
    except Exception as error:
        raise ConfigError(
            f"a stage gives what cannot go to another worker ({error}); pass on tensors, numbers and texts "
            "in tuples, lists, dicts, or in classes that a module has by name; the function of a BlockMask "
            "has to be one of a module"
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_description(head: Tensor, count: int) -> tuple[Sequence[Structure | None], Sequence[int]]:
    """Structures of ``count`` values, and their numbers of tensors."""
    if not head.numel():
        return (None,) * count, (1,) * count
    description: tuple[Sequence[Structure | None], Sequence[int]]
    description = pickle.loads(head.cpu().numpy().tobytes())  # noqa: S301 - from a worker of this run
    return description


def takes_gradient(tensor: Tensor) -> bool:
    """True if a tensor of this dtype can require a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def signature(tree: object, *more: Any) -> int:
    """A number that identifies the shapes and dtypes of a mini-batch (a float64 holds it)."""
    return 1 + number_of(*[(tuple(leaf.shape), str(leaf.dtype)) for leaf in tensors_in(tree)], *more)


def content_digest(tree: object) -> float:
    """A number that identifies a mini-batch's contents; 0: there is no mini-batch, or no content."""
    leaves = [] if tree is None else pytree.tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not leaves or any(t.is_meta or t.layout is not torch.strided for t in tensors):
        return 0.0
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            flat = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).cpu().numpy().data)
        elif isinstance(leaf, PLAIN):
            digest.update(repr(leaf).encode())
    return 1.0 + (int.from_bytes(digest.digest()) >> 12)


_TRIES = 3
"""Number of checks after which a buffer that is still shared is not waited for."""


class BufferPool:
    """Receive buffers for reuse.

    Invariant: a buffer that ``take`` returns shares memory with nothing that a layer or a hook saved. All
    buffers, in use or free, never have more bytes than were once in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._free: dict[tuple[torch.Size, torch.dtype, bool], deque[tuple[Tensor, int]]] = {}
        self._free_bytes = self._used_bytes = self._most_bytes = 0
        self.allocations = 0
        """Number of buffers that were allocated."""

    def take(self, spec: TensorSpec) -> Tensor:
        """Get a buffer that shares memory with no other tensor; its content is arbitrary."""
        free = self._free.get((spec.shape, spec.dtype, spec.on_host or self._on_host))
        for _ in range(len(free) if free else 0):
            assert free is not None
            buffer, tries = free.popleft()
            # One use for the buffer, and one for asking: no other tensor has the memory.
            if storage_uses(buffer) <= 2:
                size = buffer.nbytes
                self._free_bytes -= size
                break
            if tries < _TRIES:
                free.append((buffer, tries + 1))
            else:  # other code holds the buffer and owns it now
                self._free_bytes -= buffer.nbytes
        else:  # the remaining free ones are shared: in use
            self.allocations += 1
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=spec.place(self._device))
            size = buffer.nbytes
            shared = size * (len(free) if free else 0)
            self._most_bytes = max(self._most_bytes, self._used_bytes + size + shared)
        used = self._used_bytes = self._used_bytes + size
        self._most_bytes = max(self._most_bytes, used)
        return buffer

    def put(self, buffers: Sequence[Tensor]) -> None:
        """Return buffers that the engine no longer needs; other code may still hold them."""
        for buffer in buffers:
            key, size = (buffer.shape, buffer.dtype, buffer.is_cpu), buffer.nbytes
            self._used_bytes -= size
            self._free_bytes += size
            free = self._free.get(key)
            if free is None:
                free = self._free[key] = deque()
            free.append((buffer, 0))
            while self._free_bytes + self._used_bytes > self._most_bytes:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._free))
        free = self._free[key]
        if free:
            self._free_bytes -= free.popleft()[0].nbytes
        if not free:
            del self._free[key]
