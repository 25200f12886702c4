"""Predicted against measured peaks of memory, worker by worker.

    python benchmarks/memory.py [--keep]

Claim: a worker's predicted peak is within 5 % of the most bytes that torch's allocator gave it in a step.

Each model's layers are measured as `counterflow profile` does it, in one process. From that the planner
predicts what each worker holds at most; then processes over Gloo run the schedule, and every
allocation and every free of theirs is noted, also those of the thread that ends their sends. All state
counts: weights, gradients, optimiser, messages. The mini-batch, which is the user's, does not. The first
runs are schemes of every kind, all recomputations, SGD, its momentum and Adam, float32, autocast and cast
weights, a GPT and a stack of linear layers, on two workers. What they showed was used to mend the model of
memory; the runs after them, on two to four workers, were not measured before it was.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from kit import RESULTS, arguments, machine_line
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from counterflow.common.tensors.torch_private import allocation_events, errors_alone, start_allocations
from counterflow.measure.equal_layers import kinds_of
from counterflow.measure.layer_costs import assembled
from counterflow.measure.layer_times import bytes_of
from counterflow.models.gpt import GPTConfig
from counterflow.planning import Cluster, Configuration, Link, Model, Predictor, Profile
from counterflow.runtime.parameters.digest import digest
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.gloo import GlooTransport
from counterflow.runtime.transport.staging import PendingSend
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute

GOAL = 0.05
STEPS = 2, 4
"""Numbers of the steps that count, from 0: the first one learns shapes and makes the optimiser's state, and
in the first, second, fourth, eighth, ... one checks of the loss hold more."""
GPTS = {
    "gpt": GPTConfig(layers=6, hidden=96, heads=4, vocabulary=256, positions=64, dropout=0.0),
    "large": GPTConfig(layers=8, hidden=256, heads=8, vocabulary=1000, positions=96, dropout=0.0),
}
DTYPES = {"": {}, "autocast": {"autocast": torch.bfloat16}, "cast": {"compute_dtype": torch.bfloat16}}


@dataclass(frozen=True, slots=True)
class Run:
    """What is predicted and measured."""

    model: str
    scheme: str
    options: dict[str, Any]
    recompute: str = "none"
    optimizer: str = "adam"
    precision: str = ""
    samples: int = 4

    @property
    def subject(self) -> tuple[str, str, str, int]:
        """What is profiled once for all runs that share it."""
        return self.model, self.optimizer, self.precision, self.samples


def runs() -> Iterator[Run]:
    """Those that the model of memory was mended by."""
    two = {"stages": 2, "micro_batches": 4}
    by_worker = {"workers": 2, "micro_batches": 4}
    yield Run("gpt", "gpipe", two)
    yield Run("gpt", "gpipe", two, recompute="stage")
    yield Run("gpt", "gpipe", two, recompute="layer")
    yield Run("gpt", "dapple", two)
    yield Run("gpt", "dapple", two, recompute="layer")
    yield Run("gpt", "interleaved", {**by_worker, "chunks": 2})
    yield Run("gpt", "hanayo", {**by_worker, "waves": 1})
    yield Run("gpt", "chimera", two)
    yield Run("gpt", "chimera", {**two, "concat": "forward-doubling"}, recompute="stage")
    yield Run("gpt", "mixpipe", {**two, "injected": 2})
    yield Run("gpt", "zb-h1", two)
    yield Run("gpt", "zb-v", by_worker)
    yield Run("gpt", "pipedream-2bw", two)
    yield Run("gpt", "wpipe", by_worker)
    yield Run("gpt", "dapple", two, optimizer="sgd")
    yield Run("gpt", "dapple", two, precision="autocast")
    yield Run("gpt", "gpipe", two, precision="cast", optimizer="momentum")
    yield Run("linear", "gpipe", two, optimizer="momentum", samples=256)
    yield Run("linear", "dapple", {"stages": 2, "micro_batches": 8}, samples=256, optimizer="momentum")
    yield Run("linear", "hanayo", {**by_worker, "waves": 1}, samples=256, optimizer="momentum")
    yield Run("gpt", "interleaved", {**by_worker, "chunks": 2}, optimizer="sgd")
    yield Run("gpt", "zb-h1", two, recompute="stage")
    yield Run("gpt", "gpipe", two, recompute="layer", precision="autocast")
    yield Run("large", "chimera", two, recompute="layer", samples=2)
    yield Run("gpt", "zb-v", by_worker, recompute="layer")
    yield Run("gpt", "dapple", {**two, "split": True}, recompute="layer")
    yield Run("large", "zb-h1", two, recompute="layer", samples=2)
    yield Run("linear", "zb-v", by_worker, recompute="layer", samples=256)


def later_runs() -> Iterator[Run]:
    """Those that it was not mended by when they were first measured; later linear zb-v was."""
    four = {"stages": 4, "micro_batches": 4}
    yield Run("gpt", "dapple", four, optimizer="momentum", samples=2)
    yield Run("gpt", "zb-h1", {"stages": 3, "micro_batches": 6}, optimizer="sgd", precision="autocast")
    yield Run("linear", "dapple", {"stages": 3, "micro_batches": 6}, samples=128)
    yield Run("linear", "chimera", four, samples=256, optimizer="sgd")
    yield Run("linear", "zb-v", {"workers": 2, "micro_batches": 6}, samples=512, optimizer="momentum")
    yield Run("large", "interleaved", {"workers": 2, "micro_batches": 4, "chunks": 2}, recompute="layer")
    yield Run("large", "hanayo", {"workers": 2, "micro_batches": 4, "waves": 2}, precision="cast")
    yield Run("large", "gpipe", {"stages": 3, "micro_batches": 6}, recompute="stage", precision="autocast")
    yield Run("gpt", "pipedream-2bw", {"stages": 3, "micro_batches": 4}, optimizer="momentum")
    yield Run("linear", "wpipe", {"workers": 2, "micro_batches": 6}, samples=128)


def layers_of(model: str) -> list[nn.Module]:
    if model in GPTS:
        return GPTS[model].build()
    sizes = [(64, 256), *[(256, 256)] * 5]
    found: list[nn.Module] = []
    for wide, to in sizes:
        found += [nn.Linear(wide, to), nn.ReLU()]
    return [*found, nn.Linear(256, 16)]


def batch(model: str, samples: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    if model in GPTS:
        return GPTS[model].sample(samples, generator=generator)
    return torch.randn(samples, 64, generator=generator), torch.randn(samples, 16, generator=generator)


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9 if name == "momentum" else 0.0)


def pipeline(subject: tuple[str, str, str, int], schedule: Any, **more: Any) -> Pipeline:
    model, optimizer, precision, _ = subject
    loss = GPTS[model].loss if model in GPTS else nn.functional.mse_loss
    with torch.device("meta"):  # else the layers that were given are there too
        layers = layers_of(model)
    return Pipeline(
        layers,
        loss,
        schedule,
        optimizer=partial(optimizer_of, optimizer),
        digest_every=0,
        **DTYPES[precision],
        **more,
    )


def profiled(subject: tuple[str, str, str, int]) -> tuple[Model, Profile]:
    """What a worker runs: bytes alone, no times."""
    name, _, _, samples = subject
    layers = layers_of(name)
    found = bytes_of(partial(pipeline, subject), len(layers), *batch(name, samples))
    inputs, _ = batch(name, 1)
    model = Model(name, tuple(kinds_of(layers)), found.update.states, float(inputs.nbytes))
    return model, assembled(layers, [found])


def warm_up() -> None:
    """Let cuBLAS allocate its workspaces, of each thread and dtype, which are no stage's."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device="cuda", dtype=dtype)
        x = torch.randn(8, 64, device="cuda", dtype=dtype, requires_grad=True)
        layer(x).sum().backward()
        torch.bmm(x[None], x.T[None])
    torch.cuda.synchronize()


