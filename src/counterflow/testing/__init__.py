"""Instruments for tests, and for users' own tests: transports that are as strict as a GPU's.

Invariant: no other room imports them; importing this package registers them, and imports nothing else.
"""

from counterflow.runtime.transport.kinds import TransportKind, register

__all__ = ["NCCL_ON_GLOO", "STRICT_LOCAL", "STRICT_NCCL"]

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
        "counterflow.testing.strict_nccl.thread_transport:NcclHub",
        threads=True,
        trains=False,
    )
)

NCCL_ON_GLOO = register(
    TransportKind(
        "nccl-on-gloo",
        "processes without GPUs that do over Gloo what NCCL's do, to be killed",
        "counterflow.testing.nccl_on_gloo:NcclOnGlooTransport",
        trains=False,
    )
)
