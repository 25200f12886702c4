"""A copy of a model whose weights have shapes but no values, and whose modules report calls and reads.

Invariant: the user's model is not changed, and other threads may use it meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError

from .placeholders import Member
from .record import main_dtype
from .tracing_internals import NO_MEMORY, FakeTensorMode, drop_hooks, memory_of

DEVICE = torch.device("cpu")
"""Device that fake tensors report."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Called = Callable[[nn.Module, type, Any, Any], Any]
"""Function of a called module, its class and the call's arguments."""

Read = Callable[[nn.Module, str], None]
"""Function of a module and the name of an attribute that is read."""


class FakeModel:
    """The copy.

    Args:
        model: the user's model.
        fake: mode of the tensors without values.
        mark: dtype of the copy's weights; None: they keep theirs.
        training: whether all modules are in training mode; None: each keeps its mode.
        called: makes the calls of modules.
        read: notes the attributes that are read.

    Attributes:
        module: the copy.
        kind: class of the user's model.
        paths: by identity of a module, its path.
        origins: by identity of a tensor, the parameter or buffer of the user's model.
        tensors: the tensors of ``origins``, so identities stay theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        fake: FakeTensorMode,
        *,
        mark: torch.dtype | None,
        training: bool | None,
        called: Called,
        read: Read,
    ) -> None:
        self._fake, self._mark, self._called, self._read = fake, mark, called, read
        self._dtype = main_dtype(model)
        self._classes: dict[type, type] = {}
        self.origins: dict[int, Member] = {}
        self.tensors: list[Tensor] = []
        self.module = self._copied(model)
        self._memory = {memory_of(tensor) for tensor in self.tensors} - {NO_MEMORY}
        if training is not None:
            self.module.train(training)
        self.kind = type(self.module)
        self.paths = {id(module): path for path, module in self.module.named_modules()}
        for module in list(self.module.modules()):
            self._watch(module)

    def close(self) -> None:
        """Drop the copy, so its tensors are freed at once."""
        self._classes.clear()
        self.origins.clear()
        self.tensors.clear()
        self.paths.clear()
        del self.module
        self._called, self._read = _call, _ignore  # for modules of the copy that a traceback has

    def dtype_of(self, tensor: Tensor, weights: torch.dtype | None = None) -> torch.dtype:
        """Dtype in which a tensor of the user's appears in the copy's run.

        Args:
            tensor: the tensor.
            weights: dtype of the weights when the tensor was made; None: their current one.
        """
        follows = tensor.dtype == (weights or self._dtype)
        return (self._mark or self._dtype) if follows else tensor.dtype

    def _copied(self, model: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        named = (*model.named_parameters(), *model.named_buffers())
        with self._fake:
            for name, tensor in named:
                if id(tensor) not in memo:
                    memo[id(tensor)] = fake = self._fake_of(tensor)
                    self.origins[id(fake)] = Member(name)
                    self.tensors.append(fake)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise ConfigError(
                f"the {type(model).__name__} cannot be copied, and its layers are found in a copy "
                f"({type(error).__name__}: {error}); keep iterators, locks and open files out of its "
                "attributes, or give the Pipeline a list of its layers"
            ) from error

    def owns(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a parameter or a buffer of the copy, or a view of one."""
        return memory_of(tensor) in self._memory

    def _fake_of(self, tensor: Tensor) -> Tensor:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype_of(tensor), device=DEVICE)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def _watch(self, module: nn.Module) -> None:
        if isinstance(module, (torch.jit.ScriptModule, *CONTAINERS)):
            return
        drop_hooks(module)  # these are the user's, who would see the calls
        kind = type(module)
        if kind not in self._classes:
            self._classes[kind] = self._reporting(kind)
        try:
            module.__class__ = self._classes[kind]
        except TypeError:  # its class does not allow plain objects
            return

    def _reporting(self, kind: type) -> type:
        of_kind: Any = kind.__getattribute__

        def called(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._called(this, kind, args, kwargs)

        def read(this: nn.Module, name: str) -> Any:
            self._read(this, name)
            return of_kind(this, name)

        return _subclass(kind, {"__call__": called, "__getattribute__": read})


def _call(module: nn.Module, kind: type, args: Any, kwargs: Any) -> Any:
    return kind.__call__(module, *args, **kwargs)


def _ignore(module: nn.Module, name: str) -> None:
    del module, name


def observed_objects(model: nn.Module) -> Mapping[str, Any]:
    """Further objects whose attributes a model's forward reads, by name: a trainer around the model."""
    observed = getattr(type(model), "observed_objects", None)
    return {} if observed is None else observed(model)


@contextmanager
def observing(objects: Mapping[str, Any], read: Callable[[str, str], None]) -> Iterator[None]:
    """Note the attributes that are read of some objects of the user's, and restore them afterwards.

    Args:
        objects: the objects, by name.
        read: function of an object's name and an attribute's name.
    """
    saved = {label: (type(instance), dict(vars(instance))) for label, instance in objects.items()}
    try:
        for label, instance in objects.items():
            object.__setattr__(instance, "__class__", _observed(type(instance), label, read))
        yield
    finally:
        for label, instance in objects.items():
            kind, attributes = saved[label]
            object.__setattr__(instance, "__class__", kind)
            now = vars(instance)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)


def _observed(kind: type, label: str, read: Callable[[str, str], None]) -> type:
    of_kind: Any = kind.__getattribute__

    def noted(this: object, name: str) -> Any:
        read(label, name)
        return of_kind(this, name)

    return _subclass(kind, {"__getattribute__": noted})


def _subclass(kind: type, body: dict[str, Any]) -> type:
    return type(
        kind.__name__, (kind,), {**body, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
