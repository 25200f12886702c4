"""Freed memory of workers on cores: steps with glibc's own threshold, and with Counterflow's.

    python benchmarks/heap.py [--rounds 3] [--steps 20] [--keep]

Question: what does it cost that glibc returns freed memory to the system within a step, and gets it again?
Two workers train the U-Net, the ResNet and the Llama of `own_models.py`; both settings take turns, each in
processes of its own. Processor time is that of the worker that needs more.
"""

from __future__ import annotations

import os
import resource
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from kit import arguments, keep, machine, machine_line
from own_models import adamw, parts_of

import counterflow as cf

MODELS = "unet", "resnet", "llama"
SETTINGS = "glibc's", "Counterflow's"
WARM_UP = 5
VALUES = "step ms", "system ms", "page faults"


@contextmanager
def environment(setting: str) -> Iterator[None]:
    """Environment of the workers: one that tunes malloc, to its own default, is left as it is."""
    if setting == SETTINGS[0]:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=7"
    try:
        yield
    finally:
        os.environ.pop("GLIBC_TUNABLES", None)


def work(name: str, steps: int) -> tuple[float, float, float]:
    """Mean of a step's milliseconds, system milliseconds and page faults of a worker."""
    warnings.simplefilter("ignore")
    model, loss, example = parts_of(name)
    schedule = cf.schemes.chimera(2, 2)
    pipeline = cf.Pipeline(model, loss, schedule, example=example[0], optimizer=adamw)
    for _ in range(WARM_UP):
        pipeline.step(*example)
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = [pipeline.step(*example).seconds for _ in range(steps)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = 1e3 * (after.ru_stime - before.ru_stime) / steps
    return 1e3 * statistics.median(seconds), system, (after.ru_minflt - before.ru_minflt) / steps


def main() -> None:
    parser = arguments(__doc__, "heap.txt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    columns = [f"{setting}: {value}" for setting in SETTINGS for value in VALUES]
    lines = [
        f"# python benchmarks/heap.py, {machine_line(machine())}",
        "",
        f"| model | {' | '.join(columns)} |",
    ]
    lines.append("|---|" + "--:|" * len(columns))
    print(*lines, sep="\n", flush=True)
    for name in MODELS:
        rows: dict[str, list[tuple[float, ...]]] = {setting: [] for setting in SETTINGS}
        for _ in range(options.rounds):
            for setting in SETTINGS:
                with environment(setting):
                    runs = cf.launch(work, name, options.steps, workers=2, transport="gloo", threads=1)
                rows[setting].append(tuple(map(max, zip(*runs, strict=True))))
        medians = [map(statistics.median, zip(*rows[setting], strict=True)) for setting in SETTINGS]
        cells = [f"{value:,.1f}" for values in medians for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.keep:
        keep("heap", lines)


if __name__ == "__main__":
    main()
