"""What to run on a machine with GPUs: whether numbers are right there, and how quick and how large they are.

    python benchmarks/gpu_check.py --one-gpu  # eight minutes on a machine with one GPU: one_gpu.py
    python benchmarks/gpu_check.py [--devices 1,2,4,8] [--parts verify,speed] [--models gpt-2,bert-48]
                                   [--steps 10] [--peak-tflops 989] [--small] [--out gpu_check.json]

`verify`: for each number of devices, schemes of every kind trained over NCCL and by one process: the numbers
agree. `speed`: the papers' models on all devices, scheme by scheme: the predicted and the measured time of a
step and memory of a device, the share of the devices' peak that is used (MFU), and torch's own 1F1B and ZB-V
beside them. What fails is told, and the rest goes on. The report is a text and a JSON file; send both.

Without a GPU, or with `--small`, it runs its whole way on the CPU: `verify` with NCCL's rules between
threads, `speed` with small models over Gloo. Such numbers say nothing of GPUs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import one_gpu
import torch
from kit import arguments
from torch import nn
from torch.distributed import pipelining as theirs
from torch.utils.flop_counter import FlopCounterMode

import counterflow as cf
from counterflow.capture.estimates import estimated_costs
from counterflow.measure.model_profile import Measurement
from counterflow.models.bert import BERTConfig
from counterflow.models.gpt import GPTConfig
from counterflow.models.presets import preset
from counterflow.planning import Configuration, Predictor
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry
from counterflow.schedule.cuts import balance
from counterflow.training import load_config
from counterflow.training.profiling import measure
from counterflow.training.trial import small_trial

PEAKS = {
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "A10": 125,
    "4090": 165,
}
"""Of bf16, dense, in 10**12 operations a second, by what is in a device's name."""


def peak_of(name: str) -> float | None:
    """Peak of a device in bf16, in operations a second, by its name; None: unknown."""
    return next((peak * 1e12 for part, peak in PEAKS.items() if part in name), None)


WARM_UP = 3


@dataclass
class Row:
    """A contender on a model."""

    model: str
    name: str
    workers: int
    seconds: float = 0.0
    predicted_seconds: float | None = None
    samples_per_second: float = 0.0
    mfu: float | None = None
    peak_bytes: list[int] = field(default_factory=list)
    """By worker what torch's allocator held at most; on the CPU what autograd saved."""
    predicted_bytes: list[float] | None = None
    failed: str = ""


@dataclass(frozen=True)
class Subject:
    """A model as it is run.

    Attributes:
        name: of the model.
        config: its shape.
        samples: of a micro-batch.
        micro_batches: of a step, of a pipeline group.
        low: whether it computes in bf16.
        positions: tokens of a sample; None: as many as the model has positions.
    """

    name: str
    config: GPTConfig | BERTConfig
    samples: int
    micro_batches: int
    low: bool
    positions: int | None = None

    def layers(self, device: str = "meta") -> list[nn.Module]:
        with torch.device(device):
            return self.config.build()

    def batch(self) -> tuple[Any, Any]:
        draw = torch.Generator().manual_seed(0)
        return self.config.sample(self.samples * self.micro_batches, self.positions, generator=draw)

    def flops(self) -> float:
        """Of a step's forwards and backwards."""
        layers, counter = self.layers(), FlopCounterMode(display=False)
        inputs, targets = self.batch()
        one = torch.utils._pytree.tree_map(lambda t: t[: self.samples].to("meta"), (inputs, targets))
        with counter:
            value = one[0]
            for layer in layers:
                value = layer(value)
            self.config.loss(value, one[1]).backward()
        return float(counter.get_total_flops()) * self.micro_batches


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def subjects(names: Sequence[str], workers: int, *, small: bool) -> Iterator[Subject]:
    for name in names:
        if small:
            shape: dict[str, Any] = {"layers": 6, "hidden": 32, "heads": 2, "positions": 16, "dropout": 0.0}
            kind = BERTConfig if name == "bert-48" else GPTConfig
            yield Subject(f"{name}, small", kind(vocabulary=257, **shape), 2, 2 * workers, low=False)
        else:
            found = preset(name)
            assert isinstance(found.config, GPTConfig | BERTConfig)
            samples = 4 if name == "bert-48" else 1
            yield Subject(name, found.config, samples, 4 * workers, low=True, positions=found.sequence)


