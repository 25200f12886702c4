"""The checker over everything the schemes make: depth 2 to 32, micro-batches 1 to 4·D, every option.

    python benchmarks/check_sweep.py [largest depth]
    python benchmarks/check_sweep.py sample [schedules]

Every number of micro-batches up to 4·D at depth 2 to 6, the edges of that range above (the full product
would run for many hours); every value of every option, MixPipe's K and Γ in full to depth 8 and in turn
above. ``sample`` draws (seeded) any number of micro-batches from 1 to 4·D and any option at depth 7 to 32.
Prints one line a depth and, at the end, what failed.
"""

from __future__ import annotations

import datetime as dt
import random
import sys
import time
from collections.abc import Iterator

from counterflow.program.checker import inspect
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes.chimera import Concat


def micro_batches(depth: int) -> list[int]:
    """All up to 4·D at small depths, a spread of them at larger ones, always with the edges."""
    if depth <= 6:
        return list(range(1, 4 * depth + 1))
    edges = {1, 2, depth - 1, depth, depth + 1, 2 * depth, 2 * depth + 3, 3 * depth, 4 * depth - 1, 4 * depth}
    return sorted(edges if depth <= 12 else edges & {1, depth - 1, depth + 1, 2 * depth, 4 * depth - 1})


def every_schedule(depth: int, n: int) -> Iterator[Schedule]:
    """Every scheme with every option at one depth and number of micro-batches."""
    for parts in (1, 2, 4):
        yield schemes.gpipe(depth, n, groups=parts)
        yield schemes.interleaved(depth, n, chunks=parts)
        yield schemes.hanayo(depth, n, waves=parts)
    yield schemes.dapple(depth, n)
    yield schemes.pipedream(depth, periods=n)
    if n >= depth:
        yield schemes.pipedream_2bw(depth, n, periods=3)
        yield schemes.wpipe(depth, n, periods=3)
    if depth % 2 == 0:
        yield schemes.gems(depth, n)
        for pairs in (f for f in range(1, depth // 2 + 1) if (depth // 2) % f == 0):
            for concat in Concat:
                yield schemes.chimera(depth, n, pairs=pairs, concat=concat)
        yield schemes.mixpipe(depth, n, injected="max")
        shapes = [(k, g) for k in range(2, depth + 1, 2) for g in range((depth - k) // 2 + 1)]
        for k, g in shapes if depth <= 8 else shapes[n % 7 :: 7 if depth <= 16 else 29]:
            yield schemes.mixpipe(depth, n, injected=k, early_forwards=g)


def sample(count: int) -> None:
    """Check schedules drawn from the whole range of depths above 6."""
    generator = random.Random(0)
    failed: list[str] = []
    for _ in range(count):
        depth = generator.randint(7, 32)
        n = generator.randint(1, 4 * depth)
        schedule = generator.choice(list(every_schedule(depth, n)))
        if not inspect(schedule).ok:
            failed.append(str(schedule))
    print(f"sample of {count} schedules at depth 7 to 32, {dt.date.today()}: {len(failed)} failures")
    print("\n".join(failed))
    sys.exit(bool(failed))


def main() -> None:
    """Sweep and print."""
    if sys.argv[1:2] == ["sample"]:
        sample(int(sys.argv[2]) if len(sys.argv) > 2 else 100)
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    print(f"checker sweep, {dt.date.today()}")
    failed: list[str] = []
    total = 0
    for depth in range(2, largest + 1):
        begin, count = time.perf_counter(), 0
        for n in micro_batches(depth):
            for schedule in every_schedule(depth, n):
                report = inspect(schedule)
                count += 1
                if not report.ok:
                    failed.append(f"{schedule}: {[r for r in report.results if not r.ok]}")
        total += count
        print(
            f"depth {depth}: {count} schedules, {len(failed)} failures so far, "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    print(f"{total} schedules, {len(failed)} failures")
    print("\n".join(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
