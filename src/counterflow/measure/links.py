"""Durations of messages and all-reduces between workers, measured with the transport that will carry them.

Invariant: the measured time is that of a worker's wait: from the call that begins to the return of the wait.
Workers on cores compute before, as in a step: then a thread that carries messages waits for its core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from counterflow.common.laps import lap, read_start, read_stop
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.workers.world import current_transport

from .disturbance import WAITING, quiet_seconds, waiting_share

MESSAGES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages and all-reduces from which latency and seconds per byte are fitted."""


@dataclass(frozen=True, slots=True)
class Travel:
    """Size and seconds of a message, or an all-reduce, see ``quiet_seconds``."""

    size_bytes: int
    seconds: float


def measure_messages(
    transport: Transport, sizes: Sequence[int], *, repeats: int = 15, pair: tuple[int, int] = (0, 1)
) -> tuple[Travel, ...]:
    """Time of one message between two ranks, half of a round trip; all workers call it.

    Args:
        transport: transport of 2 workers or more.
        sizes: sizes of messages in bytes, multiples of 4.
        repeats: measurements of each size; a third as many precede uncounted, because memory pages are new.
        pair: the two ranks.
    """
    return tuple(
        _measured(transport, size, repeats, lambda t: _there_and_back(transport, t, pair)) for size in sizes
    )


def measure_allreduces(
    transport: Transport, sizes: Sequence[int], *, repeats: int = 15, ranks: Sequence[int] | None = None
) -> tuple[Travel, ...]:
    """Time of an all-reduce over some ranks, or all; all workers call it. Arguments as in
    ``measure_messages``.
    """
    ranks = range(transport.world_size) if ranks is None else ranks
    group = transport.group(ranks)

    def reduce(tensor: torch.Tensor) -> float | None:
        if transport.rank not in ranks:
            return None
        begin = time.perf_counter()
        transport.all_reduce(tensor, group).wait()
        _finish(transport)
        return time.perf_counter() - begin

    return tuple(_measured(transport, size, repeats, reduce) for size in sizes)


def _measured(
    transport: Transport, size: int, repeats: int, run: Callable[[torch.Tensor], float | None]
) -> Travel:
    tensor = torch.zeros(size // 4, device=transport.device)
    durations = []
    quiet = _is_quiet(transport)
    for turn in range(repeats + max(2, repeats // 3)):
        transport.gather([0.0])  # all begin together
        if transport.device.type == "cpu":
            _compute(_COMPUTE_SECONDS)
        seconds = run(tensor)
        if seconds is not None and turn >= max(2, repeats // 3):
            durations.append(seconds)
    quiet = _is_quiet(transport) or quiet  # all workers ask; another program goes on, a moment does not
    seconds = quiet_seconds(durations, quiet=quiet) if durations else 0.0
    return Travel(size, max(row[0] for row in transport.gather([seconds])))


_COMPUTE_SECONDS = 0.001
"""Time for which workers on cores compute before a message."""


def _compute(seconds: float) -> None:
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        pass


_PROBE_SECONDS = 0.02
"""Time for which workers compute to find out whether others have their processors."""


def _is_quiet(transport: Transport) -> bool:
    """True if all workers have a processor for themselves while they compute at the same time, or if the
    system does not tell.

    Waits of messages do not tell it: threads that carry these wait for each other on a quiet machine, too.
    """
    transport.gather([0.0])
    begin = read_start()
    _compute(_PROBE_SECONDS)
    share = waiting_share([lap(begin, read_stop())]) or 0.0
    return max(row[0] for row in transport.gather([share])) <= WAITING


def _there_and_back(transport: Transport, tensor: torch.Tensor, pair: tuple[int, int]) -> float | None:
    if transport.rank not in pair:
        return None
    first, second = pair
    begin = time.perf_counter()
    if transport.rank == first:
        sent = transport.send([tensor], second, 0)
        transport.receive([tensor], second, 1).wait()
        sent.wait()
    else:
        transport.receive([tensor], first, 0).wait()
        transport.send([tensor], first, 1).wait()
    _finish(transport)
    return (time.perf_counter() - begin) / 2 if transport.rank == first else None


def _finish(transport: Transport) -> None:
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)


def measure_links(repeats: int, pair: tuple[int, int]) -> tuple[tuple[Travel, ...], tuple[Travel, ...]]:
    """Times of messages and all-reduces of two workers; all call it."""
    transport = current_transport()
    times = 3 * repeats
    return (
        measure_messages(transport, MESSAGES, repeats=times, pair=pair),
        measure_allreduces(transport, MESSAGES, repeats=times, ranks=pair),
    )
