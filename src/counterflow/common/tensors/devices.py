"""A device that runs behind its host: its streams and events, how torch calls it, and copies of its numbers.

A CPU has none of it: it computes at once. A GPU's module is ``torch.cuda``; torch finds that of any other
device, and of the one that tests pretend, by its name. A host that reads a number waits until the device has
computed it. A copy that starts when the number is launched and is read an op later blocks nobody: the device
has other work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def module_of(device: torch.device) -> Any:
    """Module of a device's streams and events: ``torch.cuda``, or that of another kind of device."""
    return torch.get_device_module(device)


def used_on(tensor: Tensor, stream: Any) -> None:
    """Delay the reuse of a tensor's memory until the work that a stream has by now has run.

    ``Tensor.record_stream`` accepts only the streams that torch's C++ knows.
    """
    holds = getattr(stream, "holds", None)
    if holds is None:
        tensor.record_stream(stream)
    else:
        holds(tensor)


def type_of(device: torch.device) -> Callable[[Tensor], str]:
    """Return the function of a tensor to the type of its device, also for an operator's own tensors.

    Args:
        device: device of the computation.
    """
    pretended: Callable[[Tensor], str] | None = getattr(torch.get_device_module(device), "type_of", None)
    return pretended or (lambda tensor: tensor.device.type)


def autocast_type(device: torch.device) -> str:
    """Device type in the terms of ``torch.autocast``."""
    return str(getattr(module_of(device), "autocast_type", device.type))


def holds_host(device: torch.device) -> bool:
    """True if the host continues while a device computes, so that reading a number is a wait."""
    return device.type != "cpu"


class HostCopy:
    """Numbers whose copy to the host is in flight.

    Args:
        numbers: the numbers on their device, which must not change any more.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        self._numbers = numbers.detach()
        if numbers.device.type != "cpu":
            copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers = copy.copy_(self._numbers, non_blocking=True)
            self._event = module_of(numbers.device).Event(
                blocking=True
            )  # blocking: the host sleeps, it does not spin
            self._event.record()

    def read(self) -> Any:
        """Wait for the numbers and return them as ``Tensor.tolist`` does."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