def peaks_of_device(every: list[tuple[Run, tuple[int, ...]]]) -> list[dict[str, float]]:
    """What a worker with a GPU runs: by run the peak bytes of its allocator, reserved and pinned bytes."""
    found = []
    warm_up()
    for run, cuts in every:
        schedule = registry.build(run.scheme, run.options)
        inputs, targets = batch(run.model, run.samples * schedule.micro_batches)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        asked = torch.cuda.memory_stats()["requested_bytes.all.current"]
        one = pipeline(run.subject, schedule, cuts=list(cuts), recompute=run.recompute)
        peak = 0
        for step in range(STEPS[-1] + 1):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            one.step(inputs.pin_memory(), targets.pin_memory())
            torch.cuda.synchronize()
            if step in STEPS:
                peak = max(peak, torch.cuda.max_memory_allocated() - before)
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        stats = torch.cuda.memory_stats()
        found.append(
            {
                "bytes": peak,
                "requested": stats["requested_bytes.all.peak"] - asked,
                "reserved": torch.cuda.max_memory_reserved(),
                "pinned": pinned,
                "workspaces": before,
            }
        )
        one.flush()
        one.close()
        del one
    return found


class _OnReaper(PendingSend):
    """A call on the thread that ends sends, which frees copies of tensors that are not contiguous."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(0, lambda _: None)
        self.call, self.ended = call, threading.Event()
        control: Any = current_transport().control
        control._reaper.put(self)

    def finish(self, timeout: timedelta) -> None:
        self.result = self.call()
        self.ended.set()


class _Sum:
    """A sum whose tensor this thread frees."""

    def __init__(self, transfer: Any, tensor: Tensor) -> None:
        self.transfer, self.tensor = transfer, [tensor]

    def wait(self) -> None:
        self.transfer.wait()
        time.sleep(_LET_GO)
        self.tensor.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transfer, name)


_LET_GO = 0.005
"""Seconds after which Gloo's own thread, whose frees are not noted, no longer refers to a call's tensors."""


@contextmanager
def frees_here() -> Iterator[None]:
    """Let this thread free the tensors of collective calls, not now and then Gloo's own."""
    all_gather = c10d.all_gather
    all_reduce = GlooTransport.all_reduce

    def gathered(*args: Any, **kwargs: Any) -> Any:
        result = all_gather(*args, **kwargs)
        time.sleep(_LET_GO)
        return result

    def summed(transport: GlooTransport, tensor: Tensor, group: Any) -> Any:
        return _Sum(all_reduce(transport, tensor, group), tensor)

    c10d.all_gather = gathered
    GlooTransport.all_reduce = summed  # type: ignore[method-assign]
    try:
        yield
    finally:
        c10d.all_gather = all_gather
        GlooTransport.all_reduce = all_reduce  # type: ignore[method-assign]


