"""Messages without numbers hold memory of their receivers alone."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from counterflow.runtime.footprint.kernel_memory import KernelMemory
from counterflow.runtime.footprint.virtual_mode import SMALL_BYTES, VirtualMode
from counterflow.runtime.footprint.virtual_transport import VirtualHub, VirtualTransport

SMALL = 4 * 100


def transports() -> tuple[VirtualTransport, VirtualTransport]:
    hub = VirtualHub(2)
    return cast("VirtualTransport", hub.transport(0)), cast("VirtualTransport", hub.transport(1))


def mode(transport: VirtualTransport) -> VirtualMode:
    return VirtualMode(transport.ledger, KernelMemory())


def tensor(transport: VirtualTransport, size: int) -> Tensor:
    with mode(transport):
        return torch.full((size // 4,), 3.0)


@pytest.mark.parametrize("size", [SMALL, 2 * SMALL_BYTES])
@pytest.mark.parametrize("posted", [True, False], ids=["posted", "late"])
def test_a_sender_has_its_own_tensors_alone(size: int, posted: bool) -> None:
    sender, receiver = transports()
    sent, buffer = tensor(sender, size), tensor(receiver, size)
    buffer.zero_()

    def send() -> None:
        with mode(sender):
            sender.send([sent], 1, 7).wait()

    if not posted:
        send()
    with mode(receiver):
        transfer = receiver.receive([buffer], 0, 7)
    if posted:
        send()
    transfer.wait()
    assert (sender.ledger.live_bytes, receiver.ledger.live_bytes) == (size, size)
    assert size > SMALL_BYTES or buffer.eq(3).all()


@pytest.mark.parametrize("size", [SMALL, 2 * SMALL_BYTES])
def test_described_tensors_are_their_receivers(size: int) -> None:
    sender, receiver = transports()
    sent = tensor(sender, size).requires_grad_()
    with mode(sender):
        sender.control.send_described([sent], 1, 7).wait()
    with mode(receiver):
        (received,) = receiver.control.receive_described(0, 7).wait()
    assert received.requires_grad
    assert received.is_leaf
    assert (sender.ledger.live_bytes, receiver.ledger.live_bytes) == (size, size)
    assert size > SMALL_BYTES or received.eq(3).all()
