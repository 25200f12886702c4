"""Stages on further dimensions of the mesh against one process, for every scheme, in float64.

    python benchmarks/mesh_grid.py [--how FSDP] [--only chimera] [--keep]

Four processes over Gloo, two workers by two positions; losses, norms, clipped AdamW steps, evaluation and the
state that another pipeline goes on from, with the cases of tests/runtime/mesh. FSDP shards the first layer of
each stage and the rest of it, or single layers; tensor parallelism shards features, and in every second layer
the sequence as well. Schemes without a flush are compared with two plain replicas. Experts are divided with
and without FSDP, with a bias that balances them and micro-batches without samples; sequences are shared with
gathered and with ring attention, uneven labels and padding, whole and in slices; those with masks have
windows, packed documents, padding and rotary embeddings, and are compared with plain torch. Differences of a
loss, norm or weight above 1e-10 (FSDP, tensor parallelism) or 1e-12 (experts, sequences) are reported. Prints
a line a scheme.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import counterflow as cf
from counterflow import schemes
from counterflow.schedule.ir import Schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "mesh"))
import cases
import context_cases
import expert_cases
from kit import arguments, keep, machine_line

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
    "zb-h2": schemes.zb_h2(2, 3),
    "zb-v-half": schemes.v_half(2, 3),
    "zb-v-min": schemes.v_min(2, 3),
    "zb-interleaved": schemes.interleaved_zb(2, 2),
    "dualpipe-v": schemes.dualpipe_v(2, 4),
    "chimera split": schemes.chimera(2, 2, split=True),
}
SIZE: dict[str, int] = {"stages": 2, "micro_batches": 2}
FOLDED: dict[str, int] = {"workers": 2, "micro_batches": 2}
SLICED: dict[str, Schedule] = {
    "gpipe, 2 slices": schemes.gpipe(**SIZE, slices=2),
    "dapple, 2 slices": schemes.dapple(**SIZE, slices=2),
    "dapple, slices 3+5": schemes.dapple(**SIZE, slices=(3, 5)),
    "dapple, 4 slices": schemes.dapple(**SIZE, slices=4),
    "interleaved, 2 slices": schemes.interleaved(**FOLDED, slices=2),
    "gems, 2 slices": schemes.gems(**SIZE, slices=2),
    "chimera, 2 slices": schemes.chimera(**SIZE, slices=2),
    "mixpipe, 2 slices": schemes.mixpipe(stages=2, micro_batches=4, slices=2),
    "hanayo, 2 slices": schemes.hanayo(**FOLDED, slices=2),
    "zb-h1, slices 1+2+1": schemes.zb_h1(**SIZE, slices=(1, 2, 1)),
    "zb-h2, 2 slices": schemes.zb_h2(**SIZE, slices=2),
    "zb-v, 2 slices": schemes.zb_v(**FOLDED, slices=2),
    "zb-v-half, 2 slices": schemes.v_half(**FOLDED, slices=2),
    "zb-v-min, 2 slices": schemes.v_min(**FOLDED, slices=2),
    "zb-interleaved, 2 slices": schemes.interleaved_zb(**FOLDED, slices=2),
    "dualpipe, 2 slices": schemes.dualpipe(stages=2, micro_batches=4, slices=2),
    "dualpipe-v, 2 slices": schemes.dualpipe_v(workers=2, micro_batches=4, slices=2),
    "chimera split, 2 slices": schemes.chimera(**SIZE, split=True, slices=2),
}
CONTINUOUS: dict[str, Schedule] = {
    "pipedream": schemes.pipedream(2),
    "pipedream-2bw": schemes.pipedream_2bw(2, 2),
    "wpipe": schemes.wpipe(2, 2),
}
Check = Callable[..., None]


def sharded(dims: dict[str, int], parallelize: Any) -> Check:
    """A check of plain layers on a mesh."""
    return lambda schedule, **options: cases.check(
        schedule, dims, parallelize, loss=cases.loss_sum, count=24, **options
    )


def experts(parallelize: Any) -> Check:
    """A check of layers of experts; half of the positions' micro-batches have one sample, some have none."""
    return lambda schedule, **options: expert_cases.check(
        schedule, parallelize, count=2 * schedule.micro_batches * 2 - 2, balance=True, **options
    )


