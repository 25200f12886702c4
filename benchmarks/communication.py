"""Communication plans beside other ways: receive buffers and rounds of communicators.

    python benchmarks/communication.py [--placements 2000] [--keep]

Claims: receive buffers have at most 1.02 times the bytes of the messages that are in use at once, in the plan
and in the engine, also if widths halve from one quarter of the stages to the next; on four ranks ZB-V needs
fewer buffers than torch's pools; on drawn placements communicators are never made in more rounds than by
greedy matching. Drawn widths show how layouts do on sizes that fit badly, without a goal.

torch's lists are those of the installed torch; their lives are counted as ours are, until the last op that
uses a message. ``one pool`` shares buffers between all messages of a rank, ``a pool a stage`` between those
of one stage and direction (pytorch/pytorch 196465). The ring of NeMo AutoModel 3780 has S - s + 2 buffers a
direction on rank s of S.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from kit import arguments, keep, machine_line
from torch import nn
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.schedules import _ComputationType as Kind

import counterflow as cf
from counterflow.program.actions import Matching
from counterflow.program.communication.buffer_layout import arrange
from counterflow.program.communication.communication_plan import communication_plan
from counterflow.program.communication.link_rounds import Link, fewest_rounds, greedy_rounds
from counterflow.program.communication.receive_buffers import Lifetime, colour, most_in_use
from counterflow.program.lowering import lower
from counterflow.schedule import schemes

SCHEDULES = [
    schemes.gpipe(4, 8),
    schemes.dapple(4, 8),
    schemes.interleaved(4, 8, chunks=2),
    schemes.chimera(4, 8),
    schemes.hanayo(4, 8, waves=2),
    schemes.zb_v(4, 8),
    schemes.dualpipe_v(4, 8),
    schemes.zb_v(8, 16),
]
WIDTHS = (64, 96, 128, 200, 256, 384)
OF_TORCH = {
    "ScheduleInterleaved1F1B": schemes.interleaved(4, 8, chunks=2),
    "ScheduleZBVZeroBubble": schemes.zb_v(4, 8),
    "ScheduleDualPipeV": schemes.dualpipe_v(4, 8),
}
GOAL = 1.02
STEPS = 4


def planned(ratios: list[float]) -> Iterator[str]:
    yield "| schedule | buffers by worker | all | in use at once | ratio | by tag (Gloo) |"
    yield "|---|---|---|---|---|---|"
    for schedule in SCHEDULES:
        tables = communication_plan(lower(schedule)).buffers
        by_tag = communication_plan(lower(schedule, matching=Matching.TAG)).buffers
        count, bound = sum(table.count for table in tables), sum(table.in_use for table in tables)
        row = ", ".join(str(table.count) for table in tables)
        ratios.append(count / bound)
        tagged = sum(table.count for table in by_tag)
        yield f"| {schedule} | {row} | {count:g} | {bound:g} | {count / bound:.3f} | {tagged} |"


def work(widths: list[int], schedule: cf.Schedule) -> tuple[float, float]:
    """Bytes of all receive buffers of this worker, and of its messages that are in use at once."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in pairwise(widths)]
    with cf.Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=torch.optim.SGD) as pipeline:
        x, y = torch.ones(64, widths[0]), torch.ones(64, widths[-1])
        for _ in range(STEPS):
            pipeline.step(x, y)
        runner = pipeline._engine.runner
        messages = runner.interpreter.in_flight.messages
        rows = 64 // schedule.micro_batches
        lives = communication_plan(runner._cut.steady[-1]).buffers[pipeline.worker].lifetimes
        sizes = [4 * rows * widths[life.receive.output.boundary + 1] for life in lives]
        blocks = sum(block.memory.nbytes for block in messages._memory.blocks.values())
        return blocks + messages._pool._most_bytes, most_in_use(lives, sizes)[1]


