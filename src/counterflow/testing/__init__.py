"""Instruments for tests, and for users' own tests: transports that are as unforgiving as a GPU's can be.

Invariant: nothing below knows them: importing this registers their rows, and imports nothing else.
"""

from counterflow.runtime.transport.kinds import TransportKind, register

__all__ = ["STRICT_LOCAL", "STRICT_NCCL", "STRICT_PROCESSES"]

STRICT_LOCAL = register(
    TransportKind(
        "strict-local",
        "threads whose sends wait for their receives, in one order",
        "counterflow.testing.strict_local:StrictHub",
        threads=True,
        trains=False,
    )
)

STRICT_NCCL = register(
    TransportKind(
        "strict-nccl",
        "threads with pretended GPUs that keep NCCL's rules and report what would hang",
        "counterflow.testing.strict_nccl.local:NcclHub",
        threads=True,
        trains=False,
    )
)

STRICT_PROCESSES = register(
    TransportKind(
        "strict-nccl-processes",
        "processes on the CPU that keep NCCL's rules, to be killed",
        "counterflow.testing.strict_nccl.process:StrictProcessTransport",
        trains=False,
    )
)
