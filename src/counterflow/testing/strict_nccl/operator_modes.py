"""Operators and calls of torch on a pretended device: places of their tensors, and waits.

Operators are intercepted below autograd, in forwards and backwards alike; calls are intercepted as Python
makes them, before their arguments are processed. Without a pretended device a thread still waits, before it
computes, for what its stream waits for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from counterflow.common.tensors.torch_private import (
    TorchDispatchMode,
    device_constructors,
    whole_call,
    without_functions,
)

from . import captured_graphs, streams
from .captured_graphs import operator_name
from .device import NAME, Device, current, on
from .device_memory import HOST, PINNED, FromHost, Place, ToHost, mark, place_of, same_memory, tensors_in
from .streams import Stream


@contextmanager
def computing(stream: Stream, device: Device | None = None) -> Iterator[None]:
    """Surrounds a worker's thread: it computes only after everything its stream waits for has run."""
    with on(device), streams.on(stream), _Calls(), _Operators():  # type: ignore[no-untyped-call]
        yield


# -- operators

_AS_IT_IS = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty"),
    *("new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "view_as_real"),
}
"""Operators that touch no memory: on a GPU they launch nothing."""

_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operators of a device for whose result the host waits."""

_ACROSS = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators that accept tensors of the host and of a device together."""


class _Operators(TorchDispatchMode):
    """Makes operators that touch memory wait for their stream, and checks that tensors are in one place."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper around every operator would import torch.compile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        stream, device = streams.current_stream(), current()
        name = operator_name(func)
        if stream is not None and name not in _AS_IT_IS:
            stream.run(f"computes {func}")
        with without_functions():  # these have seen the call, if Python made it
            if device is None:
                return func(*args, **kwargs)
            return _computed(device, name, func, args, kwargs)


def _computed(device: Device, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    inputs = list(tensors_in((args, kwargs)))
    places = [place_of(tensor) for tensor in inputs]
    target = _device_of_operator(device, name, inputs, places)
    if target is None:
        result = func(*args, **kwargs)
        if any(place is not None for place in places):
            for tensor in tensors_in((result,)):
                mark(tensor, HOST)
        return result
    if name not in _AS_IT_IS:
        device.launched()
    if name in _READS:
        device.synchronize(f"reads {name}")
    if name == "copy_":
        return _copy(device, func, args, kwargs, places)
    result = func(*args, **kwargs)
    for tensor in tensors_in((result,)):
        mark(tensor, target)
    return result


def _device_of_operator(
    device: Device, name: str, inputs: list[Tensor], places: list[Place]
) -> Device | None:
    devices = [place for place in places if isinstance(place, Device)]
    if not devices:
        return None
    second = next((place for place in devices if place != device), None)
    if second is not None and name not in _AS_IT_IS:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {device} and {second}!")
    if name not in _ACROSS:
        for tensor, place in zip(inputs, places, strict=True):
            if place in (HOST, PINNED) and (tensor.dim() or name.startswith("_fused")):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{device} and cpu! ({name} of a tensor of shape {tuple(tensor.shape)})"
                )
    return device


def _copy(device: Device, func: Any, args: Any, kwargs: Any, places: list[Place]) -> Any:
    target, source = args[:2]
    at_once = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    to, of = places[0], places[1]
    if isinstance(of, Device) and not isinstance(to, Device) and (at_once or to != PINNED):
        device.synchronize("copies to the host")
    if isinstance(of, Device) != isinstance(to, Device):
        captured_graphs.refuse_in_capture("copies between host and device")
    result = func(*args, **kwargs)
    if at_once or (isinstance(of, Device) and isinstance(to, Device)):
        return result
    stream = streams.current_stream() or device.stream
    if to == PINNED:
        stream.copy(ToHost(target, source if stream is not device.stream else None))
    elif of == PINNED:
        stream.copy(FromHost(source))
    return result


# -- calls

_ANY: Any = Tensor
"""Its attributes are read and written by calls, which annotations do not describe."""

_Handler = Callable[[Device, Any, Any, Any], Any]
_HANDLERS: dict[Any, _Handler] = {}


def _handles(*functions: Any) -> Callable[[_Handler], _Handler]:
    def note(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return note


class _Calls(TorchFunctionMode):
    """Calls without an operator of their own: a tensor's place, moves, and reads of its memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        stream, device = streams.current_stream(), current()
        if stream is not None and func in _HOST_READS:
            stream.run(f"reads {getattr(func, '__name__', func)}")
        if device is None:
            return func(*args, **whole_call(func, kwargs))
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(device, func, args, kwargs)
        kwargs = whole_call(func, kwargs)
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            if _by_autograd(sys._getframe(1)):  # noqa: SLF001 - documented
                return func(*args, **kwargs)
            return _call_factory(device, func, args, dict(kwargs))
        result = func(*args, **kwargs)
        if func in device_constructors():
            for tensor in tensors_in((result,)):
                mark(tensor, HOST)
        return result


def _by_autograd(frame: FrameType) -> bool:
    # torch.autograd makes a loss's gradient on the CPU, where C++ has the loss.
    return frame.f_globals.get("__name__") == "torch.autograd"


_HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__}


