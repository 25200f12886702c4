"""How fast schedules are built and simulated.

Claims: chimera at D=64, N=1,024 (131,072 ops) is built in at most 1 s and simulated in at most 15 ms once
warm (the schedule seen before, the inner loop compiled), with links that carry one message at a time; 1,000
cost settings of chimera at D=8, N=64 take at most 1 s. Medians of several runs.
"""

from __future__ import annotations

import datetime as dt
import platform
import statistics
import time
from collections.abc import Callable

import counterflow as cf


def median_seconds(run: Callable[[], object], times: int) -> float:
    """Median wall time of ``run``."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def many(schedule: cf.Schedule, settings: int) -> float:
    """Simulate one schedule with many costs; the sum of the makespans."""
    costs = (cf.Costs(forward=1 + i / settings, p2p=i / settings / 10) for i in range(settings))
    return sum(cf.simulate(schedule, cost).makespan for cost in costs)


def main() -> None:
    """Measure and print the table."""
    build = median_seconds(lambda: cf.schemes.chimera(stages=64, micro_batches=1024), 5)
    large = cf.schemes.chimera(stages=64, micro_batches=1024)
    lanes = cf.Costs(p2p=0.1)
    first = median_seconds(lambda: cf.simulate(large, lanes).makespan, 1)
    for _ in range(5):
        cf.simulate(large, lanes)
    warm = median_seconds(lambda: cf.simulate(large, lanes).bubble_ratio, 21)
    free = median_seconds(lambda: cf.simulate(large).bubble_ratio, 21)
    small = cf.schemes.chimera(stages=8, micro_batches=64)
    settings = median_seconds(lambda: many(small, 1000), 5)
    print(f"{platform.machine()}, Python {platform.python_version()}, {dt.date.today()}")
    print("| what | seconds | claim |")
    print("|---|---|---|")
    print(f"| build chimera D=64, N=1,024 (131,072 ops) | {build:.3f} | <= 1 |")
    print(f"| its first simulation (reads the ops, no compiled loop) | {first:.3f} | |")
    print(f"| a further one | {warm:.4f} | <= 0.015 |")
    print(f"| the same without messages | {free:.4f} | |")
    print(f"| 1,000 cost settings of chimera D=8, N=64 | {settings:.3f} | <= 1 |")


if __name__ == "__main__":
    main()
