"""Rules that the passes of a stage keep if they can be captured, watched while units run plainly.

A replay runs operators again and no Python. So a stage is captured only after plain steps in which its layers
read no tensor in Python, communicated with nobody, drew from the keyed streams alone, and left all Python
values that they can read as they were. The first rule that a layer breaks is the stage's reason.

Not seen: effects of code in C++ that calls no operator of torch, and reads of what torch's functions return
of the host (the time, a file).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from counterflow.capture.contexts import Context, process_settings
from counterflow.capture.python_state import ABSENT, PythonState
from counterflow.capture.walk import Walk
from counterflow.common.tensors.devices import type_of
from counterflow.common.tensors.graphs import graph_of, saved_names, variable
from counterflow.common.tensors.torch_private import (
    TorchDispatchMode,
    active_modes,
    has_global_hooks,
    hooks_of_module,
    schema_of,
    whole_call,
    without_functions,
)
from counterflow.common.trees import tensors_in

from .named_layer import NamedLayer, place_of
from .replays import Packed

_COMMUNICATES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem", "_dtensor")
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MOVES = {"resize_", "set_", "resize_as_", "_resize_output_"}
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RANDOM = ("random", "numpy.random")
_MASKS = (torch.bool, torch.uint8)


class OperatorRules(TorchDispatchMode):
    """Context of a plain run whose operators are compared with the rules.

    Args:
        device: device of the layers.

    Attributes:
        reason: first rule that was broken; None: none was.
        draws: True if an operator has drawn random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._type_of = device.type, type_of(device)
        self.reason: str | None = None
        self.draws = False
        self._functions = _FunctionRules(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> OperatorRules:
        """Begin to watch."""
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End the watch."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        if self.reason is None:
            self.reason = _broken(func, args, kwargs)
        with without_functions():  # modes have seen the call, if Python made it
            result = func(*args, **kwargs)
        if self.reason is None:
            for tensor in tensors_in((args, kwargs, result)):
                if self._type_of(tensor) != self._device:
                    self.reason = f"its layers use a tensor on the host ({_name(func)})"
                    break
        return result


def _broken(operator: Any, args: Any, kwargs: Any) -> str | None:
    name, space = _name(operator), operator.namespace
    if space in _COMMUNICATES:
        return f"its layers communicate ({name})"
    if name in _INDEXED:
        if any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1]):
            return f"the shape of a tensor depends on values ({name} with a mask)"
    elif _READS.intersection(operator.tags):
        return f"its layers read tensors in Python, or shapes depend on values ({name})"
    if name in _MOVES:
        return f"its layers change the memory of a tensor ({name})"
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return f"its layers draw from a generator of their own ({name})"
    return None


def _name(operator: Any) -> str:
    return str(schema_of(operator).name.partition("::")[2])


class _FunctionRules(TorchFunctionMode):
    def __init__(self, rules: OperatorRules) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in _HOOKS and args[0].grad_fn is not None and self._rules.reason is None:
            self._rules.reason = "its layers register hooks on activations"
        return func(*args, **whole_call(func, kwargs or {}))


_HOOKS = {Tensor.register_hook, Tensor.retain_grad}


def python_state(layers: Sequence[NamedLayer]) -> PythonState:
    """Return the Python values that the forwards of some layers can read, without weights and buffers."""
    root = nn.ModuleList([layer.module for layer in layers])
    walk = Walk(root)
    for path, module in root.named_modules():
        if module is root:
            continue
        names = [name for name in vars(module) if name not in _TABLES]
        walk.attributes(path, module, names)
        walk.children(path, module)
        forward = getattr(type(module), "forward", None)
        if forward is not None:
            walk.function(f"{path}.forward", forward)
    return walk.done()


_TABLES = {"_parameters", "_buffers", "_modules"}


class ModuleAttributes:
    """Attributes of modules and of their classes, all of them, compared by identity.

    A ``PythonState`` has the values of the attributes that exist; this also sees new ones, which may hide
    those of a class, and functions that replace others.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        modules = {id(m): m for layer in layers for m in layer.module.modules()}.values()
        owners: dict[object, str] = {cls: cls.__name__ for m in modules for cls in type(m).__mro__}
        owners |= {module: f"a {type(module).__name__}" for module in modules}
        self._saved = [(vars(owner), dict(vars(owner)), label) for owner, label in owners.items()]

    def change(self) -> str | None:
        """Return the first attribute that is another object now; None: none is."""
        for attributes, saved, label in self._saved:
            if len(attributes) == len(saved) and all(map(is_, attributes.values(), saved.values())):
                continue
            for name in (*attributes, *saved):
                if attributes.get(name, ABSENT) is not saved.get(name, ABSENT):
                    return f"attribute {name} of {label}"
        return None


def settings() -> tuple[object, ...]:
    """Return torch's settings that choose kernels and types, and the modes and hooks of this thread."""
    return Context.current(), process_settings(), active_modes(), has_global_hooks()


def refuse_state(state: PythonState) -> str | None:
    """Return the rule that Python values break; None: they break none."""
    if state.refused:
        return f"a layer {state.refused[0][1]}"
    drawn = sorted(name for name in state.mentions if name.startswith(_RANDOM))
    return f"its layers mention {drawn[0]}, whose draws would be those of the capture" if drawn else None


def refuse_modules(layers: Iterable[NamedLayer]) -> str | None:
    """Return the rule that modules break by what they are; None: they break none."""
    if has_global_hooks():
        return "hooks of all modules are registered"
    for layer in layers:
        for module in layer.module.modules():
            if hooks_of_module(module):
                return f"{place_of(layer)} has hooks of modules"
            if getattr(module, "sparse", False) is True:
                return f"{place_of(layer)} has sparse gradients"
            for parameter in module.parameters(recurse=False):
                if type(parameter) not in (Tensor, nn.Parameter):
                    return f"weights of {place_of(layer)} are {type(parameter).__name__}s"
    return None


def refuse_graph(outputs: Sequence[Tensor], leaves: Iterable[Tensor]) -> str | None:
    """Return the rule that a graph of autograd breaks; None: it breaks none.

    Args:
        outputs: outputs of the graph.
        leaves: inputs and weights where it may end.
    """
    known = set(map(id, leaves))
    for node in graph_of(outputs):
        leaf = variable(node)
        if leaf is not None and id(leaf) not in known:
            return "its layers use a leaf that is neither an input nor a weight of theirs"
        if node.name().startswith("CheckpointFunction"):
            return "its layers are checkpointed"
        for name in saved_names(type(node)):
            value = getattr(node, name)
            for saved in value if isinstance(value, (tuple, list)) else (value,):
                if not isinstance(saved.data, (Tensor, Packed, type(None))):
                    return "its layers pack saved tensors (a checkpoint, or save_on_cpu)"
    return None
