"""Workers agree on which attempt they are, at a store that has what earlier ones wrote."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from counterflow.runtime.workers import rendezvous
from counterflow.runtime.workers.rendezvous import Rendezvous, meet, wait_for_store


def met(store: HashStore, restarts: list[int]) -> list[Rendezvous]:
    """As many workers as there are counts of restarts, which torchrun tells each machine by itself."""
    size = len(restarts)
    with ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(meet, store, rank, size, restarts[rank], 20.0) for rank in reversed(range(size))
        ]
        return [future.result() for future in reversed(futures)]


def test_all_have_one_name_and_each_attempt_another() -> None:
    store = HashStore()
    attempts = [met(store, [0, 0, 0]), met(store, [1, 1, 1]), met(store, [1, 1, 1])]
    assert [len(set(each)) for each in attempts] == [1, 1, 1]
    assert [each[0].attempt for each in attempts] == [0, 1, 2]  # a machine that comes is counted nowhere else
    assert len({each[0].name for each in attempts}) == 3


def test_a_machine_that_is_new_knows_of_no_restart() -> None:
    store = HashStore()
    assert {each.attempt for each in met(store, [0, 2, 0])} == {2}
    assert {each.attempt for each in met(store, [3, 0])} == {3}  # and there may be fewer


def test_the_name_of_workers_that_are_gone_is_not_taken() -> None:
    store = HashStore()
    old = met(store, [0, 0])[0]
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(meet, store, 1, 2, 0, 20.0)  # finds the old name, and that all were there
        with pytest.raises(TimeoutError):
            late.result(0.2)
        new = meet(store, 0, 2, 0, 20.0)
        assert late.result() == new
    assert new.name != old.name


@pytest.mark.parametrize(("rank", "missing"), [(0, "some did not join"), (1, "rank 0 did not join")])
def test_who_does_not_come_is_not_waited_for_for_ever(rank: int, missing: str) -> None:
    with pytest.raises(RuntimeError, match=missing):
        meet(HashStore(), rank, 2, 0, 0.1)


def test_a_store_whose_launcher_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GONE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        wait_for_store("127.0.0.1", port, 300.0)
    with pytest.raises(RuntimeError, match="nothing listens there, so the launcher has ended"):
        wait_for_store("127.0.0.1", port, 300.0)
