"""One run of a model on tensors with shapes but no values, and the steps recorded in it.

Opened modules are traced; a call of any other one is a step, and so is each call of torch in between that
returns a tensor, or changes one. A copy of the model runs, with classes of modules that report their calls,
so other threads may use the model meanwhile.

Invariant: if a step's tensor comes neither from an earlier step, nor an input, nor the model, there is no
record: the module whose forward made it is ``Unfollowed``.
"""

from __future__ import annotations

import copy
import enum
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from counterflow.added_loss import added_losses
from counterflow.trees import tensors_in, version_of

from .asked import Example
from .counting import OperationCounter, numbers_in, size_of
from .record import Record, Step, main_dtype
from .torch_private import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    attributes_of,
    drop_hooks,
    memory_of,
    state_of,
)
from .unfollowed import Unfollowed, failed, line_of
from .values import Held, OfDevice, OfDtype, Ref, Span, Template

DEVICE = torch.device("cpu")
"""Device that fake tensors report."""

MARKS = (torch.float64, torch.bfloat16, None)
"""Dtypes of fake weights; everything of this dtype then depends on the weights' dtype.

Modules may not accept the first; None: weights have their own dtype, and dtypes are those of the example.
"""

_LIMITS = ("min", "max", "eps", "tiny")
"""Numbers of a dtype that ``torch.finfo`` provides."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Recorder(TorchFunctionMode):
    """Runs a copy of a model once, and records its steps.

    Args:
        model: the user's model.
        example: example of the call.
        opened: paths of the modules that are traced.
        sizes: by group of free dimensions, its size in this run; others have the example's.
        training: whether all modules are in training mode; None: each in its own mode.
        mark: one of ``MARKS``, which distinguishes the weights' dtype from a float32 that the user's code
            asks for.
        costs: costs that a run has counted, which takes time; None: this run counts them.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        opened: Collection[str],
        sizes: Mapping[int, int],
        *,
        training: bool | None,
        mark: torch.dtype | None,
        costs: Mapping[str, float] | None,
    ) -> None:
        super().__init__()
        self._opened, self._example, self._sizes, self._mark = opened, example, sizes, mark
        self._mode = "evaluation" if training is False else "training"
        self._record = Record(mark=mark, costs=dict(costs or {}))
        self._counts = costs is None
        self._of_mark: dict[Any, OfDtype] = {}
        if mark is not None:
            told = {getattr(torch.finfo(mark), name): OfDtype(name) for name in _LIMITS}
            self._of_mark = {mark: OfDtype(), **told}
        self._origin: dict[int, Ref | Held] = {}
        self._alive: list[Any] = []
        self._stack: list[str] = [""]
        self._atoms = 0  # nesting depth within an atom
        self._unit: dict[int, bool | None] = {}
        self._classes: dict[type, type] = {}
        self._costs: list[str] = []
        self._graphs: dict[int, type] = {}
        # Values of tensors are unknown symbols.
        self._fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._model_dtype = main_dtype(model)
        self._model = self._copied(model)
        if training is not None:
            self._model.train(training)
        self._paths = {id(m): path for path, m in self._model.named_modules()}
        self._left: dict[int, dict[str, Any]] = {}
        self._class = type(self._model)
        for module in list(self._model.modules()):
            self._watch(module)

    # -- the copy

    def _copied(self, model: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        named = (*model.named_parameters(), *model.named_buffers())
        with self._fake:
            for name, tensor in named:
                if id(tensor) not in memo:
                    memo[id(tensor)] = made = self._fake_of(tensor)
                    self._origin[id(made)] = Held(name)
                    self._alive.append(made)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        return copy.deepcopy(model, memo)

    def _fake_of(self, tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=self._dtype_of(tensor), device=DEVICE)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._mark if self._mark and tensor.dtype == self._model_dtype else tensor.dtype

    def _watch(self, module: nn.Module) -> None:
        """Make a module of the copy report its calls."""
        if isinstance(module, (torch.jit.ScriptModule, *_CONTAINERS)):
            return
        drop_hooks(module)  # these are the user's, who would see the calls
        cls = type(module)
        if cls not in self._classes:

            def called(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._called(this, cls, args, kwargs)

            body = {"__call__": called, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            self._classes[cls] = type(cls.__name__, (cls,), body)
        try:
            module.__class__ = self._classes[cls]
        except TypeError:  # its class does not allow plain objects
            return

    # -- the run

    def run(self) -> Record:
        """Run the model.

        Raises:
            Unfollowed: the forward of an opened module cannot be traced.
        """
        record, example = self._record, self._example
        with self._fake:
            leaves = self._inputs()
        before = self._attributes()
        self._leave(self._model)
        args, kwargs = pytree.tree_unflatten(leaves, example.spec)
        try:
            with self._fake, self._counting(), self, torch.enable_grad(), added_losses():
                result = self._through(self._model, self._class, args, kwargs)
            record.output = self._template(result)
        except Unfollowed:
            raise
        except Exception as error:  # a model may raise anything
            raise failed(self._stack[-1], error) from error
        self._refuse_changed(before)
        return record

    def _inputs(self) -> list[Any]:
        """Fake tensors for the example's, in the sizes of this run."""
        leaves: list[Any] = list(self._example.leaves)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            shape = list(leaf.shape)
            for dim, group in self._example.free[index]:
                shape[dim] = self._sizes.get(group, shape[dim])
            made = torch.empty(shape, dtype=self._dtype_of(leaf), device=DEVICE)
            leaves[index] = made.requires_grad_(leaf.requires_grad)
            ref = self._record.inputs[index] = Ref(-1, len(self._record.inputs))
            self._know(made, ref)
        return leaves

    def _know(self, tensor: Tensor, ref: Ref) -> None:
        self._origin[id(tensor)] = ref
        self._alive.append(tensor)
        self._record.shapes[ref] = tuple(map(size_of, tensor.shape)), tensor.dtype
        if tensor.layout is torch.strided:
            self._record.memory[ref] = memory_of(tensor)
        self._record.bytes[ref] = numbers_in(tensor.shape) * tensor.dtype.itemsize

    # -- modules

    def _called(self, module: nn.Module, cls: type, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is not None:
            self._record.called.add(path)
        if self._atoms:
            if path is None:
                return cls.__call__(module, *args, **kwargs)
            with self._costing(path):
                return cls.__call__(module, *args, **kwargs)
        if path is None or path in self._opened:
            return self._through(module, cls, args, kwargs)
        return self._noted_module(path, module, cls, args, kwargs)

    def _through(self, module: nn.Module, cls: type, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is None:
            return cls.__call__(module, *args, **kwargs)
        self._stack.append(path)
        with self._costing(path):
            found = cls.__call__(module, *args, **kwargs)
        self._stack.pop()
        return found

    def _noted_module(self, path: str, module: nn.Module, cls: type, args: Any, kwargs: Any) -> Any:
        self._refuse_switched(path, module)
        takes = self._template((args, kwargs))
        before = _versions((args, kwargs))
        self._atoms += 1
        try:
            with self._costing(path):
                found = cls.__call__(module, *args, **kwargs)
        except Exception as error:  # a module may raise anything
            raise failed(path, error) from error
        finally:
            self._atoms -= 1
        self._leave(module)
        self._noted(path, None, takes, found, before)
        return found

    # -- functions

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A call of torch, which is ignored within an atom."""
        del types
        kwargs = dict(kwargs or {})
        if self._atoms:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (known := self._of_draws(func, name, args)) is not None:
            return known
        if name in _UNSEEN:
            raise self._unfollowed(f"calls Tensor.{name}")
        before = _versions((args, kwargs))
        takes = self._template((tuple(args), kwargs)) if before else None
        found = func(*args, **kwargs)
        has_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found))
        changes = found is None and name != "__get__" and bool(before)
        if has_tensor or changes:
            self._noted(None, func, takes or self._template((tuple(args), kwargs)), found, before)
        if func is torch.rand and isinstance(found, Tensor):
            self._unit[id(found)] = None
        return found

    def _of_draws(self, func: Any, name: str, args: Sequence[Any]) -> bool | None:
        """Knowledge about a number that was drawn from [0, 1): it is never negative."""
        if name in ("__lt__", "lt", "less") and len(args) == 2 and id(args[0]) in self._unit:
            limit = args[1]
            if isinstance(limit, (int, float)) and (limit <= 0 or limit >= 1):
                found = func(*args)
                self._alive.append(found)
                self._unit[id(found)] = limit >= 1
                self._origin[id(found)] = Ref(-2, 0)  # a tensor that nothing else may use
                return found  # type: ignore[no-any-return]
        if name == "__bool__" and args and self._unit.get(id(args[0])) is not None:
            return self._unit[id(args[0])]
        return None

    # -- what is noted

    def _noted(
        self,
        module: str | None,
        function: Callable[..., Any] | None,
        takes: Template,
        found: Any,
        before: list[tuple[Tensor, int]],
    ) -> None:
        number = len(self._record.steps)
        changed = [tensor for tensor, version in before if version_of(tensor) != version]
        for tensor in changed:
            if function is not None and isinstance(self._origin.get(id(tensor)), Held):
                raise self._unfollowed("changes a buffer or a parameter in place")
        leaves = pytree.tree_leaves(found)
        gives: list[tuple[int, Ref]] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if isinstance(self._origin.get(id(leaf)), Held) and function is None:
                    self._alive.append(leaf)
                    continue  # a module that returns one of its parameters
                ref = Ref(number, len(gives))
                gives.append((index, ref))
                self._know(leaf, ref)
                if leaf.grad_fn is not None:
                    self._graphs[id(leaf)] = type(leaf.grad_fn)
        self._record.steps.append(
            Step(module, function, takes, len(leaves), tuple(gives), torch.is_grad_enabled(), self._stack[-1])
        )
        if changed:
            self._record.changes[number] = {memory_of(tensor) for tensor in changed}

    def _template(self, tree: Any) -> Template:
        leaves, spec = pytree.tree_flatten(_sizes_as_tuples(tree))
        return Template([self._stand_in(leaf) for leaf in leaves], spec)

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._of_tensor(leaf)
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise self._unfollowed("makes a number of a tensor's values")
        if isinstance(leaf, slice):
            return Span(*(self._stand_in(part) for part in (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, torch.device) and leaf.type == DEVICE.type:
            return OfDevice()
        if isinstance(leaf, (torch.dtype, float)):
            return self._of_mark.get(leaf, leaf)
        if _is_constant(leaf):
            return leaf
        raise self._unfollowed(f"passes a {type(leaf).__name__} to what it calls")

    def _of_tensor(self, tensor: Tensor) -> Ref | Held:
        known = self._origin.get(id(tensor))
        if known is None:
            if isinstance(tensor, FakeTensor):
                raise self._unfollowed("uses a tensor of a call that is not traced")
            known = Held(f"constant {len(self._record.constants)} of {self._mode}")
            self._record.constants[known.name] = tensor
            self._origin[id(tensor)] = known
            self._alive.append(tensor)
        if known == Ref(-2, 0):
            raise self._unfollowed("decides by a random number")
        if isinstance(known, Ref):
            graph = type(tensor.grad_fn)
            custom = issubclass(graph, torch.autograd.function.BackwardCFunction)
            if custom and self._graphs.get(id(tensor)) is not graph:
                raise self._unfollowed("calls a torch.autograd.Function")
        return known

    def _unfollowed(self, why: str) -> Unfollowed:
        return Unfollowed(self._stack[-1], why, line_of(traceback.extract_stack()))

    # -- attributes

    def _attributes(self) -> dict[str, dict[str, Any]]:
        """Attributes of the opened modules."""
        found: dict[str, dict[str, Any]] = {}
        for path, module in self._model.named_modules():
            if path in self._opened:
                found[path] = attributes_of(module)
        return found

    def _leave(self, module: nn.Module) -> None:
        """Note the attributes with which a module, and those in it, is left."""
        self._left |= {id(one): state_of(one) for one in module.modules()}

    def _refuse_switched(self, path: str, module: nn.Module) -> None:
        """Refuse an atom whose attributes the code around it has changed: no step repeats that change."""
        for one in module.modules():
            now = state_of(one)
            before = self._left.get(id(one), now)
            for name in now.keys() | before.keys():
                if not _same(now.get(name, _ABSENT), before.get(name, _ABSENT)):
                    inside = self._paths.get(id(one), path)
                    raise self._unfollowed(f"changes the attribute {name!r} of {inside!r}, which it calls")

    def _refuse_changed(self, before: dict[str, dict[str, Any]]) -> None:
        for path, now in self._attributes().items():
            for name, value in now.items():
                if not _same(value, before[path].get(name, _ABSENT)):
                    raise Unfollowed(path, f"sets its attribute {name!r}")

    @contextmanager
    def _costing(self, path: str) -> Iterator[None]:
        self._costs.append(path)
        try:
            yield
        finally:
            self._costs.pop()

    def _counting(self) -> AbstractContextManager[object]:
        return OperationCounter(self._note_cost) if self._counts else nullcontext()

    def _note_cost(self, cost: float) -> None:
        """Add a cost to the current computation."""
        costs = self._record.costs
        for path in {"", *self._costs}:
            costs[path] = costs.get(path, 0.0) + cost


_ABSENT = object()
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.layout, torch.memory_format, torch.dtype, torch.device),
)


def _same(value: object, old: object) -> bool:
    return value is old or (isinstance(value, _PLAIN) and value == old)


_UNSEEN = {
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "backward",
    "numpy",
    "data_ptr",
}
"""Methods of tensors whose effect no step contains."""


def _is_constant(leaf: Any) -> bool:
    """Whether it is the same in every run of the model: numbers, texts, types, functions of modules."""
    if isinstance(leaf, (FunctionType, BuiltinFunctionType)):
        return not getattr(leaf, "__closure__", None)
    return isinstance(leaf, (*_PLAIN, type)) or leaf is Ellipsis


def _versions(tree: Any) -> list[tuple[Tensor, int]]:
    return [(tensor, version_of(tensor)) for tensor in tensors_in(tree)]


def _sizes_as_tuples(tree: Any) -> Any:
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(map(_sizes_as_tuples, tree))
    if kind is dict:
        return {name: _sizes_as_tuples(part) for name, part in tree.items()}
    if isinstance(tree, (Tensor, *_PLAIN)):
        return tree
    return pytree.tree_map_only(torch.Size, tuple, tree, is_leaf=lambda x: isinstance(x, torch.Size))
