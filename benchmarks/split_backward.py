"""What splitting a stage's backward costs: microseconds and bytes, beside torch's own split.

    python benchmarks/split_backward.py [--compile] [--keep]

A stage is some blocks of a small GPT on one thread. ``whole`` is one backward; ``split`` is the engine's
input gradient and weight gradients; ``torch`` is ``stage_backward_input`` and ``stage_backward_weight`` of
``torch.distributed.pipelining``. With ``--compile`` inductor compiles the stages as well: ``whole`` with
one graph of the backward, ``split`` with two. MiB is what was allocated since before the forward and is alive
between the two halves, the input gradient included.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from kit import arguments, keep, machine_line
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from counterflow.models.gpt import GPTConfig
from counterflow.runtime.stages.detach_points import DetachPoints
from counterflow.runtime.stages.split_backward import SplitBackward, SplitBackwardPlanner
from counterflow.runtime.stages.split_graphs import SplitBackend

REPEATS = 15


def stage(blocks: int, hidden: int) -> list[nn.Module]:
    config = GPTConfig(layers=blocks, hidden=hidden, heads=4, vocabulary=64, positions=64, dropout=0.0)
    return list(config.build())[1 : 1 + blocks]


def forward(layers: list[nn.Module], x: Tensor, detach_points: DetachPoints | None = None) -> Tensor:
    value = x
    for number, layer in enumerate(layers):
        if number and detach_points is not None:
            value = detach_points.before(number, value)
        value = layer(value)
    if detach_points is not None:
        detach_points.learn([value], [x])
    return value


Halves = tuple[Callable[[], None], Callable[[], None]]


def whole(layers: list[nn.Module], x: Tensor, above: Tensor) -> Halves:
    output = forward(layers, x)
    return lambda: torch.autograd.backward([output], [above]), lambda: None


def ours(split_planner: SplitBackwardPlanner) -> Callable[[list[nn.Module], Tensor, Tensor], Halves]:
    def made(layers: list[nn.Module], x: Tensor, above: Tensor) -> Halves:
        detach_points = DetachPoints(split_planner)
        output = [forward(layers, x, detach_points)]
        split = SplitBackward(split_planner, [x], detach_points)

        def first() -> None:
            split.input_gradient([output.pop()], [above])

        return first, split.weight_gradients

    return made


def torchs(layers: list[nn.Module], x: Tensor, above: Tensor) -> Halves:
    output = [forward(layers, x)]
    weights = [p for layer in layers for p in layer.parameters()]
    groups: list[list[dict[str, object]]] = []

    def first() -> None:
        groups.append(stage_backward_input(output, [above], [x], iter(weights))[1])  # type: ignore[arg-type]
        output.clear()

    def second() -> None:
        stage_backward_weight(iter(weights), groups.pop())

    return first, second


def measured(
    layers: list[nn.Module], make: Callable[..., Halves], shape: tuple[int, ...]
) -> tuple[float, float, float]:
    """Median microseconds of both halves; mebibytes alive between them, since before the forward."""
    firsts, seconds, kept = [], [], 0.0
    for turn in range(REPEATS + 3):
        for layer in layers:
            for parameter in layer.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(shape, requires_grad=True)
        above = torch.randn(shape)
        if turn == 0:  # count what the allocator gave out
            make(layers, x, above)[0]()
            continue
        if turn == 1:
            with torch.profiler.profile(profile_memory=True) as profile:
                first, second = make(layers, x, above)
                first()
            kept = sum(event.self_cpu_memory_usage for event in profile.key_averages()) / 2**20
            second()
            continue
        first, second = make(layers, x, above)
        begin = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        end = time.perf_counter()
        firsts.append(middle - begin)
        seconds.append(end - middle)
    return statistics.median(firsts) * 1e6, statistics.median(seconds) * 1e6, kept


def compiled(layers: list[nn.Module], *, splits: bool) -> Callable[..., Halves]:
    """Halves of a stage that inductor has compiled, in one graph of the backward or two."""
    backend = SplitBackend("inductor") if splits else "inductor"
    run: Callable[[Tensor], Tensor] = torch.compile(nn.Sequential(*layers), backend=backend)
    split_planner = SplitBackwardPlanner(0, lambda: [p for x in layers for p in x.parameters()], direct=True)
    split_planner.join_layers()

    def made(_: list[nn.Module], x: Tensor, above: Tensor) -> Halves:
        output = [run(x)]
        if not splits:
            return lambda: torch.autograd.backward([output.pop()], [above]), lambda: None
        split = SplitBackward(split_planner, [x])
        return lambda: split.input_gradient([output.pop()], [above]), split.weight_gradients

    return made


CASES = (1, 0), (1, 16), (4, 16), (12, 16), (4, 256)
"""Blocks and width; no width: one linear layer of 16."""


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, "split_backward.txt")
    parser.add_argument("--compile", action="store_true", help="stages compiled by inductor as well")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [
        machine_line(),
        f"median of {REPEATS}; µs of the two halves and their sum, MiB alive between them",
        f"{'stage':<28}{'':<16}{'first':>10}{'second':>10}{'sum':>10}{'MiB':>8}",
    ]
    print(*lines, sep="\n", flush=True)
    for blocks, hidden in CASES:
        layers = stage(blocks, hidden) if hidden else [nn.Linear(16, 16)]
        weights = [p for layer in layers for p in layer.parameters()]
        split_planner = SplitBackwardPlanner(0, lambda weights=weights: weights, direct=True)
        ways: dict[str, Callable[..., Halves]] = {"whole": whole, "split": ours(split_planner)}
        if hidden:  # torch's split needs a graph of several nodes
            ways["torch"] = torchs
        if options.compile and hidden:
            ways |= {
                f"{name} compiled": compiled(layers, splits=name == "split") for name in ("whole", "split")
            }
        about = f"{blocks} blocks of width {hidden}" if hidden else "a linear layer of width 16"
        for name, make in ways.items():
            first, second, alive = measured(layers, make, (2, 64, hidden or 16))
            row = f"{first:>10.0f}{second:>10.0f}{first + second:>10.0f}{alive:>8.2f}"
            lines.append(f"{about:<28}{name:<16}{row}")
            print(lines[-1], flush=True)
    if options.keep:
        keep("split_backward", lines)


if __name__ == "__main__":
    main()
