"""Contexts of torch in which a recorded call ran, and their replay around the call.

A forward may enter ``torch.no_grad``, ``torch.enable_grad``, ``torch.inference_mode``, ``torch.autocast`` and
``sdpa_kernel`` between its calls. A step remembers in what its context differs from the one around the whole
forward, and enters that again. Settings of the process that a forward may change in the middle (the default
dtype, deterministic algorithms, the precision of products) are refused, as other threads would see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterflow.common.tensors.float32_precision import Float32Precision

_DEVICE_TYPES = ("cpu", "cuda")


class AutocastState(NamedTuple):
    """State of autocast for one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


class Context(NamedTuple):
    """Contexts at one moment.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether inference mode is on.
        autocast: autocast of each device type.
        attention: the enabled backends of scaled dot-product attention.
    """

    grad: bool
    inference: bool
    autocast: tuple[AutocastState, ...]
    attention: tuple[SDPBackend, ...]

    @classmethod
    def current(cls) -> Context:
        """Contexts of this thread now."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast_states(),
            tuple(backend for backend, enabled in _BACKENDS.items() if enabled()),  # type: ignore[no-untyped-call]
        )

    def change_to(self, inner: Context) -> Change | None:
        """Difference of the contexts around a call from these; None: there is none."""
        if inner == self:
            return None
        return Change(
            None if inner.grad == self.grad else inner.grad,
            None if inner.inference == self.inference else inner.inference,
            None if inner.autocast == self.autocast else inner.autocast,
            None if inner.attention == self.attention else inner.attention,
        )


class Change(NamedTuple):
    """Contexts around a call that differ from those around the forward; None: no difference."""

    grad: bool | None
    inference: bool | None
    autocast: tuple[AutocastState, ...] | None
    attention: tuple[SDPBackend, ...] | None

    @contextmanager
    def replayed(self, device: torch.device) -> Iterator[None]:
        """Enter these contexts; the forward's own device type is the one of ``device``."""
        with ExitStack() as stack:
            if self.inference is not None:
                stack.enter_context(torch.inference_mode(self.inference))
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, enabled, dtype in self.autocast or ():
                place = device.type if device_type == "cpu" else device_type
                stack.enter_context(torch.autocast(place, dtype, enabled))
            if self.attention is not None:
                stack.enter_context(sdpa_kernel([*self.attention]))
            yield


_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def autocast_states() -> tuple[AutocastState, ...]:
    """State of autocast for each device type."""
    return tuple(
        AutocastState(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _DEVICE_TYPES
    )


def autocast_of(device_type: str) -> torch.dtype | None:
    """Dtype of autocast on a device type; None: it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class TorchSettings(NamedTuple):
    """Settings of the whole process on which results of torch depend."""

    dtype: torch.dtype
    deterministic: bool
    warns_only: bool
    precision: Float32Precision


def process_settings() -> TorchSettings:
    """Settings of the process now."""
    return TorchSettings(
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        Float32Precision.current(),
    )


def restore_process_settings(settings: TorchSettings) -> None:
    """Set the process's settings, if a forward has changed them."""
    if process_settings() != settings:
        torch.set_default_dtype(settings.dtype)
        torch.use_deterministic_algorithms(settings.deterministic, warn_only=settings.warns_only)
        settings.precision.restore()
