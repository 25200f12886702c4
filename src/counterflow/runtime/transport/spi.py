"""Interface for transports that stand outside of the engine: what they extend, raise and return.

`counterflow.testing` makes its strict transports of it. A list of names and nothing else; a module
that only uses a transport imports ``base`` and ``kinds``.
"""

from __future__ import annotations

from .local import Hub, ThreadControl, Waited
from .nccl import NcclTransport
from .ordered import OrderedTransport
from .pending import Transfer
from .progress import Event
from .rng_lock import rng_released, stream_synchronized_by

__all__ = [
    "Event",
    "Hub",
    "NcclTransport",
    "OrderedTransport",
    "ThreadControl",
    "Transfer",
    "Waited",
    "rng_released",
    "stream_synchronized_by",
]
