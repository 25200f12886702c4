"""Agreement of workers that were started together, at a store which outlives them.

torchrun has one store for all attempts: it contains entries of earlier workers, and its number of restarts is
that of one machine, which does not rise when a machine joins or leaves. So rank 0 makes a name for the
attempt, and accepts those that answer it now.

Invariant: workers that return have the same name and number of the attempt, and no other worker has that
    name.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

_OFFER, _COUNT = "counterflow/attempt", "counterflow/attempts"

_GONE_SECONDS = 10.0
"""Time after which a store that refuses connections is gone."""

_CONNECTS_SECONDS = 5.0
"""Maximum time of a connection; a longer one is inconclusive."""

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.2
"""Interval between two queries of the store, which grows with time."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Agreement of the workers of one attempt.

    Attributes:
        name: unique name of this attempt.
        attempt: number of earlier starts of the workers, as far as is known.
    """

    name: str
    attempt: int


def meet(store: Store, rank: int, world_size: int, restarts: int, timeout_seconds: float) -> Rendezvous:
    """Agree with the workers that were started at the same time; all of them call it.

    Args:
        store: store that all reach; it may contain entries of earlier workers.
        rank: rank of this worker.
        world_size: number of workers.
        restarts: number of restarts, as passed to this worker.
        timeout_seconds: maximum time to wait for the other workers.

    Raises:
        RuntimeError: the other workers did not join in time.
    """
    deadline = time.monotonic() + timeout_seconds
    store.set_timeout(timedelta(seconds=timeout_seconds))
    if rank == 0:
        return _invite(store, world_size, restarts, deadline)
    return _join(store, rank, restarts, deadline)


def wait_for_store(host: str, port: int, timeout_seconds: float) -> None:
    """Wait until the launcher's store listens, as it did before the launcher started this worker.

    torch queries a store that is gone for up to two timeouts.

    Args:
        host: host of the store.
        port: port of the store.
        timeout_seconds: maximum time to wait.

    Raises:
        RuntimeError: nothing listens there.
    """
    deadline = time.monotonic() + min(timeout_seconds, _GONE_SECONDS)
    pause = _SHORTEST_SECONDS
    while True:
        try:
            socket.create_connection((host, port), _CONNECTS_SECONDS).close()
        except ConnectionRefusedError:
            pause = _wait(pause, deadline, "nothing listens there, so the launcher has ended")
        except OSError:  # torch tries for longer, and explains the error
            return
        else:
            return


def _invite(store: Store, world_size: int, restarts: int, deadline: float) -> Rendezvous:
    name, met = uuid.uuid4().hex, store.add(_COUNT, 1)
    store.set(_OFFER, name)
    keys = [f"{name}/{rank}" for rank in range(1, world_size)]
    pause = _SHORTEST_SECONDS
    while keys and not store.check(keys):
        pause = _wait(pause, deadline, f"{name}: some did not join")
    answers = {str(rank): json.loads(store.get(key)) for rank, key in enumerate(keys, 1)}
    attempt = max([met - 1, restarts, *(answer["restarts"] for answer in answers.values())])
    store.set(
        f"{name}/all",
        json.dumps({"attempt": attempt, "marks": {rank: answer["mark"] for rank, answer in answers.items()}}),
    )
    return Rendezvous(name, attempt)


def _join(store: Store, rank: int, restarts: int, deadline: float) -> Rendezvous:
    mark, answered, pause = uuid.uuid4().hex, "", _SHORTEST_SECONDS
    while True:
        name = store.get(_OFFER).decode() if store.check([_OFFER]) else ""
        if name != answered:  # the first one may be of workers that are gone
            store.set(f"{name}/{rank}", json.dumps({"mark": mark, "restarts": restarts}))
            answered = name
        if name and store.check([f"{name}/all"]):
            agreed = json.loads(store.get(f"{name}/all"))
            if agreed["marks"].get(str(rank)) == mark:
                return Rendezvous(name, agreed["attempt"])
        pause = _wait(pause, deadline, "rank 0 did not join")


def _wait(pause: float, deadline: float, missing: str) -> float:
    if time.monotonic() > deadline:
        raise RuntimeError(missing)
    time.sleep(pause)
    return min(1.5 * pause, _LONGEST_SECONDS)
