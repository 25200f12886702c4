"""Optimiser state sharded over the holders of a stage: bytes of each worker, and what a step takes.

    python benchmarks/zero_stage.py [--steps 12] [--hidden 256]

Trains the same layers with `zero_stage` 0 and 1 in processes over gloo, and compares the weights bit for bit.
Bytes are of what AdamW keeps; a step is the median of those after the first two, the two layouts in turn.
Beside them is what the planner predicts: bytes by worker, and for `zero_stage` 1 the step without it and the
broadcasts, over the link between two workers that is measured first. A shorter update is not in it.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from kit import arguments, machine_line
from torch import Tensor, nn

import counterflow as cf
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.links import MESSAGES, Travel, measure_messages
from counterflow.planning import AllReduce, Cluster, Configuration, LayerProfile, Model, Predictor, Profile
from counterflow.runtime.workers.world import current_transport

RESULTS = Path(__file__).parent / "results" / "zero_stage.txt"
SAMPLES = 16


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(dim=1).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def layers(count: int, hidden: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden))
        for _ in range(count)
    ]


def trained(schedule: cf.Schedule, hidden: int, steps: int) -> list[tuple[int, float, dict[str, Tensor]]]:
    """By ``zero_stage``: bytes of optimiser state here, a step's seconds, the weights."""
    pipelines = [
        cf.Pipeline(layers(8, hidden), loss, schedule, optimizer=adamw, zero_stage=zero_stage)
        for zero_stage in (0, 1)
    ]
    took: list[list[float]] = [[], []]
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, SAMPLES, hidden, generator=generator)
        for its, pipeline in zip(took, pipelines, strict=True):
            its.append(pipeline.step(x, y).seconds)
    found = []
    for its, pipeline in zip(took, pipelines, strict=True):
        state = sum(
            value.nbytes
            for optimizer in pipeline.optimizers.values()
            for kept in optimizer.state.values()
            for value in kept.values()
            if isinstance(value, Tensor)
        )
        found.append((state, statistics.median(its[2:]), pipeline.model_state_dict()))
    return found


def travels() -> tuple[Travel, ...]:
    """Messages of two workers."""
    return measure_messages(current_transport(), MESSAGES, repeats=15, pair=(0, 1))


def predicted(
    schedule: cf.Schedule, replicas: int, hidden: int, found: tuple[Travel, ...]
) -> tuple[list[float], float]:
    """By worker of all replicas, bytes of optimiser state; seconds of the broadcasts."""
    row = tuple(float(parameter.nbytes) for parameter in layers(1, hidden)[0].parameters())
    layer = LayerProfile((1.0,), (1.0,), (1.0,), (1.0,), sum(row), 1.0, parameter_bytes=row)
    link = fitted(found)
    cluster = Cluster("here", 1, 4, 1e12, link, link, allreduce=AllReduce.RING)
    predictor = Predictor(Model("m", ("layer",) * 8), Profile("p", "here", "", {"layer": layer}), cluster)
    options = {"stages": schedule.stages, "micro_batches": schedule.micro_batches}
    play = predictor.play(Configuration.of(schedule.scheme, options, replicas, 1, zero_stage=1))
    assert play.sharded is not None
    return [2 * size for its in play.sharded.owned for size in its], play.broadcast_seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()
    lines = [machine_line(), ""]
    lines.append(
        f"{'schedule':24} {'zero_stage':>10} {'optimiser state, MB by worker':>34} {'step, ms':>9} "
        f"{'predicted state':>24} {'step, ms':>9}"
    )
    messages = cf.launch(travels, workers=2, transport="gloo")[0]
    for schedule, replicas in ((cf.schemes.chimera(4, 4), 1), (cf.schemes.dapple(2, 4), 2)):
        workers = schedule.workers * replicas
        rows = cf.launch(trained, schedule, given.hidden, given.steps, workers=workers)
        same = all(torch.equal(row[0][2][name], row[1][2][name]) for row in rows for name in row[0][2])
        expected, sending = predicted(schedule, replicas, given.hidden, messages)
        without = max(row[0][1] for row in rows)
        for zero_stage in (0, 1):
            state = " ".join(f"{row[zero_stage][0] / 1e6:.2f}" for row in rows)
            seconds = max(row[zero_stage][1] for row in rows)
            name = f"{schedule.scheme} x {replicas}"
            line = f"{name:24} {zero_stage:>10} {state:>34} {seconds * 1e3:9.1f}"
            if zero_stage:
                told = " ".join(f"{size / 1e6:.2f}" for size in expected)
                line += f" {told:>24} {(without + sending) * 1e3:9.1f}"
            lines.append(line)
        lines.append(
            f"{'':24} weights after {given.steps} steps are {'equal' if same else 'NOT EQUAL'} bit for bit"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
