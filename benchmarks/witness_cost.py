"""Time that comparisons with the model's own forward add to a run, as a share of it.

Two pipelines of one model train in turns on threads, one with the witness and one without. A witness is
timed as what a compared step takes more than the median of the others; the share is of a run of so many
steps, with the steps 1, 2, 4, 8, ... and each 1,000th compared.

    python benchmarks/witness_cost.py [--keep]
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from kit import arguments, keep, machine_line
from torch import Tensor, nn

import counterflow as cf

WIDTH, BLOCKS, SAMPLES, POSITIONS = 128, 8, 16, 64
RUNS = (1_000, 10_000, 100_000)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(POSITIONS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


def seconds(scheme: str, steps: int) -> tuple[list[float], list[bool]]:
    """Seconds of each step, and whether it was compared; the first steps warm up."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, POSITIONS, WIDTH), torch.randint(0, 64, (SAMPLES, POSITIONS))
    loss = partial(_loss)
    adam = partial(torch.optim.AdamW, lr=1e-3)
    pipeline = cf.Pipeline(Net(), loss, scheme, optimizer=adam, example=x, witness_every=4)
    for _ in range(4):
        pipeline.step(x, y)
    times = [pipeline.step(x, y).seconds for _ in range(steps)]
    return times, [number % 4 == 0 for number in range(5, 5 + steps)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


def compared_in(steps: int) -> int:
    """Number of steps of a run that are compared at the default interval."""
    return sum(n % 1000 == 0 or (n < 1000 and not n & (n - 1)) for n in range(1, steps + 1))


def table(steps: int) -> list[str]:
    """Rows of the table."""
    rows = [
        f"{'scheme':40} {'transport':9} {'step':>9} {'compared':>9} "
        + " ".join(f"{f'of {run:,} steps':>17}" for run in RUNS)
    ]
    for scheme, workers, transport in (
        ("dapple(stages=2, micro_batches=8)", 2, "local"),
        ("zb-v(workers=2, micro_batches=8)", 2, "local"),
        ("chimera(stages=2, micro_batches=8)", 2, "local"),
        ("dapple(stages=2, micro_batches=8)", 2, "gloo"),
    ):
        times, compared = cf.launch(partial(seconds, scheme, steps), workers=workers, transport=transport)[0]
        plain = statistics.median(t for t, c in zip(times, compared, strict=True) if not c)
        more = statistics.median(t for t, c in zip(times, compared, strict=True) if c)
        shares = [100 * compared_in(run) * max(0.0, more - plain) / (run * plain) for run in RUNS]
        cells = " ".join(f"{share:15.2f} %" for share in shares)
        rows.append(f"{scheme:40} {transport:9} {1e3 * plain:6.1f} ms {1e3 * more:6.1f} ms {cells}")
    return rows


def main() -> None:
    """Print the table, and keep it."""
    parser = arguments(__doc__, "witness_cost.*")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    lines = [f"# python benchmarks/witness_cost.py, {machine_line()}", *table(asked.steps)]
    print("\n".join(lines))
    if asked.keep:
        keep("witness_cost", lines)


if __name__ == "__main__":
    main()
