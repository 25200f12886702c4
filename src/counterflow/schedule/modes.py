"""Choices that are no part of a scheme: recomputation and gradient synchronisation."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from counterflow.errors import ConfigError


class Recompute(StrEnum):
    """Values that a forward saves for its backward: everything, the stage's input, or each layer's input.

    With ``stage`` an op of its own computes the whole stage again before each backward
    (``recompute_ops.py``). With ``layer`` the backward computes one layer again after the other, so that only
    one of them is in memory.
    """

    NONE = "none"
    STAGE = "stage"
    LAYER = "layer"

    @property
    def recomputes(self) -> bool:
        """True if layers are computed again, so that forwards do not save their tensors."""
        return self is not Recompute.NONE


class Sync(StrEnum):
    """Time at which a stage's gradients are summed over its replicas (Chimera section 3.2, Figure 4).

    ``end``: after all local compute. ``eager``: as soon as the stage's last local backward is done.
    ``eager-opt``: eagerly only if the worker idles between that moment and the end of its compute, for
    another reason than a message in flight.
    An asynchronous schedule has no end, so there every mode is eager.
    """

    END = "end"
    EAGER = "eager"
    EAGER_OPT = "eager-opt"


Mode = TypeVar("Mode", bound=StrEnum)


def parse_mode(kind: type[Mode], name: str, value: Mode | str) -> Mode:
    """``value`` as a member of ``kind``.

    Raises:
        ConfigError: the value is not a member; the message lists the legal ones.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r}: unknown; legal: {', '.join(kind)}") from None
