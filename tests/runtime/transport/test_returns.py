"""Workers that wait for one whose function has returned, and how long threads wait for anything."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.runtime.transport.returns import Posted, Returns
from counterflow.runtime.transport.rng_lock import rng_released
from counterflow.runtime.workers.world import current_transport

X = torch.ones(8, 4)
ENDED = Posted("its end", None, since=0.0, at=0.0, returned=True)


def waiting(at: float, waiting_for: int | None = -1, doing: str = "Clip", since: float = 1.0) -> Posted:
    return Posted(doing, waiting_for, since, at)


def test_a_wait_for_one_that_has_returned_is_vain_after_a_while() -> None:
    returns = Returns(0)
    assert returns.awaited({0: waiting(2.0, 1), 1: ENDED}) is None
    assert returns.awaited({0: waiting(5.0, 1), 1: ENDED}) is None
    assert returns.awaited({0: waiting(6.0, 1), 1: ENDED}) == 1


def test_a_worker_that_goes_on_does_not_wait_in_vain() -> None:
    returns = Returns(0)
    for number in range(9):
        post = waiting(2.0 * number, 1, since=2.0 * number)
        assert returns.awaited({0: post, 1: ENDED}) is None


def test_others_that_compute_may_still_send() -> None:
    returns = Returns(0)
    for at in (2.0, 8.0, 14.0):
        assert returns.awaited({0: waiting(at, 2), 1: ENDED, 2: waiting(at, None)}) is None
        assert returns.awaited({0: waiting(at, -1), 1: ENDED, 2: waiting(at, None)}) is None
    assert returns.awaited({0: waiting(20.0, -1), 1: ENDED, 2: waiting(15.0, 0, "Send")}) is None
    assert returns.awaited({0: waiting(20.0, -1), 1: ENDED, 2: waiting(18.0, 0, "Send")}) is None
    assert returns.awaited({0: waiting(20.0, -1), 1: ENDED, 2: waiting(19.0, 0, "Send")}) == 1
    assert returns.awaited({0: waiting(20.0, 2), 1: ENDED, 2: waiting(19.0, 0, "Send")}) is None


def made(scheme: str, **options: float) -> cf.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return cf.Pipeline(layers, nn.MSELoss(), scheme, optimizer=optimizer, **options)  # type: ignore[arg-type]


def _leaves(scheme: str, rank: int) -> None:
    pipeline = made(scheme)
    pipeline.step(X, X)
    if pipeline.transport.rank != rank:
        pipeline.step(X, X)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "scheme",
    [
        "dapple(stages=2, micro_batches=2)",
        "chimera(stages=2, micro_batches=2)",
        "pipedream-2bw(stages=2, micro_batches=2)",
    ],
)
def test_who_returns_early_is_named_at_once(scheme: str, rank: int) -> None:
    with pytest.raises(
        cf.WorkerError, match=rf"worker {rank} has returned from its function, and others wait"
    ):
        cf.launch(_leaves, scheme, rank, workers=2, transport="local", timeout_seconds=600)


def test_a_process_that_returns_early_is_named() -> None:
    with pytest.raises(
        cf.WorkerError, match="worker 1 has returned from its function, and others wait for it"
    ):
        cf.launch(_leaves, "dapple(stages=2, micro_batches=2)", 1, workers=2, timeout_seconds=600)


def test_what_was_sent_before_a_return_arrives() -> None:
    def work() -> float:
        pipeline = made("dapple(stages=2, micro_batches=2)")
        pending = pipeline.start_evaluation(X, X)
        if pipeline.worker == 0:
            return 0.0  # its part is sent
        return pending.result().loss

    assert cf.launch(work, workers=2, transport="local", timeout_seconds=20)[1] > 0


def test_a_pipeline_says_how_long_a_thread_waits() -> None:
    over = threading.Event()

    def work() -> str:
        if current_transport().rank == 1:
            made("dapple(stages=2, micro_batches=2)")
            with rng_released():
                over.wait()
            return ""
        try:
            with pytest.raises(cf.WorkerError) as error:
                made("dapple(stages=2, micro_batches=2)", timeout_seconds=0.5).step(X, X)
            return str(error.value)
        finally:
            over.set()

    message, _ = cf.launch(work, workers=2, transport="local", timeout_seconds=600)
    assert "nothing came within 0.5 s" in message