def measured(ratios: list[float]) -> Iterator[str]:
    yield "| schedule | widths between stages | KiB in buffers | KiB in use at once | ratio |"
    yield "|---|---|---|---|---|"
    for schedule in SCHEDULES[:-1]:
        for name, widths in (
            ("equal", [256] * (schedule.stages + 1)),
            (
                "halving",
                [256 >> min(3, stage * 4 // schedule.stages) for stage in range(schedule.stages + 1)],
            ),
        ):
            rows = cf.launch(work, widths, schedule, workers=schedule.workers, transport="local")
            size, bound = (sum(column) / 1024 for column in zip(*rows, strict=True))
            ratios.append(size / bound)
            yield f"| {schedule} | {name} | {size:.1f} | {bound:.1f} | {size / bound:.3f} |"


def drawn_widths(count: int) -> Iterator[str]:
    yield f"| schedule, {count} draws of widths from {min(WIDTHS)} to {max(WIDTHS)} | mean ratio | worst |"
    yield "|---|---|---|"
    rng = random.Random(0)
    for schedule in SCHEDULES[:-1]:
        tables, found = communication_plan(lower(schedule)).buffers, []
        for _ in range(count):
            widths = rng.choices(WIDTHS, k=schedule.stages + 1)
            size = in_use = 0
            for table in tables:
                sizes = [widths[life.receive.output.boundary + 1] for life in table.lifetimes]
                layout = arrange(table.lifetimes, sizes)
                size, in_use = size + layout.size, in_use + layout.in_use
            found.append(size / in_use)
        yield f"| {schedule} | {mean(found):.3f} | {max(found):.3f} |"


class Stage:
    """A stage as torch's schedules need it to make their lists."""

    def __init__(self, index: int, rank: int, stages: int, ranks: int) -> None:
        self.stage_index, self.group_rank, self.num_stages, self.group_size = index, rank, stages, ranks
        self.has_backward, self.submod, self.group, self.device = True, None, None, torch.device("cpu")
        self.is_first, self.is_last, self.stage_index_to_group_rank = index == 0, index == stages - 1, {}


def torch_lists(name: str, ranks: int, micro_batches: int) -> dict[int, list[Any]]:
    """Lists of a schedule with its messages, by rank."""
    stages = 2 * ranks
    turns = "Interleaved" not in name
    holders = [min(s, stages - 1 - s) if turns else s % ranks for s in range(stages)]
    local = [Stage(stage, 0, stages, ranks) for stage in range(stages) if holders[stage] == 0]
    order = getattr(torchs, name)(local, micro_batches).pipeline_order
    plain = {rank: [action for action in row if action is not None] for rank, row in order.items()}
    return torchs._add_send_recv(plain, holders.__getitem__, stages)


def torch_buffers(rows: dict[int, list[Any]]) -> tuple[int, int]:
    """Buffers of all ranks: in one pool a rank, and in a pool a stage and direction."""
    shared = separate = 0
    for row in rows.values():
        steps = [action.sub_actions or (action,) for action in row]
        users: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)
        for place, actions in enumerate(steps):
            for action in actions:
                if action.computation_type.name in _COMPUTES:
                    key = action.stage_index, action.microbatch_index
                    users[key].append((place, action.computation_type is Kind.FORWARD))
        lives: list[Lifetime] = []
        kinds: list[tuple[int, Kind]] = []
        for place, actions in enumerate(steps):
            for action in actions:
                if action.computation_type in (Kind.RECV_F, Kind.RECV_B):
                    gradient = action.computation_type is Kind.RECV_B
                    of = users[action.stage_index, action.microbatch_index]
                    places = [at for at, forward in of if not (gradient and forward)]
                    lives.append(Lifetime(None, place, min(places), max(places)))  # type: ignore[arg-type]
                    kinds.append((action.stage_index, action.computation_type))
        shared += colour(lives).count
        for kind in {*kinds}:
            separate += colour([life for life, of in zip(lives, kinds, strict=True) if of == kind]).count
    return shared, separate


_COMPUTES = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")


def beside_torch() -> Iterator[str]:
    yield f"| torch {torch.__version__}, 4 ranks, 8 micro-batches | one pool | a pool a stage | ours |"
    yield "|---|---|---|---|"
    for name, schedule in OF_TORCH.items():
        tables = communication_plan(lower(schedule)).buffers
        shared, separate = torch_buffers(torch_lists(name, 4, 8))
        yield f"| {name} | {shared} | {separate} | {sum(table.count for table in tables)} |"
    ranks = 8
    rings = [
        (rank > 0) * (ranks - rank + 2) + (rank < ranks - 1) * (ranks - rank + 2) for rank in range(ranks)
    ]
    tables = communication_plan(lower(schemes.dapple(ranks, 16))).buffers
    count = sum(table.count for table in tables)
    yield f"\n1F1B on {ranks} ranks: rings of S - s + 2 {sum(rings)}, ours {count}"


def drawn(count: int) -> tuple[Iterator[str], int]:
    rng = random.Random(0)
    fewer = more = proved = 0
    for _ in range(count):
        workers = rng.randint(2, 8)
        holders = [rng.randrange(workers) for _ in range(workers * rng.randint(1, 3))]
        pairs = [(a, b) for a, b in pairwise(holders) if a != b]
        links: list[Link] = [*dict.fromkeys(link for a, b in pairs for link in ((a, b), (b, a)))]
        plan, greedy = fewest_rounds(links), len(greedy_rounds(links))
        fewer += len(plan.rounds) < greedy
        more += len(plan.rounds) > greedy
        proved += plan.proved
    text = (
        f"{count} drawn placements, 2 to 8 workers with 1 to 3 stages each: fewer rounds than by greedy "
        f"matching {fewer / count:.1%}, more {more}, proved fewest {proved / count:.1%}"
    )
    return iter([text]), more


def main() -> int:
    parser = arguments(__doc__, "communication.txt")
    parser.add_argument("--placements", type=int, default=2000)
    options = parser.parse_args()
    rounds, more = drawn(options.placements)
    lines = [f"# python benchmarks/communication.py --placements {options.placements}, {machine_line()}"]
    ratios: list[float] = []
    for part in (planned(ratios), measured(ratios), drawn_widths(50), beside_torch(), rounds):
        lines += ["", *part]
    lines += ["", f"most bytes in buffers over bytes in use {max(ratios):.3f}, goal {GOAL}"]
    print("\n".join(lines))
    if options.keep:
        keep("communication", lines)
    return int(more > 0 or max(ratios) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
