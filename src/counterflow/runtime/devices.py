"""What the engine asks of a device that runs behind its host: streams, events, and how torch calls it.

A CPU has none of it: it computes at once. A GPU's module is ``torch.cuda``; that of other devices, and of the
one that tests pretend, is what torch knows by their name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def module_of(device: torch.device) -> Any:
    """The streams and events of a device that runs behind its host: ``torch.cuda``, or another's."""
    return torch.get_device_module(device)


def used_on(tensor: Tensor, stream: Any) -> None:
    """Let nobody have a tensor's memory before what a stream was given until then has run.

    ``Tensor.record_stream``, which takes the streams alone that torch's C++ knows.
    """
    holds = getattr(stream, "holds", None)
    if holds is None:
        tensor.record_stream(stream)
    else:
        holds(tensor)


def autocast_type(device: torch.device) -> str:
    """The name by which ``torch.autocast`` knows what computes on a device."""
    return str(getattr(module_of(device), "autocast_type", device.type))
