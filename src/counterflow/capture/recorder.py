"""One run of a model on tensors with shapes but no values, and the steps recorded in it.

Opened modules are traced; a call of any other one is a step, and so is each call of torch in between that
returns a tensor, or changes one. A copy of the model runs, with classes of modules that report their calls,
so other threads may use the model meanwhile.

Invariant: if a step's tensor comes neither from an earlier step, nor an input, nor the model, there is no
record: the module whose forward made it is ``Unfollowed``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.torch_private import without_functions
from counterflow.common.trees import tensors_in, version_of

from .call_arguments import (
    ABSENT,
    DRAWING,
    UNSEEN,
    is_constant,
    same,
    shared_containers,
    sizes_as_tuples,
    versions,
)
from .contexts import Context, process_settings, restore_process_settings
from .counting import OperationCounter, numbers_in, size_of
from .effects import Effects, LruCache
from .example_call import Example
from .fake_model import DEVICE, FakeModel, observed_objects, observing
from .marks import following
from .placeholders import Member, OfDevice, PlaceholderSlice, Ref, Template
from .python_state import PythonState
from .record import ATTENTION, AttentionCall, Record, RecordedCall
from .tracing_internals import (
    OF_TORCH,
    WEIGHT,
    FakeTensor,
    RecordingMode,
    ShapeEnv,
    attributes_of,
    changes_saved_tensors,
    is_of_transform,
    memory_of,
    state_of,
)
from .untraceable import Unfollowed, called_by_user, failed, line_of


class Recorder(TorchFunctionMode):
    """Runs a copy of a model once, and records its steps.

    Args:
        model: the user's model.
        example: example of the call.
        opened: paths of the modules that are traced.
        sizes: by group of free dimensions, its size in this run; others have the example's.
        training: whether all modules are in training mode; None: each in its own mode.
        grad: whether gradients are recorded around the forward.
        mark: one of ``marks.MARKS``, which distinguishes the weights' dtype from a float32 that the user's
            code asks for.
        costs: costs that a run has counted, which takes time; None: this run counts them.
        autocast: dtype of autocast around the forward; None: it is off.
        reachable: globals and closures that the model's forwards can reach.
        caches: functions with a cache.
        reads: ``Record.reads`` of an earlier run, which are compared around this one.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        opened: Collection[str],
        sizes: Mapping[int, int],
        *,
        training: bool | None,
        grad: bool,
        mark: torch.dtype | None,
        costs: Mapping[str, float] | None,
        autocast: torch.dtype | None,
        reachable: PythonState,
        caches: Collection[LruCache],
        reads: Mapping[tuple[str, str], str],
    ) -> None:
        super().__init__()
        self._opened, self._example, self._sizes = opened, example, sizes
        self._mode = "evaluation" if training is False else "training"
        self._grad, self._autocast = grad, autocast
        self._record = Record(mark=mark, costs=dict(costs or {}))
        self._counts = costs is None
        self._of_mark = following(mark)
        self._origin: dict[int, Ref | Member] = {}
        self._alive: list[Any] = []
        self._inner: dict[int, str] = {}  # by tensor, the module within an atom that returned it
        self._stack: list[str] = [""]
        self._atoms = 0  # nesting depth within an atom
        self._attentions: list[AttentionCall] = []  # of the atom
        self._unit: dict[int, bool | None] = {}
        self._costs: list[str] = []
        self._graphs: dict[int, type] = {}
        # Values of tensors are unknown symbols.
        self._fake = RecordingMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._model = FakeModel(
            model, self._fake, mark=mark, training=training, called=self._called, read=self._note_read
        )
        self._origin |= self._model.origins
        self._paths = self._model.paths
        self._states_after: dict[int, dict[str, Any]] = {}
        self._running = False
        self._settings = process_settings()
        self._observed = observed_objects(self._model.module)
        self._effects = Effects(self._model.module, opened, reachable, caches, self._lasts, reads=reads)

    # -- the run

    def run(self) -> Record:
        """Run the model.

        Raises:
            Unfollowed: the forward of an opened module cannot be traced.
        """
        try:
            return self._ran()
        finally:
            self._effects.undo()
            restore_process_settings(self._settings)
            self._model.close()
            self._alive.clear()
            self._origin.clear()

    def _ran(self) -> Record:
        record, example = self._record, self._example
        with self._fake:
            leaves = self._inputs()
        before = self._attributes()
        model = self._model
        self._leave(model.module)
        args, kwargs = pytree.tree_unflatten(leaves, example.spec)
        try:
            with self._fake, self._counting(), self._entered(), added_losses():
                self._around = Context.current()
                self._running = True
                result = self._through(model.module, model.kind, args, kwargs)
                self._running = False
                self._refuse_observed()
            record.output = self._template(result)
            self._refuse_effects()
            record.live, record.written = self._effects.live, self._effects.written()
        except Unfollowed:
            raise
        except Exception as error:  # a model may raise anything
            raise failed(self._stack[-1], error) from error
        self._refuse_changed(before)
        return record

    @contextmanager
    def _entered(self) -> Iterator[None]:
        enabled = self._autocast is not None
        autocast = torch.autocast(DEVICE.type, self._autocast or torch.bfloat16, enabled)
        self._saved = {label: dict(vars(instance)) for label, instance in self._observed.items()}
        observed = observing(self._observed, self._note_observed)
        with self, torch.set_grad_enabled(self._grad), autocast, observed:
            yield

    def _note_observed(self, label: str, name: str) -> None:
        ignored = name.startswith("__") or name in getattr(self._model.kind, "unobserved", ())
        if self._running and not self._atoms and not ignored:
            self._record.observed.add((label, name))

    def _refuse_observed(self) -> None:
        for label, name in self._record.observed:
            now, before = vars(self._observed[label]).get(name, ABSENT), self._saved[label].get(name, ABSENT)
            if not same(now, before):
                raise Unfollowed("", f"reads and changes {label}.{name}")

    def _refuse_effects(self) -> None:
        # No step repeats effects of the code of opened modules.
        why = self._effects.refusal()
        if why is None and process_settings() != self._settings:
            why = "changes a setting of the process (the default dtype, deterministic algorithms)"
        if why is not None:
            raise Unfollowed(self._stack[-1], why)

    def _lasts(self, tensor: Tensor) -> bool:
        refs = [self._origin.get(id(tensor))]
        while refs:
            ref = refs.pop()
            if not isinstance(ref, Ref) or ref.step < 0:
                return False
            step = self._record.steps[ref.step]
            uses_weights = any(isinstance(leaf, Member) for leaf in step.takes.leaves())
            if uses_weights or step.module is not None or getattr(step.function, "__name__", "") in DRAWING:
                return False
            refs += step.takes.refs
        return True

    def _inputs(self) -> list[Any]:
        leaves: list[Any] = list(self._example.leaves)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            shape = list(leaf.shape)
            for dim, group in self._example.free[index]:
                shape[dim] = self._sizes.get(group, shape[dim])
            fake = torch.empty(shape, dtype=self._model.dtype_of(leaf, self._example.dtype), device=DEVICE)
            leaves[index] = fake.requires_grad_(leaf.requires_grad)
            ref = self._record.inputs[index] = Ref(-1, len(self._record.inputs))
            self._know(fake, ref)
        return leaves

    def _know(self, tensor: Tensor, ref: Ref) -> None:
        self._origin[id(tensor)] = ref
        self._alive.append(tensor)
        self._record.shapes[ref] = tuple(map(size_of, tensor.shape)), tensor.dtype
        if tensor.layout is torch.strided:
            self._record.memory[ref] = memory_of(tensor)
        self._record.bytes[ref] = numbers_in(tensor.shape) * tensor.dtype.itemsize

    def _called(self, module: nn.Module, cls: type, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is None:
            return cls.__call__(module, *args, **kwargs)
        self._record.called.add(path)
        if self._atoms:
            with self._costing(path):
                result = cls.__call__(module, *args, **kwargs)
            for tensor in tensors_in(result):  # which may leave the atom otherwise than by its result
                self._inner.setdefault(id(tensor), path)
                self._alive.append(tensor)
            return result
        if path in self._opened:
            return self._through(module, cls, args, kwargs)
        return self._noted_module(path, module, cls, args, kwargs)

    def _through(self, module: nn.Module, cls: type, args: Any, kwargs: Any) -> Any:
        self._stack.append(path := self._paths[id(module)])
        with self._costing(path), self._effects.resetting(path):
            result = cls.__call__(module, *args, **kwargs)
        self._stack.pop()
        return result

    def _noted_module(self, path: str, module: nn.Module, cls: type, args: Any, kwargs: Any) -> Any:
        self._refuse_switched(path, module)
        self._refuse_effects()
        takes = self._template((args, kwargs))
        before, shared = versions((args, kwargs)), shared_containers((args, kwargs))
        self._atoms += 1
        self._attentions = []
        try:
            with self._costing(path):
                result = cls.__call__(module, *args, **kwargs)
        except Exception as error:  # a module may raise anything
            raise failed(path, error) from error
        finally:
            self._atoms -= 1
        self._leave(module)
        self._effects.accept()
        if shared.changed():
            raise self._unfollowed(f"passes a list or dict twice to {path!r}, which changes it")
        self._noted(path, None, takes, result, before)
        return result

    # -- functions

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A call of torch, which is ignored within an atom."""
        del types
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self._atoms:
            if name == ATTENTION:
                self._attentions.append(AttentionCall.of(*args, **kwargs))
            return func(*args, **kwargs)
        if (known := self._of_draws(func, name, args)) is not None:
            return known
        if name in UNSEEN:
            raise self._unfollowed(f"calls Tensor.{name}")
        before = versions((args, kwargs))
        takes = self._template((tuple(args), kwargs)) if before else None
        result = func(*args, **kwargs)
        has_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))
        changes = result is None and name != "__get__" and bool(before)
        if has_tensor or changes:
            self._noted(None, func, takes or self._template((tuple(args), kwargs)), result, before)
        if func is torch.rand and isinstance(result, Tensor):
            self._unit[id(result)] = None
        return result

    def _of_draws(self, func: Any, name: str, args: Sequence[Any]) -> bool | None:
        """Knowledge about a number that was drawn from [0, 1): it is never negative."""
        if name in ("__lt__", "lt", "less") and len(args) == 2 and id(args[0]) in self._unit:
            limit = args[1]
            if isinstance(limit, (int, float)) and (limit <= 0 or limit >= 1):
                result = func(*args)
                self._alive.append(result)
                self._unit[id(result)] = limit >= 1
                self._origin[id(result)] = Ref(-2, 0)  # a tensor that nothing else may use
                return result  # type: ignore[no-any-return]
        if name == "__bool__" and args and self._unit.get(id(args[0])) is not None:
            return self._unit[id(args[0])]
        return None

    def _noted(
        self,
        module: str | None,
        function: Callable[..., Any] | None,
        takes: Template,
        result: Any,
        before: list[tuple[Tensor, int]],
    ) -> None:
        number = len(self._record.steps)
        changed = [tensor for tensor, version in before if version_of(tensor) != version]
        for tensor in changed:
            if function is not None and self._model.owns(tensor):
                raise self._unfollowed("changes a buffer or a parameter in place")
        if changes_saved_tensors():
            raise self._unfollowed("changes the tensors that autograd saves")
        leaves = pytree.tree_leaves(result)
        gives: list[tuple[int, Ref]] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if isinstance(self._origin.get(id(leaf)), Member) and function is None:
                    self._alive.append(leaf)
                    continue  # a module that returns one of its parameters
                ref = Ref(number, len(gives))
                gives.append((index, ref))
                with without_functions():  # before anything asks whether a step made the tensor
                    self._graphs[id(leaf)] = type(leaf.grad_fn)
                self._know(leaf, ref)
        within, inside = self._around.change_to(Context.current()), self._stack[-1]
        calls = () if module is None else tuple(self._attentions)
        self._record.steps.append(
            RecordedCall(module, function, takes, len(leaves), tuple(gives), within, inside, calls)
        )
        if changed:
            self._record.changes[number] = {memory_of(tensor) for tensor in changed}

    def _template(self, tree: Any) -> Template:
        leaves, spec = pytree.tree_flatten(sizes_as_tuples(tree))
        return Template([self._stand_in(leaf) for leaf in leaves], spec)

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._of_tensor(leaf)
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise self._unfollowed("makes a number of a tensor's values")
        if isinstance(leaf, slice):
            return PlaceholderSlice(*(self._stand_in(part) for part in (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, torch.device) and leaf.type == DEVICE.type:
            return OfDevice()
        if isinstance(leaf, (torch.dtype, float)):
            return self._of_mark.get(leaf, leaf)
        if is_constant(leaf):
            return leaf
        raise self._unfollowed(f"passes a {type(leaf).__name__} to what it calls")

    def _of_tensor(self, tensor: Tensor) -> Ref | Member:
        known = self._origin.get(id(tensor))
        if known is None:
            if is_of_transform(tensor):
                raise self._unfollowed("calls a transform of torch.func")
            if isinstance(tensor, FakeTensor):
                opens = self._inner.get(id(tensor), "").rpartition(".")[0]
                raise self._unfollowed("uses a tensor of a call that is not traced", opens)
            known = Member(f"constant {len(self._record.constants)} of {self._mode}")
            self._record.constants[known.name] = tensor
            self._origin[id(tensor)] = known
            self._alive.append(tensor)
        if known == Ref(-2, 0):
            raise self._unfollowed("decides by a random number")
        if isinstance(known, Ref):
            graph = type(tensor.grad_fn)
            custom = issubclass(graph, torch.autograd.function.BackwardCFunction)
            if custom and self._graphs.get(id(tensor)) is not graph:
                inside = self._record.steps[known.step].inside if known.step >= 0 else self._stack[-1]
                raise self._unfollowed("calls a torch.autograd.Function", inside=inside)
        return known

    def _unfollowed(self, why: str, opens: str = "", inside: str | None = None) -> Unfollowed:
        path = self._stack[-1] if inside is None else inside
        return Unfollowed(path, why, line_of(traceback.extract_stack()), opens=opens)

    # -- attributes

    def _attributes(self) -> dict[str, dict[str, Any]]:
        modules = self._model.module.named_modules()
        return {path: attributes_of(module) for path, module in modules if path in self._opened}

    def _leave(self, module: nn.Module) -> None:
        self._states_after |= {id(submodule): state_of(submodule) for submodule in module.modules()}

    def _refuse_switched(self, path: str, module: nn.Module) -> None:
        # No step repeats a change that the code around an atom made to its attributes.
        for submodule in module.modules():
            now = state_of(submodule)
            before = self._states_after.get(id(submodule), now)
            for name in now.keys() | before.keys():
                if not same(now.get(name, ABSENT), before.get(name, ABSENT)):
                    inside = self._paths.get(id(submodule), path)
                    if name.startswith(WEIGHT):
                        weight = name.removeprefix(WEIGHT)
                        raise self._unfollowed(f"calls {inside!r} with another {weight}", path)
                    raise self._unfollowed(f"changes the attribute {name!r} of {inside!r}, which it calls")

    def _refuse_changed(self, before: dict[str, dict[str, Any]]) -> None:
        for path, now in self._attributes().items():
            for name, value in now.items():
                if not same(value, before[path].get(name, ABSENT)):
                    raise Unfollowed(path, f"sets its attribute {name!r}")

    def _note_read(self, module: nn.Module, name: str) -> None:
        path = self._paths.get(id(module))
        if not self._running or self._atoms or path is None:
            return
        if name not in OF_TORCH:
            self._record.reads.setdefault((path, name), self._stack[-1])
        elif name == "__dict__" and called_by_user(2):  # vars(module)
            names = object.__getattribute__(module, name)
            for attribute in set(names) - OF_TORCH:
                self._record.reads.setdefault((path, attribute), self._stack[-1])

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
        costs = self._record.costs
        for path in {"", *self._costs}:
            costs[path] = costs.get(path, 0.0) + cost
