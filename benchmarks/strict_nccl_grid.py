"""Every scheme over NCCL's rules, on threads of one process: numbers agree, and nothing would hang.

    python benchmarks/strict_nccl_grid.py [--depths 2,3,4] [--log results/strict_nccl_grid.txt]

Each scheme with as many micro-batches as stages and with one more, in one pipeline group and in two, by turns
with each recomputation and each time of the gradient sums, every third without a barrier. Two steps are made,
six without a flush.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit import arguments, machine_line

from counterflow.errors import CounterflowError
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial


def schedules(depth: int) -> Iterator[Schedule]:
    yield schemes.pipedream(depth)
    yield schemes.interleaved_zb(depth, 2 * depth, chunks=2)
    for n in (depth, depth + 1):
        for scheme in (schemes.gpipe, schemes.dapple, schemes.zb_h1, schemes.zb_h2, schemes.zb_v):
            yield scheme(depth, n)
        for scheme in (schemes.v_half, schemes.v_min, schemes.pipedream_2bw, schemes.wpipe):
            yield scheme(depth, n)
        yield schemes.interleaved(depth, n, chunks=2)
        yield schemes.hanayo(depth, n, waves=2)
        yield schemes.dualpipe_v(depth, 2 * n)
        if depth % 2 == 0:
            yield schemes.gems(depth, n)
            yield schemes.mixpipe(depth, n, injected=2)
            yield schemes.dualpipe(depth, 2 * n)
            yield schemes.chimera(depth, n, split=True)
            for concat in ("direct", "forward-doubling", "backward-halving"):
                yield schemes.chimera(depth, n, concat=concat)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--depths", default="2,3,4")
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    began, about = time.perf_counter(), machine_line()
    recompute, sync = (
        itertools.cycle(("none", "stage", "layer")),
        itertools.cycle(("end", "eager", "eager-opt")),
    )
    every = (s for depth in map(int, given.depths.split(",")) for s in schedules(depth))
    wrong, count = [], 0
    for schedule, replicas in itertools.product(every, (1, 2)):
        if schedule.workers * replicas > 6:
            continue
        how: dict[str, Any] = {"recompute": next(recompute)}
        if schedule.synchronous:
            how["sync"] = next(sync)
            if count % 3 == 0:
                how |= {"barrier": False, "clip_norm": None}
        count += 1
        try:
            trial = small_trial(schedule, replicas=replicas, steps=2 if schedule.synchronous else 6)
            found = trial.verify(transport="strict-nccl", **how)
            problem = "" if found.ok else str(found)
        except CounterflowError as error:
            problem = str(error)
        if problem:
            wrong.append(f"{schedule}, {replicas} groups, {how}: {problem}")
            print(wrong[-1], flush=True)
    told = (
        f"{count} cases over NCCL's rules, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s; {about}"
    )
    print(told)
    if given.log is not None:
        given.log.write_text("\n".join([*wrong, told, ""]), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
