"""The model's own forward on one worker, whose modules with weights run where their weights are.

The forwards of opened modules (``capture``) run here, as Python. A module that is called as a step of a layer
runs on the layer's owner if it has weights or buffers, and here otherwise. Functions that use weights of
opened modules receive the owner's values. Each call draws from the random stream of its layer.

Invariant: outside of ``ModelForward.run`` the user's modules are as they were.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from counterflow.api.aux_loss import add_loss, added_losses
from counterflow.capture.layer import CapturedLayer
from counterflow.capture.output_hooks import is_output_hook
from counterflow.common.containers import containers_in, replace_entries
from counterflow.common.tensors.torch_private import hooks_of_module, intercepted
from counterflow.common.trees import tensors_in

from ..messages.values import Keyworded
from ..stages.attributes import restored_attributes
from ..stages.precision import Precision
from ..stages.remote import tables
from .owner import ModuleCall, ModuleResult, Owner
from .rounds import Rounds
from .sketches import CallKey


class ModelForward:
    """The forward of a captured model.

    Args:
        model: the user's model.
        captured: all its layers by number, as they were captured on this worker.
        owner: runs what this worker owns.
        rounds: calls to other workers.
        rank_of: rank of the owner of each layer.
        precision: precision of this worker's stages.
        device: device of this worker, on which the forward sees all weights.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Mapping[int, CapturedLayer],
        owner: Owner,
        rounds: Rounds,
        *,
        rank_of: Callable[[int], int],
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._model, self._captured = model, captured
        self.here = torch.empty(0, device=device)
        """Tensor that has the properties of a weight's device."""
        self.remote = {id(tensor) for _, tensor in _named_tensors(model) if tensor.is_meta}
        """Identities of weights and buffers without memory here."""
        self._owner, self._rounds, self._rank_of = owner, rounds, rank_of
        self._precision = precision
        self._call = captured[0].call
        self._atoms = {
            id(layer.module_at(step.module)): step.module
            for layer in captured.values()
            for step in layer.steps
            if step.module is not None
        }
        self._layers: dict[tuple[object, str], deque[int]] = {}
        """Layers of the calls of each module, and of each function within a module, in their order."""
        for index, layer in captured.items():
            for step in layer.steps:
                key = (step.module, "") if step.function is None else (step.function, step.inside)
                self._layers.setdefault(key, deque()).append(index)
        self._last: dict[tuple[object, str], int] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._states: dict[int, list[Tensor]] = {}
        self._inside = [""]
        self._atomic = False
        self._thread = threading.get_ident()

    @property
    def draws(self) -> bool:
        """True if the forward drew random numbers."""
        return any(self._owner.draws(layer, states) for layer, states in self._states.items())

    @property
    def order(self) -> list[CallKey]:
        """Keys of all recorded calls of modules, in their order."""
        numbers: dict[tuple[str, int], int] = {}
        keys = []
        for index, layer in self._captured.items():
            for step in layer.steps:
                if step.module is not None:
                    number = numbers[step.module, index] = numbers.get((step.module, index), -1) + 1
                    keys.append(CallKey(step.module, index, number))
        return keys

    def run(self, value: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Run the forward.

        Args:
            value: input of the model, as of the first layer.
            tensors: values of parameters and buffers that functions use, by their names in the model.

        Returns:
            The output, and the terms that modules add to the loss.
        """
        positional, kwargs = value if type(value) is Keyworded else (value, {})
        args, named = self._call.bound(*self._precision.cast_input((positional, dict(kwargs))))
        around = self._intercepted(), _values_in(self._model, tensors), self._precision.computing()
        with around[0], around[1], around[2], added_losses() as terms, _Functions(self):
            output = self._model(*args, **named)
        return self._precision.cast_output(output), dict(terms)

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(restored_attributes(self._model.modules()))
            for path, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                if id(module) in self._atoms:
                    stack.enter_context(intercepted(module, partial(self._atom, module)))
                else:
                    stack.enter_context(intercepted(module, partial(self._opened, path)))
            yield

    # -- modules

    def _opened(self, path: str, plain: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        if self._elsewhere():
            return plain(*args, **named)
        self._inside.append(path)
        try:
            return plain(*args, **named)
        finally:
            self._inside.pop()

    def _atom(self, module: nn.Module, plain: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        if self._elsewhere():
            return plain(*args, **named)
        path = self._atoms[id(module)]
        layer = self._layer_of((path, ""))
        number = self._numbers[path, layer] = self._numbers.get((path, layer), -1) + 1
        request = ModuleCall(CallKey(path, layer, number), args, named, self._states.get(layer))
        self._atomic = True
        try:
            result = self._run(module, plain, request)
        finally:
            self._atomic = False
        self._states[layer] = list(result.states)
        return result.output

    def _run(self, module: nn.Module, plain: Callable[..., Any], request: ModuleCall) -> ModuleResult:
        layer = request.key.layer
        if not any(True for table in (module.parameters(), module.buffers()) for _ in table):
            return self._added(self._owner.draw(request, plain))
        if self._owner.owns(layer):
            return self._added(self._owner.call(request))
        result: ModuleResult = self._rounds.call(self._rank_of(layer), request)
        tensors = list(tensors_in((request.args, request.kwargs)))
        containers = list(containers_in((request.args, request.kwargs)))
        with torch.no_grad():
            for position, value in result.changes.items():
                tensors[position].copy_(value)
        for number, content in result.containers.items():
            replace_entries(containers[number], content)
        for hook in filter(is_output_hook, hooks_of_module(module)):  # it collects for the forward here
            hook(module, request.args, result.output)
        return self._added(result)

    def _added(self, result: ModuleResult) -> ModuleResult:
        for name, term in result.terms.items():
            add_loss(term, name)
        return result

    def _elsewhere(self) -> bool:
        return self._atomic or threading.get_ident() != self._thread

    # -- draws

    def _layer_of(self, key: tuple[object, str]) -> int:
        layers = self._layers.get(key)
        if layers:
            self._last[key] = layers.popleft()
        return self._last.get(key, 0)

    def function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch within the random stream of its layer."""
        key = func, self._inside[-1]
        if self._atomic or key not in self._layers:
            return func(*args, **kwargs)
        layer = self._layer_of(key)
        with self._owner.stream(layer, self._states.get(layer)) as states:
            result = func(*args, **kwargs)
        self._states[layer] = states
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, forward: ModelForward) -> None:
        super().__init__()
        self._forward = forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if _reads_device(func) and id(args[0]) in self._forward.remote:
            return func(self._forward.here)
        return self._forward.function(func, args, kwargs or {})


def _reads_device(func: Callable[..., Any]) -> bool:
    owner = getattr(func, "__self__", None)
    is_property = func.__name__ == "__get__" and getattr(owner, "__name__", "") in _DEVICE_PROPERTIES
    return is_property or func is Tensor.get_device


_DEVICE_PROPERTIES = {"device", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu"}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _values_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    old = dict(_named_tensors(model))
    values = {id(old[name]): value for name, value in tensors.items() if name in old}
    places = [
        (table, name, tensor)
        for module in model.modules()
        for table in tables(module)
        for name, tensor in table.items()
        if tensor is not None and id(tensor) in values
    ]
    for table, name, tensor in places:
        table[name] = values[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor
