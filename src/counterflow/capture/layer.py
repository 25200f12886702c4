"""A piece of a model's steps as a module.

Invariant: modules, parameters and buffers of a layer are the model's own objects. A layer keeps nothing from
one forward to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from .asked import Call, Example
from .record import Step
from .values import Around, OfDtype, Ref, Size, Template


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where a layer's free sizes are from.

    Attributes:
        found: by group, a tensor that comes in and the dimension that has this size.
        taken: those that come in as numbers, after the tensors.
    """

    found: Mapping[int, tuple[Ref, int]]
    taken: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a first layer is given, and what of it the model was captured for.

    Attributes:
        example: with what.
        inputs: by leaf that is a tensor, what it is called.
    """

    example: Example
    inputs: Mapping[int, Ref]


@dataclass(frozen=True, slots=True)
class Part:
    """A layer's steps in one mode.

    Attributes:
        takes: the tensors that come in; of a first layer none.
        sizes: free ones.
        steps: what it does.
        frees: by step, the tensors that nothing after it takes.
        gives: the tensors that go out, and after them numbers; None: ``output``.
        output: what the last layer gives.
        dtype_of: what has the dtype of the weights: the name of a parameter, or a tensor that comes in.
        entry: of a first layer.
        used: the names of the keyword arguments that the model's output is computed of.
    """

    takes: tuple[Ref, ...]
    sizes: Sizes
    steps: tuple[Step, ...]
    frees: tuple[tuple[Ref, ...], ...]
    gives: tuple[Ref, ...]
    numbers: tuple[int, ...]
    output: Template | None
    dtype_of: str | Ref | None
    entry: Entry | None
    used: frozenset[str]

    def __deepcopy__(self, memo: object) -> Self:
        """It does not change, and copies of a layer share it."""
        return self


class _Mode:
    """Whether the model that a layer is of is in training mode; copies of a layer ask the same model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mode, (nn.Module(),)

    def training(self) -> bool:
        model = self._model()
        return model is None or model.training


class CapturedLayer(nn.Module):
    """A layer that was found by itself: some steps of a model's forward, between two of its modules.

    It takes what the layer before gives: a tensor, or a tuple of tensors and sizes; the first one takes what
    the model does, the last one gives what it gives.

    Args:
        model: whose steps they are.
        title: for messages: from which module to which.
        parts: in training and in evaluation.
        held: parameters, buffers and constants that steps take, by their names in the model.
        cost: operations, for the example.

    Raises:
        ConfigError: in a forward: the mini-batch is of another kind than the example.
    """

    def __init__(
        self,
        model: nn.Module,
        title: str,
        parts: tuple[Part, Part],
        held: Mapping[str, Tensor],
        cost: float,
    ) -> None:
        super().__init__()
        self.title, self.cost = title, cost
        self._of_model = _Mode(model)
        self._parts = parts
        self._local: dict[str, str] = {}
        for path in dict.fromkeys(s.module for part in parts for s in part.steps if s.module is not None):
            self._add(path, model.get_submodule(path))
        for name, tensor in held.items():
            self._hold(name, tensor)

    def _add(self, path: str, module: nn.Module) -> None:
        local = self._local[path] = self._unused(path)
        self.add_module(local, module)

    def _hold(self, name: str, tensor: Tensor) -> None:
        local = self._local[name] = self._unused(name)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(local, tensor)
        else:
            self.register_buffer(local, tensor, persistent=not name.startswith("constant "))

    def _unused(self, name: str) -> str:
        name = name.replace(".", "_").replace(" ", "_")
        while hasattr(self, name):
            name += "_"
        return name

    @property
    def call(self) -> Call:
        """How the model, and a first layer, is called."""
        entry = self._parts[0].entry
        assert entry is not None
        return entry.example.call

    def uses(self, name: str) -> bool:
        """Whether what the model gives in training is computed of its keyword argument of that name."""
        return name in self._parts[0].used

    def hold_unused(self, name: str, tensor: Tensor) -> None:
        """Have a parameter or a buffer that no step takes."""
        self._hold(name, tensor)

    def extra_repr(self) -> str:
        """Its place in the model."""
        return self.title

    def forward(self, value: Any = None, **kwargs: Any) -> Any:
        """What its steps make of what the layer before gives."""
        training = self.training and self._of_model.training()
        part = self._parts[0] if training else self._parts[1]
        if part.entry is not None:
            values = _entered(part.entry, value, kwargs)
        else:
            values = dict(zip(part.takes, (value,) if isinstance(value, Tensor) else value, strict=False))
        sizes = {group: values[ref].shape[dim] for group, (ref, dim) in part.sizes.found.items()}
        if part.sizes.taken:
            sizes |= dict(zip(part.sizes.taken, value[len(part.takes) :], strict=True))
        held = {name: getattr(self, local) for name, local in self._local.items()}
        around = Around(values, held, sizes, self._dtype(part, values, held), self._device(values))
        for step, frees in zip(part.steps, part.frees, strict=True):
            args, named = step.takes.filled(around)
            call = step.function if step.module is None else held[step.module]
            assert call is not None
            if step.grad:
                found = call(*args, **named)
            else:
                with torch.no_grad():
                    found = call(*args, **named)
            leaves = [found] if isinstance(found, Tensor) else pytree.tree_leaves(found)
            if len(leaves) != step.leaves:
                raise ConfigError(
                    f"{step.module or call} gives {len(leaves)} values, and gave {step.leaves} for the "
                    "example that the layers were found with; find them with an example of this kind"
                )
            for index, ref in step.gives:
                values[ref] = leaves[index]
            for ref in frees:
                values.pop(ref, None)
        if part.output is not None:
            return part.output.filled(around)
        if len(part.gives) == 1 and not part.numbers:
            return values[part.gives[0]]
        return (*(values[ref] for ref in part.gives), *(sizes[group] for group in part.numbers))

    def _dtype(self, part: Part, values: Mapping[Ref, Tensor], held: Mapping[str, Any]) -> torch.dtype:
        of = part.dtype_of
        if of is None:
            return torch.get_default_dtype()
        if isinstance(of, Ref):
            return values[of].dtype
        found = held.get(of)
        if isinstance(found, nn.Module):
            return next(p.dtype for p in found.parameters() if p.is_floating_point())
        return torch.get_default_dtype() if found is None else found.dtype

    def _device(self, values: Mapping[Ref, Tensor]) -> torch.device:
        return next(
            (tensor.device for tensor in (*values.values(), *self.parameters(), *self.buffers())),
            torch.device("cpu"),
        )


