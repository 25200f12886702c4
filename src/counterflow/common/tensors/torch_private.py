"""Private names of torch that Counterflow uses, in one place, with a replacement for each ("Without: …").

Invariant: nothing else in Counterflow names them (``tests/common/test_torch_private.py``), except those that
torch documents or passes to users: a tensor's ``_version``, and ``torch.utils._pytree``; and the dicts of a
``nn.Module`` in ``models/``, which knows no room. If torch moves one, its comment says what to do.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._profiler import ProfilerConfig as _ProfilerConfig
from torch._C._profiler import ProfilerState as _ProfilerState
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.variable import Variable
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

_Tensor = TypeVar("_Tensor", bound=Tensor)

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass"]

# TorchDispatchMode sees every operator. Without: no halves of micro-batches that draw, and no strict_nccl.
# is_traceable_wrapper_subclass: ``hasattr(tensor, "__tensor_flatten__")`` says the same.

# -- autograd

run_backward: Any = Variable._execution_engine.run_backward  # noqa: SLF001
"""What torch.autograd.backward and .grad call; these replace it, and take 15 µs more."""


preserve_version_counter = _unsafe_preserve_version_counter
"""torch's guard of version counters, used as in FSDP2. Without: asynchronous schemes refuse layers
that save a weight for their backward."""


def set_version_counters(tensors: tuple[Tensor, ...], number: int) -> None:
    """Give tensors a version (``_version``), as FSDP2's guard does.

    Without: what a layer keeps of a weight by its version is wrong in asynchronous schemes.
    """
    torch._C._autograd._unsafe_set_version_counter(tensors, (number,) * len(tensors))  # noqa: SLF001


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable all modes of torch within the context. Without: leave and enter the known modes."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # noqa: SLF001
        yield


def without_functions() -> AbstractContextManager[object]:
    """Disable all TorchFunctionModes within the context. Without: leave and enter the known modes."""
    return cast("AbstractContextManager[object]", torch._C.DisableTorchFunction())  # noqa: SLF001


def active_modes() -> list[str]:
    """Names of the modes that are on in this thread. Without: none is known, so none is refused."""
    functions = torch.overrides._get_current_function_mode_stack()  # noqa: SLF001
    dispatches = _get_current_dispatch_mode_stack()
    return [type(mode).__name__ for mode in (*functions, *dispatches)]


def device_constructors() -> set[Any]:
    """The functions that create tensors on a given device. Without: a list of their public names."""
    return cast("set[Any]", _device_constructors())


def call_of(module: nn.Module) -> Callable[..., Any]:
    """Function that ``nn.Module.compile`` compiles. Without: that method, which changes the module."""
    return module._call_impl  # noqa: SLF001


@contextmanager
def intercepted(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Let ``call`` run the calls of a module; it receives the plain call, then the arguments.

    Without: another class for every module, as for one whose class has a ``__call__`` of its own.
    """
    kind: Any = type(module)
    if kind.__call__ is not nn.Module.__call__:  # it would run before, around what torch's calls
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        body = {"__call__": lambda *args, **named: call(partial(kind.__call__, args[0]), *args[1:], **named)}
        object.__setattr__(module, "__class__", type(kind.__name__, (kind,), body | names))
        try:
            yield
        finally:
            object.__setattr__(module, "__class__", kind)
        return
    attributes, name = vars(module), "_compiled_call_impl"
    before = attributes.get(name)
    attributes[name] = partial(call, before or call_of(module))
    try:
        yield
    finally:
        if before is None:
            attributes.pop(name, None)
        else:
            attributes[name] = before


def rename_spare_backend(name: str) -> None:
    """The name of the kind of device that torch leaves to others. Without: it is ``privateuseone``."""
    torch.utils.rename_privateuse1_backend(name)  # type: ignore[attr-defined] # documented, not exported


def register_device_module(name: str, module: object) -> None:
    """Let ``torch.get_device_module(name)`` find it. Without: ``setattr(torch, name, module)``."""
    torch._register_device_module(name, module)  # noqa: SLF001


def keeps_buffers() -> AbstractContextManager[object]:
    """Let compiled backwards run twice: they do not overwrite the tensors that were saved for them.

    Without: split backwards of layers that call compiled functions fail; torch's error names this switch.
    """
    from torch._functorch import config  # noqa: PLC0415 - it takes a while

    return cast("AbstractContextManager[object]", config.patch(donated_buffer=False))


