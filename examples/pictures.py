"""Draw the same work under four schemes: pictures in ``runs/pictures``, a comparison on the terminal.

Four workers, eight micro-batches, F = 1 and B = 2. Every schedule is checked before it is drawn.
"""

from __future__ import annotations

from pathlib import Path

import counterflow as cf

WORKERS, MICRO_BATCHES = 4, 8

schedules = {
    "dapple": cf.schemes.dapple(stages=WORKERS, micro_batches=MICRO_BATCHES),
    "chimera": cf.schemes.chimera(stages=WORKERS, micro_batches=MICRO_BATCHES),
    "chimera-doubling": cf.schemes.chimera(
        stages=WORKERS, micro_batches=MICRO_BATCHES, concat="forward-doubling"
    ),
    "hanayo": cf.schemes.hanayo(workers=WORKERS, micro_batches=MICRO_BATCHES, waves=2),
}


def main() -> None:
    """Check, simulate, draw and tabulate."""
    folder = Path("runs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{'scheme':18} {'makespan':>9} {'bubbles':>8} {'peak':>5}  picture")
    for name, schedule in schedules.items():
        cf.check(schedule)
        # A stage is a worker's share of the model; where a worker holds several, each is smaller.
        share = WORKERS / schedule.stages
        result = cf.simulate(schedule, cf.Costs(forward=share, backward=2 * share))
        path = folder / f"{name}.png"
        cf.draw(result, path)
        peak = max(result.peak_activations) * share
        print(f"{name:18} {result.makespan:9g} {result.bubble_ratio:8.1%} {peak:5g}  {path}")


if __name__ == "__main__":
    main()