def _entered(entry: Entry, inputs: Any, kwargs: Mapping[str, Any]) -> dict[Ref, Tensor]:
    """A mini-batch as the model takes it.

    Raises:
        ConfigError: it is of another kind than the example.
    """
    example = entry.example
    leaves, spec = pytree.tree_flatten(example.call.bound(inputs, kwargs))
    if spec != example.spec:
        raise ConfigError(
            f"the mini-batch is of another structure ({_shown(leaves, spec)}) than the example that the "
            f"layers were found with ({_shown(example.leaves, example.spec)}); give an example of this one"
        )
    values: dict[Ref, Tensor] = {}
    by_group: dict[int, int] = {}
    for index, (leaf, its, free) in enumerate(zip(leaves, example.leaves, example.free, strict=True)):
        ref = entry.inputs.get(index)
        if ref is None:
            if type(leaf) is not type(its) or (leaf != its):
                raise ConfigError(
                    f"the mini-batch has {leaf!r} where the example that the layers were found with has "
                    f"{its!r}, which the model may decide by; find them with an example that has it"
                )
            continue
        dims = dict(free)
        fits = isinstance(leaf, Tensor) and leaf.dim() == its.dim()
        for dim, size in enumerate(leaf.shape if fits else ()):
            wanted = by_group.setdefault(dims[dim], size) if dim in dims else its.shape[dim]
            fits = fits and size == wanted
        if not fits:
            shown = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
            raise ConfigError(
                f"the mini-batch has a tensor of shape {shown} where the example that the layers were found "
                f"with has {_freely(its, dims)}; find them with an example of these sizes"
            )
        values[ref] = leaf
    return values


def _freely(tensor: Tensor, free: Mapping[int, int]) -> str:
    """A shape, with a letter for each size that is free."""
    return (
        "(" + ", ".join(f"any {free[d]}" if d in free else str(n) for d, n in enumerate(tensor.shape)) + ")"
    )


def _shown(leaves: Sequence[Any], spec: pytree.TreeSpec) -> str:
    args, kwargs = pytree.tree_unflatten([type(leaf).__name__ for leaf in leaves], spec)
    return ", ".join([*map(str, args), *(f"{name}={kind}" for name, kind in kwargs.items())])


def needs_dtype(steps: Sequence[Step], output: Template | None) -> bool:
    """Whether some steps ask of what dtype the weights are."""
    templates = [step.takes for step in steps] + ([] if output is None else [output])
    return any(isinstance(leaf, OfDtype) for template in templates for leaf in template.leaves())


def groups_in(steps: Sequence[Step], output: Template | None) -> set[int]:
    """The groups of free sizes that some steps ask for."""
    templates = [step.takes for step in steps] + ([] if output is None else [output])
    leaves = (leaf for template in templates for leaf in template.leaves() if isinstance(leaf, Size))
    return {group for leaf in leaves for group in leaf.groups}
