"""Numbers that a device computes, on their way to its host.

To read a number is to wait until the device has come to it. Asked for when it is launched and read an op
later, it holds up nobody: the device has something to run meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .devices import module_of


def holds_host(device: torch.device) -> bool:
    """Whether the host goes on while a device computes, so that to read a number is to wait."""
    return device.type != "cpu"


class HostCopy:
    """Numbers on their way.

    Args:
        numbers: where they are computed; nobody changes them any more.
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
        """The numbers as ``Tensor.tolist`` gives them, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
