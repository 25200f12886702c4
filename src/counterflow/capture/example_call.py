"""Call of a model with a mini-batch, and the free dimensions of its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from .record import main_dtype

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FreeLengths(Enum):
    """Tensors whose second dimension, positions of a sequence, is free as the samples are.

    Attributes:
        ALL: token ids and masks, features ``[samples, positions, features]``, and numbers
            ``[samples, positions]`` beside them.
        INTEGERS: token ids and masks.
        NONE: none.
    """

    ALL = auto()
    INTEGERS = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True)
class Call:
    """Rule by which a mini-batch becomes the arguments of a model.

    A mapping whose keys are parameters of the model's forward becomes keyword arguments; a tuple of at most
    as many elements as it accepts, positional arguments, and so does a list of as many as it needs; anything
    else is one argument.

    Attributes:
        names: parameters that may be given by name, in their order.
        positional: number of parameters that may be given by position.
        required: number of these that have no default.
        any_name: whether further ones may be given by name.
        any_number: whether any number may be given by position.
        options: default keyword arguments.
    """

    names: tuple[str, ...]
    positional: int
    required: int
    any_name: bool
    any_number: bool
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Call:
        """Find the parameters through which a model takes a mini-batch."""
        parameters = list(inspect.signature(model.forward).parameters.values())
        names = tuple(p.name for p in parameters if p.kind in _NAMED)
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        # Tensors that a transformers model saves for generation are not activations. A config's False is not
        # that of its decoder's.
        knows_caches = getattr(getattr(model, "config", None), "use_cache", None) is not None
        caches = knows_caches and (any_name or "use_cache" in names)
        return cls(
            names,
            sum(p.kind in _POSITIONAL for p in parameters),
            sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters),
            any_name,
            any(p.kind is p.VAR_POSITIONAL for p in parameters),
            (("use_cache", False),) if caches else (),
        )

    def bound(self, inputs: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, positional and by name.

        The latter are in the order of the parameters, whatever that of a mini-batch is; those that only
        ``**kwargs`` takes follow in the mini-batch's order, which the model sees.

        Raises:
            ConfigError: a list may be one argument or several.
        """
        args: tuple[Any, ...] = ()
        named = {**dict(self.options), **kwargs}
        if isinstance(inputs, Mapping):
            known = inputs.keys() & self.names
            if known and (self.any_name or len(known) == len(inputs)):
                named |= dict(inputs)
            else:
                args = (dict(inputs),)
        elif (
            type(inputs) in (tuple, list)
            and len(inputs) > 1
            and (self.any_number or len(inputs) <= self.positional)
        ):
            if type(inputs) is list and len(inputs) != self.required:
                raise ConfigError(
                    f"the inputs are a list of {len(inputs)}, which the model may take as one argument or as "
                    f"{len(inputs)}: give several arguments as a tuple, and one that is a list by its name, "
                    f"as in {{{next(iter(self.names), 'name')!r}: inputs}}"
                )
            args = tuple(inputs)
        elif inputs is not None:
            args = (inputs,)
        return args, {name: named[name] for name in self.names if name in named} | named

    def run(self, model: nn.Module, inputs: Any, kwargs: Mapping[str, Any]) -> Any:
        """Output of the model."""
        args, named = self.bound(inputs, kwargs)
        return model(*args, **named)


@dataclass(frozen=True, slots=True)
class Example:
    """A call of a model with an example.

    Attributes:
        call: how the call is made.
        leaves: leaves of its arguments.
        spec: structure of (positional arguments, keyword arguments).
        free: by leaf, the dimensions whose size may vary, each with the number of its group: all dimensions
            of a group have the same size.
        dtype: dtype of most of the model's weights when the example was made.
    """

    call: Call
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    free: tuple[tuple[tuple[int, int], ...], ...]
    dtype: torch.dtype

    @property
    def length_groups(self) -> frozenset[int]:
        """Groups of free dimensions that are no samples."""
        samples = {dims[0][1] for dims in self.free if dims}
        return frozenset(group for dims in self.free for _, group in dims) - samples

    @property
    def has_free_numbers(self) -> bool:
        """True if the positions of a tensor of floating-point or complex numbers are free."""
        leaves = zip(self.leaves, self.free, strict=True)
        return any(len(dims) > 1 and _is_number(leaf) for leaf, dims in leaves)

    def lengths_of(self, inputs: Any, kwargs: Mapping[str, Any]) -> dict[int, int]:
        """Lengths of a mini-batch by group; none, if it is no call like that of the example."""
        leaves, spec = pytree.tree_flatten(self.call.bound(inputs, kwargs))
        if spec != self.spec:
            return {}
        groups = self.length_groups
        return {
            group: leaf.shape[dim]
            for leaf, free in zip(leaves, self.free, strict=True)
            for dim, group in free
            if group in groups and isinstance(leaf, Tensor) and leaf.dim() > dim
        }


def example_of(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any], dim: int | None, lengths: FreeLengths
) -> Example:
    """A call with an example.

    Args:
        model: the model that is called.
        inputs: inputs as in ``layers``.
        kwargs: keyword arguments as in ``layers``.
        dim: dimension of the samples; None: none.
        lengths: tensors whose positions are free; only if samples are the first dimension.

    Raises:
        ConfigError: the example has no tensor with samples.
    """
    call = Call.of(model)
    leaves, spec = pytree.tree_flatten(call.bound(inputs, kwargs))
    sizes = [leaf.shape[dim] for leaf in leaves if _has(leaf, dim)]
    samples = max(sizes, key=sizes.count, default=None)
    if dim is not None and samples is None:
        raise ConfigError(
            "the example has no tensor with samples; give the model's inputs in the form of a mini-batch"
        )
    has_samples = [_has(leaf, dim) and leaf.shape[dim] == samples for leaf in leaves]
    lengths = lengths if dim == 0 else FreeLengths.NONE
    pairs = [*zip(leaves, has_samples, strict=True)]
    known = {leaf.shape[1] for leaf, has in pairs if has and _has_length(leaf, lengths)}
    groups: dict[tuple[str, int], int] = {}
    free = []
    for leaf, has in pairs:
        dims: list[tuple[int, int]] = []
        if has:
            dims.append((dim or 0, groups.setdefault(("samples", 0), len(groups))))
            as_long = lengths is FreeLengths.ALL and leaf.dim() == 2 and leaf.shape[1] in known
            if as_long or _has_length(leaf, lengths):
                dims.append((1, groups.setdefault(("length", leaf.shape[1]), len(groups))))
        free.append(tuple(dims))
    return Example(call, tuple(leaves), spec, tuple(free), main_dtype(model))


def _has_length(tensor: Tensor, lengths: FreeLengths) -> bool:
    if _is_number(tensor):
        return lengths is FreeLengths.ALL and tensor.dim() == 3
    return lengths is not FreeLengths.NONE and tensor.dim() == 2


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has(leaf: Any, dim: int | None) -> bool:
    return isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim
