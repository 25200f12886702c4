"""How tensors travel between workers: threads of one process, Gloo or NCCL."""

from .base import Crossing, Gathering, Group, Lost, Pending, Status, TimedOut, Transport, TransportKind

__all__ = [
    "Crossing",
    "Gathering",
    "Group",
    "Lost",
    "Pending",
    "Status",
    "TimedOut",
    "Transport",
    "TransportKind",
]