def peak_of_steps(make: Callable[[], Pipeline], inputs: Any, targets: Any) -> int:
    """A worker's peak of allocated bytes in ``STEPS``, with everything from the making of its pipeline on.

    Allocations of its thread and of the one that ends its sends are merged by time.
    """
    for large in (1 << 17, 1 << 20):  # factors of digests, made once for each process
        digest([torch.zeros(large)], torch.device("cpu"))
    with errors_alone(), frees_here():
        _OnReaper(start_allocations)
        start_allocations()
        pipeline = make()
        events = [(-1, event) for event in allocation_events()]
        for step in range(STEPS[-1] + 1):
            start_allocations()
            pipeline.step(inputs, targets)
            events += [(step, event) for event in allocation_events()]
        pipeline.flush()
        pipeline.close()
        frees = _OnReaper(allocation_events)
        assert frees.ended.wait(60)
    first = events[0][1]
    events.sort(key=lambda entry: first.cpu_elapsed_us(entry[1]))
    late = sorted(frees.result, key=first.cpu_elapsed_us, reverse=True)
    current = peak = 0
    for step, event in events:
        while late and first.cpu_elapsed_us(late[-1]) < first.cpu_elapsed_us(event):
            current += late.pop().cpu_memory_usage()
        current += event.cpu_memory_usage()
        if step in STEPS:
            peak = max(peak, current)
    return peak


