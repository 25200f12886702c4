"""Precision in which torch multiplies float32 matrices, by the names of both of its interfaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Float32Precision(NamedTuple):
    """Precision of the whole process.

    torch's older function raises an error where a user has set the newer attributes.

    Attributes:
        matmul: precision by ``torch.get_float32_matmul_precision``; None: it raises an error.
        by_backend: ``fp32_precision`` of torch's backends and their operators.
    """

    matmul: str | None
    by_backend: tuple[str, ...]

    @classmethod
    def current(cls) -> Float32Precision:
        """Precision of the process now."""
        by_backend = tuple(owner.fp32_precision for owner in _owners())
        try:
            return cls(torch.get_float32_matmul_precision(), by_backend)
        except RuntimeError:
            return cls(None, by_backend)

    def restore(self) -> None:
        """Set the precision of the process."""
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        for owner, precision in zip(_owners(), self.by_backend, strict=True):
            if owner.fp32_precision != precision:
                owner.fp32_precision = precision


def _owners() -> tuple[Any, ...]:
    backends: Any = torch.backends
    mkldnn, cudnn = backends.mkldnn, backends.cudnn
    return backends, backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn
