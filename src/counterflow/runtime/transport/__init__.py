"""How tensors travel between workers: threads of one process, Gloo or NCCL."""

from .base import Gathering, Group, Lost, Pending, Status, TimedOut, Transport, TransportKind

__all__ = [
    "Gathering",
    "Group",
    "Lost",
    "Pending",
    "Status",
    "TimedOut",
    "Transport",
    "TransportKind",
]