def contexts(parallelize: Any) -> Check:
    """A check of a GPT whose sequences are shared."""
    return lambda schedule, **options: context_cases.check(schedule, parallelize, **options)


def masked_contexts(parallelize: Any) -> Check:
    """A check of layers with masks whose sequences are shared."""
    return lambda schedule, **options: context_cases.check_packed(schedule, parallelize, **options)


HOW: dict[str, Check] = {
    "tensor parallelism": sharded({"tp": 2}, cases.tensor_parallel),
    "FSDP of stages": sharded({"shard": 2}, cases.sharded),
    "FSDP of layers": sharded({"shard": 2}, cases.layers_sharded),
    "experts": experts(cf.ExpertParallel("ep")),
    "experts and FSDP": experts(cf.ExpertParallel("ep", fully_shard="ep")),
    "contexts, gathered": contexts(cf.ContextParallel("cp")),
    "contexts, ring, FSDP": contexts(cf.ContextParallel("cp", ring=True, fully_shard="cp")),
    "contexts, masks": masked_contexts(cf.ContextParallel("cp")),
    "contexts, masks, ring": masked_contexts(cf.ContextParallel("cp", ring=True)),
}
OPTIONS: dict[str, dict[str, object]] = {
    "none": {"recompute": "none"},
    "stage": {"recompute": "stage"},
    "layer": {"recompute": "layer"},
    "no barrier": {"barrier": False},
    "compiled": {"compile": "aot_eager"},
}


def comparison(way: str, name: str, option: str) -> str:
    """Outcome of a scheme on a mesh with an option, in a word."""
    options, schedules = OPTIONS[option], WHOLE | SPLIT | SLICED
    if option == "compiled":
        torch._dynamo.reset()  # what was compiled too often would run as it is
    try:
        if name in CONTINUOUS:
            cases.check_without_flush(CONTINUOUS[name], **options)
        else:
            HOW[way](schedules[name], **options)
    except AssertionError as error:
        return f"DIFFERS: {error}"
    return "same"


def options_of(way: str, name: str) -> list[str]:
    """Options that are compared."""
    if way.startswith(("experts", "contexts")):
        return ["none", "stage", "layer"]
    left_out = ["no barrier"] if name in CONTINUOUS else ["compiled"] if name in SPLIT else []
    return [option for option in OPTIONS if option not in left_out]


def work(ways: str, only: str) -> list[str]:
    """Compare, print a line a scheme on the first rank, and return the lines."""
    torch.set_num_threads(1)
    lines = [f"{'how':<21} {'scheme':<26} seconds  with"]
    on_first = os.environ["RANK"] == "0"
    if on_first:
        print(lines[0])
    for way in (way for way in HOW if ways in way):
        names = [*WHOLE] if way.startswith("FSDP") else [*WHOLE, *SPLIT]
        if way == "tensor parallelism":
            names += CONTINUOUS
        if way.startswith("contexts"):
            names += SLICED
        for name in (name for name in names if only in name):
            begin = time.perf_counter()
            outcomes = [f"{option} {comparison(way, name, option)}" for option in options_of(way, name)]
            lines.append(f"{way:<21} {name:<26} {time.perf_counter() - begin:7.1f}  {', '.join(outcomes)}")
            if on_first:
                print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    parser = arguments(__doc__, "mesh_grid.txt, or that of --name")
    parser.add_argument("--how", default="", help="ways to divide stages with this in their names")
    parser.add_argument("--only", default="", help="schemes with this in their names")
    parser.add_argument("--name", default="mesh_grid", help="name of the kept file")
    options = parser.parse_args()
    header = machine_line()
    print(header)
    found = cf.launch(work, options.how, options.only, workers=4, timeout_seconds=120)
    if options.keep:
        keep(options.name, [header, *found[0]])