def whole_call(function: object, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call in a torch function mode, with those that torch hides from the mode.

    ``l1_loss`` does not report its weights to modes. Without: the weights would be lost in silence.
    """
    code = functional.l1_loss.__code__
    if function is not functional.l1_loss or "weight" in kwargs or "weight" not in code.co_varnames:
        return kwargs
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return kwargs if frame is None else {**kwargs, "weight": frame.f_locals["weight"]}


def drops_nothing(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an operator that may draw for a dropout has none. Without: it counts as one that draws."""
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    probability = kwargs.get("dropout_p", args[place] if place < len(args) else 0.0)
    return bool(probability == 0)


# -- memory


def start_allocations() -> None:
    """Start to record this thread's allocations and frees of host memory for tensors.

    ``torch.profiler`` with ``profile_memory`` records all threads together. Without:
    no measured peak of bytes on the CPU.
    """
    torch._C._autograd._enable_profiler_legacy(  # noqa: SLF001
        _ProfilerConfig(_ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )


def allocations() -> Iterator[int]:
    """Allocations of this thread since ``start_allocations``, in order: bytes, below 0 if freed."""
    return (event.cpu_memory_usage() for event in allocation_events())


def allocation_events() -> list[Any]:
    """Events of allocations: ``cpu_memory_usage()`` is in bytes, below 0 if freed."""
    recorded: Any = torch._C._autograd._disable_profiler_legacy()  # noqa: SLF001
    events = (event for of_thread in recorded for event in of_thread if event.kind() == "memory_alloc")
    return [event for event in events if event.cpu_memory_usage()]


def profiling() -> bool:
    """True if a profiler of torch records this thread. Without: each action always has its range."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001


def unnoted() -> AbstractContextManager[None]:
    """Hide from the profiler an operation that ends later, on another thread: a profiler that has ended by
    then would break the process. Without: nothing may be in flight when a profiler ends.
    """
    return _Unnoted() if profiling() else _NOTED


class _Unnoted:
    def __enter__(self) -> None:
        torch._C._autograd._enable_record_function(False)  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._enable_record_function(True)  # noqa: SLF001


_NOTED = nullcontext()

_ERRORS = 2
_quiet = threading.Lock()
_quieted = [0, 0]
"""Threads that want errors alone, and the level before them."""


@contextmanager
def errors_alone() -> Iterator[None]:
    """While any thread is in it, torch's C++ logs errors, no warnings.

    While allocations are noted it warns of each that was made before. Without: it does, which does no harm.
    """
    level = ctypes.c_int()
    with suppress(OSError, ValueError):  # another build of torch
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    with _quiet:
        if not _quieted[0]:
            _quieted[1], level.value = level.value, max(level.value, _ERRORS)
        _quieted[0] += 1
    try:
        yield
    finally:
        with _quiet:
            _quieted[0] -= 1
            if not _quieted[0]:
                level.value = _quieted[1]


# -- tensors and modules


def storage_uses(tensor: Tensor) -> int:
    """Tensors that have a tensor's memory, and one for asking. Without: no receive buffer is used again."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001


def local_tensor(tensor: Any) -> Tensor:
    """The tensor in a DTensor. ``to_local`` gives another object, whose memory cannot be exchanged."""
    return cast("Tensor", tensor._local_tensor)  # noqa: SLF001


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of this rank's part of a DTensor, as torch's checkpoints compute them."""
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 - it takes a while
        compute_local_shape_and_global_offset,
    )

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def hook_tables(parameter: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Tables of a parameter's hooks: of its gradient, and after its accumulation.

    Without: hooks are called for each micro-batch.
    """
    before = parameter._backward_hooks  # noqa: SLF001
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if before is None else before, {} if after is None else after


def has_hooks(tensor: Tensor) -> bool:
    """True if a leaf has hooks of its gradient, or of the accumulation. Without: none are looked for."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks or after)  # noqa: SLF001


def hooks_of(parameter: Tensor) -> tuple[list[Any], list[Any]]:
    """A parameter's hooks: of its gradient, and those after this was accumulated."""
    before, after = (list(hooks.values()) for hooks in hook_tables(parameter))
    return before, after


def flattened(mesh: Any, names: tuple[str, ...]) -> Any:
    """One dimension of a device mesh, of the positions along several. Without: a mesh made by the user."""
    part = mesh[names]
    return part if len(names) == 1 else part._flatten("_".join(names))  # noqa: SLF001


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, where it looks them up. Without: ``torch.func.functional_call``."""
    return module._parameters  # noqa: SLF001


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, where it looks them up. Without: ``get_buffer`` and ``setattr``, slowly."""
    return module._buffers  # noqa: SLF001


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by all their names; ``named_children`` omits a second name."""
    return module._modules  # noqa: SLF001


def same_memory(tensor: Tensor) -> Tensor:
    """A tensor with the same memory and its own version counter. Without: a copy."""
    return cast("Tensor", torch.ops.aten._unsafe_view(tensor, tensor.shape))  # noqa: SLF001


def subclassed(kind: type[_Tensor], tensor: Tensor, *, parameter: bool) -> _Tensor:
    """A tensor as a leaf of a subclass, made as torch's notes on extending make it; also a parameter."""
    leaf = Tensor._make_subclass(kind, tensor, tensor.requires_grad)  # noqa: SLF001
    if parameter:
        leaf._is_param = True  # noqa: SLF001 - isinstance() knows parameters of other classes by it
    return leaf


def plain_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch's without ``__torch_function__`` of its arguments."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's notes on extending do
        return function(*args, **kwargs)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> set[int]:
    """Handles of hooks before an optimizer's step. Without: one that clips each stage alone is not seen."""
    return set(optimizer._optimizer_step_pre_hooks)  # noqa: SLF001


_HOOK_TABLES = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


def module_hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Tables of a module's hooks, in one order. Without: hooks that are added later are silently lost."""
    return [vars(module)[name] for name in _HOOK_TABLES]


def schema_of(operator: Any) -> Any:
    """An operator's name and arguments, as a TorchDispatchMode is given it. Without: ``str(operator)``."""
    return operator._schema  # noqa: SLF001


def is_loss(function: object) -> TypeGuard[Any]:
    """True if it is one of torch's losses. Without: the public classes of losses, by name."""
    return isinstance(function, nn.modules.loss._Loss)  # noqa: SLF001


def keeps_statistics(module: nn.Module) -> bool:
    """True if it is a norm with running statistics. Without: the public classes of norms, by name."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats  # noqa: SLF001


def hooks_of_module(module: nn.Module) -> list[Any]:
    """Hooks that run around a module's own forward and backward. Without: they would be lost in silence."""
    kinds = (
        *(module._forward_pre_hooks, module._forward_hooks),  # noqa: SLF001
        *(module._backward_pre_hooks, module._backward_hooks),  # noqa: SLF001
    )
    return [hook for hooks in kinds for hook in hooks.values()]


def has_global_hooks() -> bool:
    """True if hooks of all modules are registered. Without: none is known, so none is refused."""
    return bool(nn.modules.module._has_any_global_hook())  # noqa: SLF001


def subspecs(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Structures of a tree's children."""
    children: Any = getattr(spec, "children", None)
    return list(children() if children is not None else spec.children_specs)


def spread(tree: Any, spec: pytree.TreeSpec) -> list[Any] | None:
    """A tree's leaves for all leaves of another one, as torch.vmap spreads ``in_dims``; None: no fit."""
    return pytree._broadcast_to_and_flatten(tree, spec)  # noqa: SLF001


# -- torch.distributed


def default_store() -> Store:
    """The store by which the default process group met, as torch's checkpoints and elastic agent reach it."""
    return _get_default_store()


def gloo_lane(group: ProcessGroup) -> Any:
    """Backend that sends for a group over Gloo. The group's ``send`` takes a third longer."""
    return group._get_backend(torch.device("cpu"))  # noqa: SLF001


def abort(group: ProcessGroup) -> None:
    """Abort a group's communicators, from any thread.

    ``ProcessGroup.abort`` is public from 2.7 on; before, the backend has it.
    """
    call: Any = getattr(group, "abort", None)
    if call is None:
        call = group._get_backend(torch.device("cuda")).abort  # noqa: SLF001
    call()


def nccl_options(timeout: timedelta, *, high_priority: bool, config: Mapping[str, int]) -> Any:
    """Options of an NCCL group; None where torch has no NCCL.

    Without the private name torch warns of a timeout that differs from the group's.
    """
    kind: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
    if kind is None:
        return None
    options = kind.Options(is_high_priority_stream=high_priority)
    options._timeout = timeout  # noqa: SLF001
    for name, value in config.items():
        setattr(options.config, name, value)
    return options


def flight_record() -> bytes | None:
    """Record of NCCL's flight recorder, for ``torchfrtrace``; None if it is off.

    Without: ``TORCH_NCCL_DUMP_ON_TIMEOUT``, which waits for torch's own limit.
    """
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # noqa: SLF001
    return None if dump is None else bytes(dump())
