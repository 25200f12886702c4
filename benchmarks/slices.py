"""Bytes saved for backward where micro-batches run in slices of their sequence, predicted and measured.

    python benchmarks/slices.py [--keep]

Claims: on four workers, n = 4 and 8 slices need at most 0.47 and 0.37 of what 1F1B's most loaded worker
saves; what is predicted is within 5 % of what is measured; and in the same memory a sequence 2.5 times as
long fits with n = 8, with the loss of one process.

A small GPT of one block a worker is trained for a step on four threads. Predicted are the forwards that the
schedule stashes at once, times what one of a whole micro-batch saves: the measured peak of n = 1 over the
forwards that it stashes. What autograd saves counts, each memory once; weights and messages do not.

Then the same from ``measure_stages``, as ``counterflow train`` predicts it, also with stages computed again,
whole or layer by layer: there inputs are saved, and keys and values that slices leave to later ones; within
5 %, too.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product

import torch
from kit import arguments, keep, machine_line

import counterflow as cf
from counterflow.measure.stages.stage_record import StageCost
from counterflow.measure.stages.timing import measure_stages
from counterflow.models.gpt import GPTConfig
from counterflow.models.loss import next_token_loss
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.residency import peak_activations
from counterflow.training.timeline import costs_of

WORKERS, MICRO_BATCHES, TOKENS, SHORT = 4, 4, 4096, 1024
SCHEMES = {
    "1f1b": cf.schemes.dapple,
    "zb-h1": cf.schemes.zb_h1,
    "chimera": cf.schemes.chimera,
}


def scheduled(scheme: str, slices: int) -> Schedule:
    return SCHEMES[scheme](stages=WORKERS, micro_batches=MICRO_BATCHES, slices=slices)


def config(tokens: int) -> GPTConfig:
    return GPTConfig(WORKERS, 64, 4, 64, tokens, dropout=0.0)


def step(schedule: Schedule, tokens: int) -> tuple[int, float]:
    """The peak of this worker, and the loss."""
    torch.manual_seed(0)
    layers = config(tokens).build()
    pipeline = cf.Pipeline(
        layers, next_token_loss, schedule, optimizer=partial(torch.optim.SGD, lr=0.1), cuts=[2, 3, 4]
    )
    loss = pipeline.step(*sample(tokens)).loss
    return pipeline.peak_saved_bytes, loss


def sample(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return config(tokens).sample(MICRO_BATCHES, tokens, generator=torch.Generator().manual_seed(1))


def peaks(scheme: str, slices: int, tokens: int) -> tuple[list[int], float]:
    """By worker, and the loss."""
    rows = cf.launch(
        step, scheduled(scheme, slices), tokens, workers=WORKERS, transport="local", timeout_seconds=600
    )
    return [peak for peak, _ in rows], rows[0][1]


def one_process(tokens: int) -> float:
    """The loss of the model on the whole mini-batch."""
    torch.manual_seed(0)
    value, target = sample(tokens)
    with torch.no_grad():
        for layer in config(tokens).build():
            value = layer(value)
        return next_token_loss(value, target).item()


def measured(schedule: Schedule, recompute: str) -> tuple[list[StageCost], int]:
    """The costs of all stages, and the peak of this worker."""
    torch.manual_seed(0)
    pipeline = cf.Pipeline(
        config(SHORT).build(),
        next_token_loss,
        schedule,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        cuts=[2, 3, 4],
        recompute=recompute,
    )
    batch = sample(SHORT)
    costs = measure_stages(pipeline, *batch, repeats=1)
    pipeline.step(*batch)
    return costs, pipeline.peak_saved_bytes


def from_stages() -> list[str]:
    """Peaks predicted from measured stages with ``cf.simulate``."""
    lines = [
        f"| {SHORT} tokens | recompute | n | most saved by a worker, MB | predicted, MB | worst error |",
        "|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for scheme, recompute, slices in product(SCHEMES, ("none", "stage", "layer"), (1, 2, 4, 8)):
        schedule = scheduled(scheme, slices)
        rows = cf.launch(
            measured, schedule, recompute, workers=WORKERS, transport="local", timeout_seconds=600
        )
        costs = costs_of(rows[0][0], Recompute(recompute), 1)
        peaks = [peak for _, peak in rows]
        predicted = [used.peak for used in cf.simulate(schedule, costs).memory or ()]
        error = max(abs(p / f - 1) for p, f in zip(predicted, peaks, strict=True))
        worst = max(worst, error)
        lines.append(
            f"| {scheme} | {recompute} | {slices} | {max(peaks) / 1e6:.2f} | {max(predicted) / 1e6:.2f} "
            f"| {error:.1%} |"
        )
    return [*lines, "", f"The worst error is {worst:.1%}: {'within' if worst <= 0.05 else 'NOT within'} 5 %."]


def table() -> list[str]:
    lines = [
        "| scheme | n | most saved by a worker, MB | of n = 1 | predicted, MB | worst error | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for scheme in SCHEMES:
        base: list[float] = []
        for slices in (1, 2, 4, 8):
            began = time.perf_counter()
            found, _ = peaks(scheme, slices, TOKENS)
            seconds = time.perf_counter() - began
            units = peak_activations(scheduled(scheme, slices))
            base = base or [peak / unit for peak, unit in zip(found, units, strict=True)]
            predicted = [one * unit for one, unit in zip(base, units, strict=True)]
            if slices == 1:
                whole = max(found)
            error = max(abs(p / f - 1) for p, f in zip(predicted, found, strict=True))
            lines.append(
                f"| {scheme} | {slices} | {max(found) / 1e6:.1f} | {max(found) / whole:.3f} "
                f"| {max(predicted) / 1e6:.1f} | {error:.1%} | {seconds:.0f} |"
            )
    return lines


def longest() -> str:
    """The longest sequence that n = 8 trains in what n = 1 saves of a short one, in steps of 64 tokens."""
    most = max(peaks("1f1b", 1, SHORT)[0])
    per_token = max(peaks("1f1b", 8, SHORT)[0]) / SHORT
    tokens = int(most / per_token) // 64 * 64
    while max((found := peaks("1f1b", 8, tokens))[0]) > most:
        tokens -= 64
    return (
        f"In the {most / 1e6:.2f} MB that 1F1B saves with {SHORT} tokens, n = 8 trains {tokens}: "
        f"{tokens / SHORT:.2f} times as long; its loss is {found[1]:.6f}, "
        f"one process's {one_process(tokens):.6f}."
    )


def main() -> None:
    parser = arguments(__doc__, "slices.*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"# python benchmarks/slices.py, {machine_line()}",
        f"# {WORKERS} workers, {MICRO_BATCHES} micro-batches of a sample of {TOKENS} tokens, hidden 64",
        "",
        *table(),
        "",
        *from_stages(),
        "",
        longest(),
    ]
    print("\n".join(lines))
    if options.keep:
        keep("slices", lines)


if __name__ == "__main__":
    main()
