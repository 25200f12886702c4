"""NCCL's rules for tensors on the CPU: calls that would hang on GPUs are reported, without a GPU or a
clock.
"""

from .fabric import AbortedError, Fabric, NcclRuleError
from .group import StrictGroup, StrictWork
from .streams import Stream, StreamEvent, current_stream
from .thread_ranks import ThreadEndpoint, run_ranks, thread_fabric

__all__ = [
    "AbortedError",
    "Fabric",
    "NcclRuleError",
    "Stream",
    "StreamEvent",
    "StrictGroup",
    "StrictWork",
    "ThreadEndpoint",
    "current_stream",
    "run_ranks",
    "thread_fabric",
]
