"""MixPipe: two directions with a chosen number of micro-batches in flight.

D=4, N=4, K=2, Γ=1 (micro-batches 0 and 2 go down, 1 and 3 up), makespan 19 with B = 2F:

    P0: F0 F1 B1 F2 F3 B3 B0 B2
    P1: F0 F1 B1 F2 F3 B0 B3 B2
    P2: F1 F0 B0 F3 F2 B1 B2 B3
    P3: F1 F0 B0 F3 F2 B2 B1 B3

Micro-batches alternate between the down and the up pipe. K of them are injected before the first backward:
each pipe's first stage runs K/2 forwards before its worker's first backward. Γ more forwards are advanced
past backwards of the other pipe, so a worker stashes at most K + Γ. ``injected="max"`` is for N > D: forwards
as early as memory allows with peak 3D/2 − 1.

How the order is made (``mixpipe_plan.py``): only orders symmetric for the two directions are built, as a list
schedule of one pipe folded onto D/2 workers. Every op has a due time; a free worker starts the op due first
that fits in memory. The first due times are linear in stage and micro-batch; the schedule is then made again
from its end, which determines how late each op may start, and once more from its beginning with these as due
times. Twelve such schedules are made and the shortest is kept. One place in memory is always left for the
later of a worker's two stages, so none can deadlock, whatever the due times.

For N = D up to 12 the orders are the shortest symmetric ones with K/2 forwards first (``mixpipe_optima.py``),
except at D=4 and K=2, where they are the paper's.

``asymmetric=True`` takes an order that is not symmetric, if one is known to be shorter than every symmetric
order with a peak of K + Γ (``mixpipe_asymmetric.py``). K and Γ then only determine the peak: how many
micro-batches the pipes inject first is free.

The paper's idle time 5D − 3K − 4 − 3Γ is exact at D=4; from K ≥ D/2 on the orders here idle at most that
long up to D=16; for K < D/2 and D ≥ 6 most settings have no such order, and another K often idles less within
the same peak of K + Γ. Simulate to get the exact value.

Source: Zhang et al., MixPipe (2023) section III-A (Figure 3, equation 5) and III-C (Figure 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind, OptionValue, Schedule
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.mixpipe_asymmetric import ASYMMETRIC
from counterflow.schedule.orders.mixpipe_plan import asymmetric_orders, mixpipe_orders, played
from counterflow.schedule.orders.split import split_backwards, split_workload
from counterflow.schedule.placement import bidirectional
from counterflow.schedule.scheme import (
    MICRO_BATCHES,
    SPLIT,
    Directions,
    LoopedBuild,
    NumberLoop,
    Option,
    OptionType,
    Scheme,
)
from counterflow.schedule.workload import Workload, plain


def mixpipe(
    stages: int,
    micro_batches: int,
    injected: OptionValue | None = None,
    early_forwards: int = 0,
    split: bool = False,
    *,
    asymmetric: bool = False,
) -> Schedule:
    """Two directions, K micro-batches injected, Γ forwards advanced.

    Args:
        stages: depth D, the number of workers, even.
        micro_batches: N, 1 or more.
        injected: K, even, 2..D, or ``"max"``; None means D.
        early_forwards: Γ, 0..(D − K)/2; 0 with ``"max"``.
        split: whether backwards are split (``split_backwards``).
        asymmetric: whether to take the shortest order with a peak of K + Γ, which is not symmetric. It is
            stored for depths and peaks with which it beats every symmetric one. ``micro_batches`` must be a
            multiple of ``stages``; the order of N = D is concatenated.

    Raises:
        ConfigError: an option is out of range, or no asymmetric order is stored.

    >>> schedule = mixpipe(stages=4, micro_batches=4, injected=2, early_forwards=1)
    >>> " ".join(f"{op.kind.value}{op.micro_batches[0]}" for op in schedule.orders[0])
    'F0 F1 B1 F2 F3 B3 B0 B2'
    >>> " ".join(str(op) for op in mixpipe(6, 6, 2, 1, asymmetric=True).orders[0][:6])
    'F0.0 F2.0 F1.5p1 B1.5p1 F3.5p1 B3.5p1'
    """
    return _build(played, stages, micro_batches, injected, early_forwards, split, asymmetric=asymmetric)


def _build(  # noqa: PLR0917 - the options, as their scheme's other builder has them
    play: NumberLoop,
    stages: int,
    micro_batches: int,
    injected: OptionValue | None = None,
    early_forwards: int = 0,
    split: bool = False,
    *,
    asymmetric: bool = False,
) -> Schedule:
    workload = _workload(stages, micro_batches)
    injected = stages if injected is None else injected
    _refuse(stages, injected, early_forwards)
    limit = injected if isinstance(injected, int) else None
    if not isinstance(asymmetric, bool):
        raise ConfigError(f"asymmetric={asymmetric!r}: must be true or false")
    if asymmetric:
        _refuse_asymmetric(stages, micro_batches, injected, early_forwards)
        worker_orders = asymmetric_orders(stages, micro_batches, (limit or 0) + early_forwards)
    else:
        worker_orders = mixpipe_orders(stages, micro_batches, limit, early_forwards, play)
    orders = tuple(
        tuple(
            Op(OpKind(kind), worker if m % 2 == 0 else stages - 1 - worker, (m,), pipe=m % 2)
            for kind, m in order
        )
        for worker, order in enumerate(worker_orders)
    )
    options = (
        ("stages", stages),
        ("micro_batches", micro_batches),
        ("injected", injected),
        ("early_forwards", early_forwards),
        *([("asymmetric", True)] * asymmetric),
    )
    return split_backwards(Schedule("mixpipe", options, workload, orders), split)


def _workload(stages: int, micro_batches: int, split: bool = False) -> Workload:
    at_least("stages", stages, 2)
    at_least("micro_batches", micro_batches, 1)
    work = plain(bidirectional(stages), micro_batches, pipe_of=lambda m: m % 2)
    return split_workload(work, split)


def _refuse(stages: int, injected: OptionValue, early_forwards: int) -> None:
    if isinstance(injected, str):
        if injected != "max":
            raise ConfigError(f"injected={injected!r}: must be even, 2 to {stages}, or 'max'")
        most, why = 0, "with injected=max no further forwards are advanced"
    else:
        at_least("injected", injected, 2)
        if injected % 2 or injected > stages:
            raise ConfigError(f"injected={injected}: must be even, 2 to {stages} (the depth), or 'max'")
        most = (stages - injected) // 2
        why = f"(stages - injected)/2 = {most}"
    at_least("early_forwards", early_forwards, 0)
    if early_forwards > most:
        raise ConfigError(f"early_forwards={early_forwards}: must be 0 to {most}; {why}")


def _refuse_asymmetric(stages: int, micro_batches: int, injected: OptionValue, early_forwards: int) -> None:
    if not isinstance(injected, int) or (stages, injected + early_forwards) not in ASYMMETRIC:
        legal = "; ".join(
            f"stages={' or '.join(str(depth) for depth, most in ASYMMETRIC if most == peak)} with "
            f"injected + early_forwards = {peak}"
            for peak in sorted({most for _, most in ASYMMETRIC})
        )
        raise ConfigError(
            f"asymmetric: no order for stages={stages}, injected={injected} and "
            f"early_forwards={early_forwards} is known to be shorter than the symmetric ones; legal: {legal}"
        )
    if micro_batches % stages:
        raise ConfigError(
            f"micro_batches={micro_batches}: an asymmetric order has as many micro-batches as stages, or "
            f"several times as many; use a multiple of {stages}"
        )


def _planned(workers: int, micro_batches: int, _layers: int) -> Iterator[Mapping[str, OptionValue]]:
    """Every K and Γ up to depth 16, then K in eighths of the depth and Γ none or all that is legal; and the
    asymmetric orders.
    """
    for depth, peak in ASYMMETRIC:
        if depth == workers and micro_batches % depth == 0:
            early = peak % 2
            yield {"injected": peak - early, "early_forwards": early, "asymmetric": True}
    fine = workers <= 16
    eighths = sorted({2 * round(i * workers / 16) for i in range(1, 9)})
    for injected in range(2, workers + 1, 2) if fine else eighths:
        most = (workers - injected) // 2
        for early in range(most + 1) if fine else sorted({0, most}):
            yield {"injected": injected, "early_forwards": early}
    if micro_batches > workers:
        yield {"injected": "max", "early_forwards": 0}


def _most_stashed(
    stages: int, injected: OptionValue | None = None, early_forwards: int = 0, **_: OptionValue
) -> int | None:
    injected = stages if injected is None else injected
    return injected + early_forwards if isinstance(injected, int) else None


SCHEME = Scheme(
    name="mixpipe",
    build=mixpipe,
    workload=_workload,
    summary="two directions with a chosen number of micro-batches in flight",
    source="Zhang et al. 2023",
    options=(
        Option("stages", "even, 2 or more", "depth D: stages of each pipe, and workers", letter="D"),
        MICRO_BATCHES,
        Option(
            "injected",
            "even, 2..stages, or max",
            "K: micro-batches injected before the first backward",
            like="stages",
            words=("max",),
            letter="K",
            order_only=True,
        ),
        Option(
            "early_forwards",
            "0..(stages - injected)/2",
            "Γ: forwards advanced on the middle workers",
            default=0,
            letter="Γ",
            unsaid=0,
            order_only=True,
        ),
        SPLIT,
        Option(
            "asymmetric",
            "true or false",
            "the shortest order with a peak of K + Γ, if it is not symmetric",
            default=False,
            kind=OptionType.FLAG,
            unsaid=False,
            order_only=True,
        ),
    ),
    directions=Directions.TWO,
    planner=_planned,
    needs="an even depth",
    most_stashed=_most_stashed,
    looped=LoopedBuild(played, _build),
)