def schemes_of(workers: int, count: int) -> dict[str, dict[str, Any]]:
    """By scheme its options."""
    found: dict[str, dict[str, Any]] = {"dapple": {"stages": workers}, "zb-v": {"workers": workers}}
    if workers > 1:
        found |= {
            "interleaved": {"workers": workers, "chunks": 2},
            "hanayo": {"workers": workers, "waves": 2},
        }
    if workers % 2 == 0:
        found |= {"chimera": {"stages": workers}}
    found |= {"pipedream-2bw": {"stages": workers}}
    return {scheme: {**options, "micro_batches": count} for scheme, options in found.items()}


# -- whether numbers are right


def verified(devices: int, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Schemes of every kind, and what is wrong with each: nothing, if they agree."""
    cases: list[tuple[cf.Schedule, int, dict[str, Any]]] = [(cf.schemes.dapple(devices, devices + 1), 1, {})]
    if devices > 1:
        half = devices // 2
        cases += [
            (cf.schemes.interleaved(devices, devices, chunks=2), 1, {"recompute": "stage"}),
            (cf.schemes.zb_v(devices, devices + 1), 1, {}),
            (cf.schemes.hanayo(devices, devices, waves=2), 1, {"barrier": False, "clip_norm": None}),
            (cf.schemes.pipedream(devices), 1, {}),
        ]
        if devices % 2 == 0:
            cases += [
                (cf.schemes.chimera(devices, devices + 1), 1, {}),
                (
                    cf.schemes.chimera(devices, 2 * devices, concat="forward-doubling"),
                    1,
                    {"recompute": "layer"},
                ),
                (cf.schemes.dapple(half, half + 1), 2, {"sync": "eager"}),
                (cf.schemes.pipedream_2bw(half, half + 1), 2, {}),
            ]
    for schedule, replicas, options in cases:
        name = f"{schedule}, {replicas} replica{'s' if replicas > 1 else ''} {options or ''}".rstrip()
        steps = 3 if schedule.synchronous else 8
        try:
            trial = small_trial(schedule, replicas=replicas, steps=steps)
            where: dict[str, Any] = {"transport": "nccl", "device": "cuda"} if on_gpu else {}
            found = trial.verify(**(where or {"transport": "strict-nccl"}), **options)
            yield name, "" if found.ok else str(found)
        except (cf.CounterflowError, RuntimeError) as error:
            yield name, f"{type(error).__name__}: {error}"


# -- how quick and how large


class Ours:
    def __init__(self, subject: Subject, scheme: str, options: dict[str, Any], cuts: Any) -> None:
        self.pipeline = cf.Pipeline(
            subject.layers(),
            subject.config.loss,
            registry.build(scheme, options),
            optimizer=adamw,
            cuts=cuts,
            autocast=torch.bfloat16 if subject.low else None,
            count_memory_steps=WARM_UP,
            digest_every=0,
        )
        self.batch = subject.batch()

    def step(self) -> None:
        self.pipeline.step(*self.batch)

    def close(self) -> None:
        self.pipeline.close()

    def bytes(self) -> int:
        return self.pipeline.peak_saved_bytes


class Cast(nn.Sequential):
    """Layers in bf16 where torch deems it safe."""

    def __init__(self, layers: Sequence[nn.Module], device: str, *, low: bool) -> None:
        super().__init__(*layers)
        self.device, self.low = device, low

    def forward(self, *given: Any) -> Any:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.low):
            return super().forward(given if len(given) > 1 else given[0])


class Theirs:
    """Torch's own: 1F1B, or ZB-V, whose workers hold two stages each."""

    def __init__(self, subject: Subject, kind: str, device: torch.device) -> None:
        transport = current_transport()
        rank, workers = transport.rank, transport.world_size
        stages = workers if kind == "1F1B" else 2 * workers
        held = [rank] if kind == "1F1B" else [rank, stages - 1 - rank]
        torch.manual_seed(0)
        layers = subject.layers("cpu")
        edges = [0, *balance(estimated_costs(layers), stages), len(layers)]
        made = [Cast(layers[edges[s] : edges[s + 1]], device.type, low=subject.low).to(device) for s in held]
        built = [theirs.PipelineStage(m, s, stages, device) for m, s in zip(made, held, strict=True)]
        count = subject.micro_batches
        inputs, targets = subject.batch()
        loss = subject.config.loss
        if isinstance(targets, tuple):  # torch cuts one tensor
            targets = torch.cat([targets[0], targets[1][:, None]], 1)
            loss = partial(_of_both, loss)
        self.schedule: Any = (
            theirs.Schedule1F1B(built[0], count, loss_fn=loss)
            if kind == "1F1B"
            else theirs.ScheduleZBVZeroBubble(built, count, loss_fn=loss)
        )
        self.optimizer = adamw([parameter for module in made for parameter in module.parameters()])
        self.first, self.last = 0 in held, stages - 1 in held
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        self.inputs, self.targets = [tensor.to(device) for tensor in given], targets.to(device)

    def step(self) -> None:
        given = self.inputs if self.first else ()
        told: dict[str, Any] = {"target": self.targets, "losses": []} if self.last else {}
        self.schedule.step(*given, return_outputs=False, **told)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        return

    def bytes(self) -> int:
        return 0


def _of_both(loss: Callable[[Any, Any], torch.Tensor], output: Any, target: torch.Tensor) -> torch.Tensor:
    return loss(output, (target[:, :-1], target[:, -1]))


def timed(make: Callable[[], Ours | Theirs], steps: int) -> tuple[float, list[int]]:
    """The time of a step, and what each worker's memory held at most."""
    transport = current_transport()
    on_gpu = transport.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    contender = make()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        transport.gather([])

    for _ in range(WARM_UP):
        contender.step()
    taken = []
    for _ in range(steps):
        wait()
        begin = time.perf_counter()
        contender.step()
        wait()
        taken.append(time.perf_counter() - begin)
    mine = torch.cuda.max_memory_allocated() if on_gpu else contender.bytes()
    found = [int(row[0]) for row in transport.gather([float(mine)])]
    contender.close()
    return statistics.median(taken), found


def work(subject: Subject, wanted: dict[str, tuple[dict[str, Any], Any]], steps: int) -> dict[str, Any]:
    """What each worker runs: by contender its time and memory, or what went wrong on this worker."""
    transport = current_transport()
    found: dict[str, Any] = {}
    for name, (options, cuts) in wanted.items():
        theirs_is = name.removeprefix("torch ")
        make = (
            partial(Ours, subject, name, options, cuts)
            if theirs_is == name
            else partial(Theirs, subject, theirs_is, transport.device)
        )
        try:
            found[name] = timed(make, steps)
        except Exception as error:
            if theirs_is == name:
                raise
            found[name] = f"{type(error).__name__}: {error}"  # torch's may not run with one rank
        gc.collect()
    return found


def predicted(subject: Subject, workers: int) -> tuple[Measurement | None, str]:
    """The profile of a model on this machine, or why there is none."""
    config = subject.config
    family = "bert" if isinstance(config, BERTConfig) else "gpt"
    sets = [
        f"model.kind={family}",
        *(
            f"model.{n}={getattr(config, n)}"
            for n in ("layers", "hidden", "heads", "positions", "vocabulary")
        ),
        "model.dropout=0.0",
        "optimizer.name=adamw",
        *(["pipeline.autocast=bfloat16"] if subject.low else []),
    ]
    try:
        return measure(load_config(None, sets), sizes=(subject.samples,), workers=workers), ""
    except (cf.CounterflowError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}"


def speed(
    subject: Subject, workers: int, steps: int, peak: float | None, *, on_gpu: bool, together: bool = False
) -> list[Row]:
    """Rows of all contenders; ``together``: in one launch, which is quicker and ends at the first error."""
    profiled, why = predicted(subject, workers)
    rows, wanted = {}, {}
    for scheme, options in schemes_of(workers, subject.micro_batches).items():
        row = rows[scheme] = Row(subject.name, scheme, workers)
        cuts = None
        if profiled is not None:
            try:
                predictor = Predictor(profiled.model, profiled.profile, profiled.cluster)
                configuration = Configuration.of(scheme, options, replicas=1, samples=subject.samples)
                prediction = predictor.predict(configuration)
                row.predicted_seconds = prediction.step_seconds
                row.predicted_bytes = list(prediction.peak_bytes)
                cuts = prediction.configuration.cuts
            except cf.CounterflowError as error:
                row.failed = f"predicting: {error}"
        else:
            row.failed = f"profiling: {why}"
        wanted[scheme] = options, cuts
    if workers > 1 or together:
        wanted |= {"torch 1F1B": ({}, None), "torch ZB-V": ({}, None)}
    flops = subject.flops()
    samples = subject.samples * subject.micro_batches
    found = started(subject, wanted, steps, workers, on_gpu=on_gpu) if together else {}
    for name, how in wanted.items():  # each by itself: what fails takes nothing with it
        value = found.get(name) or started(subject, {name: how}, steps, workers, on_gpu=on_gpu)[name]
        row = rows.setdefault(name, Row(subject.name, name, workers))
        if isinstance(value, str):
            row.failed = "; ".join(filter(None, (row.failed, value)))
            continue
        row.seconds, row.peak_bytes = value
        row.samples_per_second = samples / row.seconds
        row.mfu = flops / row.seconds / workers / peak if peak else None
    return list(rows.values())


def started(
    subject: Subject, wanted: dict[str, Any], steps: int, workers: int, *, on_gpu: bool
) -> dict[str, Any]:
    try:
        return cf.launch(
            *(work, subject, wanted, steps),
            workers=workers,
            transport="nccl" if on_gpu else "gloo",
            device="cuda" if on_gpu else "cpu",
        )[0]
    except (cf.CounterflowError, RuntimeError) as error:
        return dict.fromkeys(wanted, f"{type(error).__name__}: {error}")


# -- the report


def about() -> dict[str, Any]:
    """The machine, how its devices are connected, and NCCL's variables."""
    found = one_gpu.about_machine()
    if torch.cuda.is_available():
        try:
            shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
            found["topology"] = shown.stdout
        except OSError:
            found["topology"] = "no nvidia-smi"
    found["environment"] = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_"))}
    return found


def table(rows: Sequence[Row]) -> str:
    heads = f"{'step':>9} {'predicted':>9} {'samples/s':>9} {'MFU':>6} {'memory':>9}"
    lines = [f"{'model':<16} {'contender':<16} {heads}"]
    for row in rows:
        if row.failed and not row.seconds:
            lines.append(f"{row.model:<16} {row.name:<16} FAILED: {row.failed.splitlines()[0]}")
            continue
        expected = f"{row.predicted_seconds * 1e3:7.1f}ms" if row.predicted_seconds else "-"
        used = f"{row.mfu:6.1%}" if row.mfu else "-"
        most = f"{max(row.peak_bytes) / 2**20:6.1f}MiB" if any(row.peak_bytes) else "-"
        lines.append(
            f"{row.model:<16} {row.name:<16} {row.seconds * 1e3:7.1f}ms {expected:>9} "
            f"{row.samples_per_second:9.1f} {used:>6} {most:>9}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--one-gpu", action="store_true", help="the programme for one GPU, in eight minutes")
    parser.add_argument("--pretend", action="store_true", help="with --one-gpu: rehearse it on CPUs")
    parser.add_argument("--thin", type=int, default=1, help="with --pretend: run each so-many-th case")
    parser.add_argument("--devices", default="1,2,4,8", help="numbers of devices to verify on")
    parser.add_argument(
        "--parts", help="verify,speed; with --one-gpu: " + ",".join(p.name for p in one_gpu.PARTS)
    )
    parser.add_argument("--models", default="gpt-2,bert-48")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float, help="of a device, in bf16; by default by its name")
    parser.add_argument("--small", action="store_true", help="small models on the CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    given = parser.parse_args()
    if given.one_gpu:
        if not (given.pretend or torch.cuda.is_available()):
            parser.error("torch finds no GPU here; rehearse with --pretend")
        parts = (given.parts or ",".join(part.name for part in one_gpu.PARTS)).split(",")
        unknown = {*parts} - {part.name for part in one_gpu.PARTS}
        if unknown:
            parser.error(f"--parts: there is no {min(unknown)}")
        return one_gpu.run(parts, given.out, pretend=given.pretend, thin=given.thin)
    given.parts = given.parts or "verify,speed"
    on_gpu = torch.cuda.is_available() and not given.small
    there = torch.cuda.device_count() if on_gpu else 2
    found: dict[str, Any] = {"machine": about(), "on_gpu": on_gpu, "verify": {}, "speed": []}
    if not on_gpu:
        print("No GPU is used: small sizes on the CPU, whose numbers say nothing of GPUs.")
    failures = 0
    if "verify" in given.parts.split(","):
        for devices in (int(n) for n in given.devices.split(",")):
            if devices > there:
                continue
            for name, wrong in verified(devices, on_gpu=on_gpu):
                found["verify"][f"{devices}: {name}"] = wrong or "agrees"
                failures += bool(wrong)
                print(
                    f"{devices} devices  {name}: {wrong.splitlines()[0] if wrong else 'agrees'}", flush=True
                )
    if "speed" in given.parts.split(","):
        known = peak_of(torch.cuda.get_device_name(0)) if on_gpu else None
        peak = given.peak_tflops * 1e12 if given.peak_tflops else known
        rows: list[Row] = []
        for subject in subjects(given.models.split(","), there, small=not on_gpu):
            try:
                rows += speed(subject, there, given.steps, peak, on_gpu=on_gpu)
            except (cf.CounterflowError, RuntimeError):
                rows.append(Row(subject.name, "all", there, failed=traceback.format_exc()))
        found["speed"] = [asdict(row) for row in rows]
        failures += sum(bool(row.failed) for row in rows)
        print(table(rows))
    given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"\n{failures} failed. The report is in {given.out}; docs/gpus.md says where it goes.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