def measured(every: list[tuple[Run, tuple[int, ...]]]) -> list[int]:
    """What a worker runs: its peak of each run, with everything from the pipeline's making on."""
    found = []
    for run, cuts in every:
        print(run, flush=True)
        schedule = registry.build(run.scheme, run.options)
        inputs, targets = batch(run.model, run.samples * schedule.micro_batches)
        gc.collect()  # what goes later would go from this run's bytes
        gc.disable()
        make = partial(pipeline, run.subject, schedule, cuts=list(cuts), recompute=run.recompute)
        found.append(peak_of_steps(make, inputs, targets))
        gc.enable()
    return found


def predicted(run: Run, model: Model, profile: Profile) -> Any:
    quick = Link(0.0, 0.0)
    cluster = Cluster("workers", 1, 4, memory_bytes=1e15, inside=quick, between=quick, cores=2)
    configuration = Configuration.of(
        run.scheme, run.options, 1, run.samples, recompute=Recompute(run.recompute)
    )
    return Predictor(model, profile, cluster).play(configuration)


def _summed(errors: list[float]) -> str:
    absolute = sorted(map(abs, errors))
    within = sum(error <= GOAL for error in absolute)
    median = absolute[len(absolute) // 2]
    return (
        f"{within} of {len(errors)} workers within {GOAL:.0%}; median {median:.1%}, worst {absolute[-1]:.1%}"
    )


def main() -> None:
    parser = arguments(__doc__, "memory.*")
    given = parser.parse_args()
    first = len(every := list(runs()))
    every += later_runs()
    known: dict[Any, Any] = {}
    plays = []
    for run in every:
        if run.subject not in known:
            print(run.subject, flush=True)
            (known[run.subject],) = launch(profiled, run.subject, workers=1, transport="local")
        plays.append(predicted(run, *known[run.subject]))
    peaks: list[list[int]] = [[] for _ in every]
    for workers in sorted({play.schedule.workers for play in plays}):
        mine = [number for number, play in enumerate(plays) if play.schedule.workers == workers]
        pairs = [(every[number], plays[number].stages.cuts) for number in mine]
        by_worker = launch(measured, pairs, workers=workers, transport="gloo", threads=1)
        for number, *found in zip(mine, *by_worker, strict=True):
            peaks[number] = found
    lines = [machine_line(), "", f"{'run':<84}{'worker':>7}{'predicted':>11}{'measured':>11}{'error':>8}"]
    errors: list[float] = []
    for number, (run, play) in enumerate(zip(every, plays, strict=True)):
        name = " ".join(
            filter(None, (run.model, str(play.schedule), run.recompute, run.optimizer, run.precision))
        )
        if number == first:
            lines += ["", "not measured before the model of memory was mended:", ""]
        for worker, expected in enumerate(play.memory):
            size = peaks[number][worker]
            errors.append(expected.total / size - 1)
            head = name if not worker else ""
            mib = f"{expected.total / 2**20:>7.2f} MiB{size / 2**20:>7.2f} MiB"
            lines.append(f"{head:<84}{worker:>7}{mib}{errors[-1]:>+8.1%}")
        if number in (first - 1, len(every) - 1):
            lines += ["", _summed(errors)]
            errors = []
    text = "\n".join(lines) + "\n"
    print(text)
    if given.keep:
        (RESULTS / "memory.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