def _call_factory(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    pinned = bool(kwargs.pop("pin_memory", False))
    wanted = kwargs.get("device")
    place = _place(device, wanted)
    if place is None:  # of neither
        return func(*args, **kwargs)
    if place is HOST and pinned:
        place = PINNED
    if wanted is not None:
        kwargs["device"] = "cpu"
    inputs = list(tensors_in((args, kwargs)))
    if place == device:
        device.look()
    elif any(place_of(tensor) == device for tensor in inputs):
        device.synchronize("copies to the host")
    result = func(*args, **kwargs)
    for tensor in tensors_in((result,)):
        if same_memory(tensor, inputs):
            if place_of(tensor) not in (None, place):
                return _moved(device, tensor, place)
        else:
            mark(tensor, place, overwrite=True)
    return result


def _place(device: Device, wanted: Any) -> Place:
    if wanted is None:
        return HOST
    name = device.handle if isinstance(wanted, int) else torch.device(wanted)
    if name.type == NAME:
        if name.index not in (None, device.handle.index):
            raise RuntimeError(f"worker of {device} makes a tensor on {name}")
        return device
    return HOST if name.type == "cpu" else None


@_handles(Tensor.to)
def _to(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, rest, kwargs = args[0], list(args[1:]), dict(kwargs)
    like = kwargs.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        like = rest.pop(0)
    wanted = kwargs.pop("device", None)
    if like is not None:
        wanted = place_of(like) if isinstance(place_of(like), Device) else like.device
        wanted = wanted.handle if isinstance(wanted, Device) else wanted
        kwargs.setdefault("dtype", like.dtype)
    elif rest and isinstance(rest[0], (torch.device, str, int, type(None))):
        wanted = rest.pop(0)
    if rest and isinstance(rest[0], (torch.dtype, type(None))):
        kwargs["dtype"] = rest.pop(0)
    for name, value in zip(("non_blocking", "copy"), rest, strict=False):
        kwargs[name] = value
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    place = None if wanted is None else _place(device, wanted)
    now = place_of(tensor)
    if wanted is not None and place is None:
        return func(tensor, device=wanted, **kwargs)
    if place is None or place == now or (place is HOST and now in (None, PINNED)):
        return func(tensor, **kwargs) if kwargs else tensor
    return _moved(device, tensor, place, **kwargs)


@_handles(Tensor.cpu)
def _cpu(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not isinstance(place_of(tensor), Device):
        return func(*args, **kwargs)
    return _moved(device, tensor, HOST, **kwargs)


def _moved(device: Device, tensor: Tensor, place: Place, *, non_blocking: bool = False, **how: Any) -> Tensor:
    now = place_of(tensor)
    device.look()
    captured_graphs.refuse_in_capture("copies between host and device")
    if isinstance(now, Device) and not non_blocking:
        device.synchronize("copies to the host")
    how.pop("copy", None)
    with on(None):
        result = Tensor.to(tensor, "cpu", copy=True, **how)
    mark(result, PINNED if place is HOST and non_blocking else place, overwrite=True)
    if non_blocking:
        stream = streams.current_stream() or device.stream
        if place is HOST:
            stream.copy(ToHost(result))
        elif now is PINNED:
            stream.copy(FromHost(tensor))
    return result


@_handles(_ANY.device.__get__)
def _device(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    del device
    place = place_of(args[0])
    return place.handle if isinstance(place, Device) else func(*args, **kwargs)


@_handles(_ANY.is_cpu.__get__)
def _is_cpu(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    del device
    return not isinstance(place_of(args[0]), Device) and func(*args, **kwargs)


@_handles(_ANY.grad.__set__)
def _set_grad(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, grad = args
    if isinstance(grad, Tensor):
        places = {place for place in (place_of(tensor), place_of(grad)) if place is not None}
        if len(places) > 1 and device in places:
            raise RuntimeError("assigned grad has data located on a different device")
    return func(*args, **kwargs)


@_handles(Tensor.is_pinned)
def _is_pinned(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    del device, func, kwargs
    return bool(place_of(args[0]) == PINNED)


@_handles(Tensor.pin_memory)
def _pin_memory(device: Device, func: Any, args: Any, kwargs: Any) -> Tensor:
    del func, kwargs
    tensor: Tensor = args[0]
    place = place_of(tensor)
    if place is PINNED:
        return tensor
    if place == device:
        raise RuntimeError(f"cannot pin '{tensor.type()}' of {device}: only dense CPU tensors can be pinned")
    pinned = tensor.detach().clone()
    mark(pinned, PINNED, overwrite=True)
    return pinned


@_handles(Tensor.numpy, Tensor.__array__)
def _numpy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    if place_of(args[0]) == device:
        raise TypeError(
            f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )
    return func(*args, **kwargs)


@_handles(Tensor.tolist, Tensor.__repr__)
def _read(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    if place_of(args[0]) == device:
        device.synchronize("reads a tensor")
    with on(None):
        return func(*args, **kwargs)


@_handles(Tensor.__deepcopy__)
def _deep_copied(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    del device
    copy = func(*args, **kwargs)
    place = place_of(args[0])
    if place is not None:
        mark(copy, place, overwrite=True)
    return copy
