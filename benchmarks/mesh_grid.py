"""Sharded stages against one process: every scheme by FSDP2 and tensor parallelism, within 1e-10 in float64.

    python benchmarks/mesh_grid.py [--how FSDP] [--only chimera]

Four processes over Gloo, two workers by two positions; losses, norms, clipped AdamW steps, evaluation and the
state that another pipeline goes on from, with the cases of tests/runtime/mesh. FSDP shards the first layer of
each stage and the rest of it, or single layers; tensor parallelism shards features, and in every second layer
the sequence as well. Schemes without a flush are compared with two plain replicas. Prints a line a scheme.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import counterflow as cf
from counterflow import schemes
from counterflow.schedule.ir import Schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "mesh"))
import cases
from kit import arguments, machine_line

WHOLE: dict[str, Schedule] = {
    "gpipe": schemes.gpipe(2, 3),
    "dapple": schemes.dapple(2, 3),
    "interleaved": schemes.interleaved(2, 2),
    "gems": schemes.gems(2, 2),
    "chimera": schemes.chimera(2, 3),
    "chimera forward-doubling": schemes.chimera(2, 4, concat="forward-doubling"),
    "chimera backward-halving": schemes.chimera(2, 3, concat="backward-halving"),
    "mixpipe": schemes.mixpipe(2, 4),
    "hanayo": schemes.hanayo(2, 2),
}
SPLIT: dict[str, Schedule] = {
    "zb-h1": schemes.zb_h1(2, 3),
    "zb-v": schemes.zb_v(2, 3),
    "dualpipe": schemes.dualpipe(2, 4),
    "chimera split": schemes.chimera(2, 2, split=True),
}
CONTINUOUS: dict[str, Schedule] = {
    "pipedream": schemes.pipedream(2),
    "pipedream-2bw": schemes.pipedream_2bw(2, 2),
    "wpipe": schemes.wpipe(2, 2),
}
HOW = {
    "tensor parallelism": ({"tp": 2}, cases.tensor_parallel),
    "FSDP of stages": ({"shard": 2}, cases.sharded),
    "FSDP of layers": ({"shard": 2}, cases.layers_sharded),
}
OPTIONS: dict[str, dict[str, object]] = {
    "none": {"recompute": "none"},
    "stage": {"recompute": "stage"},
    "layer": {"recompute": "layer"},
    "no barrier": {"barrier": False},
    "compiled": {"compile": "aot_eager"},
}


def tried(how: str, name: str, option: str) -> str:
    dims, parallelize = HOW[how]
    more = OPTIONS[option]
    if option == "compiled":
        torch._dynamo.reset()  # what was compiled too often would run as it is
    try:
        if name in CONTINUOUS:
            cases.check_without_flush(CONTINUOUS[name], **more)
        else:
            schedule = WHOLE.get(name) or SPLIT[name]
            cases.check(schedule, dims, parallelize, loss=cases.loss_sum, count=24, **more)
    except AssertionError as error:
        return f"DIFFERS: {error}"
    return "same"


def work(how_only: str, only: str) -> None:
    torch.set_num_threads(1)
    first = True
    for how in (how for how in HOW if how_only in how):
        names = [*WHOLE, *SPLIT, *CONTINUOUS] if how == "tensor parallelism" else [*WHOLE]
        for name in (name for name in names if only in name):
            begin = time.perf_counter()
            found = []
            for option in OPTIONS:
                if (option == "no barrier" and name in CONTINUOUS) or (
                    option == "compiled" and name in SPLIT
                ):
                    continue
                found.append(f"{option} {tried(how, name, option)}")
            if dist.get_rank() == 0:
                if first:
                    print(f"{'how':<20} {'scheme':<26} seconds  with")
                print(
                    f"{how:<20} {name:<26} {time.perf_counter() - begin:7.1f}  {', '.join(found)}", flush=True
                )
                first = False


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--how", default="", help="ways to shard with this in their names")
    parser.add_argument("--only", default="", help="schemes with this in their names")
    print(machine_line())
    given = parser.parse_args()
    cf.launch(work, given.how, given.only, workers=4, timeout_seconds=120)
