"""The checkpoint of every scheme read under every other one, at another depth and width.

    python benchmarks/checkpoint_grid.py [--part 1/3] [--out benchmarks/results/checkpoint_grid.txt]

Each scheme trains four steps on four workers and writes a checkpoint by ``cf.save_checkpoint``; each scheme
then reads it on two workers and two replicas by ``cf.load_checkpoint``: other stages, other holders, other
cuts. Asynchronous schemes write and read too. The model has dropout and AdamW, with groups, clipping and a
learning rate that falls. Compared are

* what was read: weights, what the optimiser keeps, its options, the schedule of the learning rate, step and
  seed are those of the writer, bit for bit;
* the losses of the next two mini-batches, with those of one process without a pipeline that goes on from the
  same state and draws as the reader does, for each half where it halves micro-batches: relative difference
  in float32. Without a flush only the first one is the same by definition. PipeDream has micro-batches of its
  own size, which draw other dropout: of it only what was read is compared.

Threads. Prints a line a reader, and at the end what failed. A part is one reader out of so many; the file is
added to.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kit import arguments, machine_line
from torch import Tensor, nn

import counterflow as cf
from counterflow.schedule.ir import Schedule
from counterflow.verification.reference import Reference
from counterflow.verification.training_agreement import parts_of

SAMPLES, WIDTH, LAYERS = 16, 8, 18
STEPS, NEXT = 4, 2


def schedules(depth: int, n: int) -> dict[str, Schedule]:
    """Every scheme, with options that change where stages are or how ops are cut."""
    s = cf.schemes
    periods = 2 * depth + STEPS
    return {
        "gpipe": s.gpipe(depth, n),
        "dapple": s.dapple(depth, n),
        "dapple, split": s.dapple(depth, n, split=True),
        "interleaved": s.interleaved(depth, n, chunks=2),
        "gems": s.gems(depth, n),
        "chimera": s.chimera(depth, n),
        "chimera, forward doubling": s.chimera(depth, n, concat="forward-doubling"),
        "chimera, backward halving": s.chimera(depth, n, concat="backward-halving"),
        "chimera, split": s.chimera(depth, n, split=True),
        "mixpipe": s.mixpipe(depth, n, injected="max"),
        "hanayo, 1 wave": s.hanayo(depth, n, waves=1),
        "hanayo, 2 waves": s.hanayo(depth, n, waves=2),
        "zb-h1": s.zb_h1(depth, n),
        "zb-h2": s.zb_h2(depth, n),
        "zb-v": s.zb_v(depth, n),
        "v-half": s.v_half(depth, n),
        "v-min": s.v_min(depth, n),
        "interleaved-zb": s.interleaved_zb(depth, n),
        "dualpipe": s.dualpipe(depth, n),
        "dualpipe-v": s.dualpipe_v(depth, n),
        "pipedream": s.pipedream(depth, periods=periods),
        "pipedream-2bw": s.pipedream_2bw(depth, n),
        "wpipe": s.wpipe(depth, n),
    }


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(LAYERS)
    ]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).flatten(1).mean(dim=1).mean()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.8**n)


def pipeline(schedule: Schedule, seed: int) -> cf.Pipeline:
    return cf.Pipeline(
        model(), loss, schedule, optimizer=adamw, scheduler=falling, seed=seed, clip_norm=0.5, digest_every=0
    )


def batch(number: int, made: cf.Pipeline) -> Any:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator).chunk(made.replicas, 1)[made.replica]
    return x, y


def write(schedule: Schedule, folder: Path) -> dict[str, Any]:
    """What a writer does: train and save; its whole state."""
    made = pipeline(schedule, seed=3)
    for number in range(STEPS):
        made.step(*batch(number, made))
    cf.save_checkpoint(made, folder)
    return made.state_dict()


def read(
    schedule: Schedule, root: Path, states: dict[str, dict[str, Any]]
) -> dict[str, tuple[str, list[float]]]:
    """What a reader does with every checkpoint: what differs from the state, and the next losses."""
    made = pipeline(schedule, seed=4)
    found = {}
    for number, (name, state) in enumerate(states.items()):
        cf.load_checkpoint(made, root / str(number))
        mine = difference(made.state_dict(local=True), state)
        differs = next(filter(None, made.transport.gather_objects(mine)), "")
        told = [made.step(*batch(STEPS + k, made)) for k in range(NEXT)]
        steps = [step for step in (*told, *made.flush()) if step.reports_step is not None]
        found[name] = differs, [step.loss for step in sorted(steps, key=lambda step: step.reports_step or 0)]
    return found


def alone(parts: tuple[int, ...], state: dict[str, Any]) -> list[float]:
    """The next losses of one process without a pipeline, for readers that divide micro-batches so."""
    made = Reference(
        model(), loss, parts, optimizer=adamw, scheduler=falling, seed=state["seed"], clip_norm=0.5
    )
    made.steps = state["step"]
    group_of = {p: group for group in made.optimizer.param_groups for p in group["params"]}
    for layer in made.with_weights:
        for name, parameter in layer.module.named_parameters():
            kept = state["optimizer"][layer.names[name]]
            parameter.data.copy_(state["model"][layer.names[name]])
            made.optimizer.state[parameter] = {slot: value.clone() for slot, value in kept.state.items()}
            group_of[parameter].update(kept.options)
    assert made.scheduler is not None
    made.scheduler.load_state_dict(dict(state["scheduler"]["0"]))
    losses = []
    for number in range(STEPS, STEPS + NEXT):
        pair = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(number))
        of_replicas = pair.chunk(2, 1)
        losses.append(made.step([(x, y) for x, y in of_replicas]).loss)
    return losses


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The first thing that is not the same, bit for bit; of schedulers, what does not know the stages."""
    if (mine["step"], mine["seed"]) != (theirs["step"], theirs["seed"]):
        return "step or seed"
    for name, value in mine["model"].items():
        if not torch.equal(theirs["model"][name], value):
            return name
    for name, kept in mine["optimizer"].items():
        other = theirs["optimizer"][name]
        if other["options"] != kept["options"]:
            return f"options of {name}"
        if any(not torch.equal(other["state"][slot], value) for slot, value in kept["state"].items()):
            return f"optimiser of {name}"
    rates = [{k: v for k, v in s.items() if k != "lr_lambdas"} for s in mine["scheduler"].values()]
    return "" if all(s == {k: theirs["scheduler"]["0"][k] for k in s} for s in rates) else "scheduler"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--part", default="1/1", help="which readers")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"{machine_line()}, {platform.system()}", ""]
    began = time.perf_counter()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        writers, states = schedules(4, 8), {}
        expected: dict[tuple[int, ...], dict[str, list[float]]] = {}
        for number, (name, schedule) in enumerate(writers.items()):
            launched = cf.launch(write, schedule, root / str(number), workers=4, transport="local")
            states[name] = launched[0]
        lines.append(
            f"{'read on 2 workers x 2 replicas by':36} checkpoints  bit for bit  largest relative difference"
        )
        part, of = map(int, options.part.split("/"))
        for name, schedule in list(schedules(2, 4).items())[part - 1 :: of]:
            rows = cf.launch(read, schedule, root, states, workers=4, transport="local")[0]
            parts = parts_of(schedule)
            if parts not in expected:
                expected[parts] = {writer: alone(parts, state) for writer, state in states.items()}
            counted = 0 if name == "pipedream" else NEXT if schedule.synchronous else 1
            largest = 0.0
            for writer, (differs, losses) in rows.items():
                off = max(
                    (
                        abs(a - b) / abs(b)
                        for a, b in zip(losses[:counted], expected[parts][writer], strict=False)
                    ),
                    default=0.0,
                )
                largest = max(largest, off)
                if differs or off > 1e-6 or len(losses) != NEXT:
                    failed.append(f"{name} reads {writer}: {differs or f'{off:.1e}'}")
            same = sum(not differs for differs, _ in rows.values())
            shown_ = (
                f"{largest:.1e} of {counted} step{'s' if counted != 1 else ''}" if counted else "not compared"
            )
            lines.append(f"{name:36} {len(rows):11}  {same:11}  {shown_}")
            print(lines[-1], flush=True)
    seconds = time.perf_counter() - began
    lines += [
        "",
        f"{len(writers)} writers on 4 workers, {seconds:.0f} s, {len(failed)} failed (part {options.part})",
        *failed,
    ]
    print("\n".join(lines[-1 - len(failed) :]))
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
