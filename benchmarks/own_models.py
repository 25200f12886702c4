"""Models of users, planned without glue: the plan's step and memory against those of the run.

    python benchmarks/own_models.py [--workers 4] [--models unet llama ...] [--minutes 45] [--keep]

Claims: every model that can be cut is measured and planned from the model, its loss and one mini-batch, with
nothing else; the planned step is off by 7 % in the median and 15 % at most, the planned memory by 5 %.

Four models stand here as a user would write them: a U-Net, a ResNet with batch norms, a sparse mixture of
experts with a balance loss, a Llama from its config. The others are those that ``captured.py`` finds layers
of, of the packages that are installed, some of each package in turn; their loss is the mean square of their
outputs, whatever structure these have.

For each, processes of this machine run ``cf.Pipeline(model, loss, "auto", example=...)`` with an empty cache
of profiles, then steps of the planned pipeline, of which the quieter half counts (the mean of it). The cores
of a virtual machine run at 0.6 of their speed for seconds or minutes (``machine_speed.py``), so the planned
step is also told at the speed that the cores had during the steps; a model whose profile or steps saw the
speed change is measured again, up to three times. Memory is that of the fullest worker: planned from the
profile, counted without a step by ``Pipeline.memory``, and measured as in ``memory.py``, in steps of the same
plan. The minutes beside them are those of everything: processes, capture, measuring, planning, and both runs.

After ``--minutes`` no further model begins, and the table says how many are left out.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import captured
import torch
from kit import RESULTS, arguments, keep, machine, machine_line
from machine_speed import MachineSpeed
from memory import peak_of_steps
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, max_pool2d, mse_loss, silu
from torch.utils import _pytree as pytree

import counterflow as cf

SAMPLES = 16
"""Samples of a mini-batch."""

WARM_UP = 3
"""Steps that are not timed."""

STEADY = 1.15
"""Spread of the cores' speed up to which it is steady."""

ATTEMPTS = 3
"""Maximum number of measurements of a model."""

CAPTURED = 20
"""Number of models of ``captured.py``."""

Parts = tuple[nn.Module, Callable[[Any, Any], Tensor], tuple[Any, Any]]
"""Model, loss and example."""


class Double(nn.Module):
    """Two convolutions with a group norm."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Output of both."""
        return silu(self.second(silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Three levels with long skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(Double(3 * a, a) for a in sizes[-2::-1])
        self.larger, self.head = nn.Upsample(scale_factor=2), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the model."""
        saved = []
        for number, block in enumerate(self.down):
            x = block(max_pool2d(x, 2) if number else x)
            saved.append(x)
        saved.pop()
        for block in self.up:
            x = block(torch.cat([self.larger(x), saved.pop()], 1))
        return torch.as_tensor(self.head(x))


class Residual(nn.Module):
    """A ResNet with batch norms and in-place activations."""

    def __init__(self, width: int = 32, blocks: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = (x + block(x)).relu_()
        return torch.as_tensor(self.head(x.mean((2, 3))))


class Experts(nn.Module):
    """A residual mixture of four experts, of which each token uses the likeliest, with a balance loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4)
        self.first = nn.Parameter(torch.randn(4, width, 2 * width) / width)
        self.second = nn.Parameter(torch.randn(4, 2 * width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        y = self.norm(x)
        shares = self.gate(y).softmax(-1)
        cf.add_loss(0.01 * shares.square().sum(-1).mean(), "balance")
        picked = shares * (shares == shares.amax(-1, keepdim=True))
        hidden = gelu(torch.einsum("stw,ewv->stev", y, self.first))
        return x + torch.einsum("stev,evw,ste->stw", hidden, self.second, picked)


def unet() -> Parts:
    x = torch.randn(SAMPLES, 3, 32, 32)
    return UNet(), mse_loss, (x, torch.randn(SAMPLES, 3, 32, 32))


def resnet() -> Parts:
    return Residual(), cross_entropy, (torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,)))


def moe() -> Parts:
    layers = [nn.Linear(16, 64), *(Experts(64) for _ in range(8)), nn.Linear(64, 16)]
    x = torch.randn(SAMPLES, 32, 16)
    return nn.Sequential(*layers), mse_loss, (x, torch.randn(SAMPLES, 32, 16))


def next_token(output: Any, labels: Tensor) -> Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama() -> Parts:
    import transformers  # noqa: PLC0415 - it takes seconds

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(3, 512, (SAMPLES, 64))
    return transformers.LlamaForCausalLM(config), next_token, (tokens, tokens)


OWN = {"unet": unet, "resnet": resnet, "moe": moe, "llama": llama}


def mean_square(output: Any, target: Tensor) -> Tensor:
    """Mean over samples of the squares of all floating outputs."""
    leaves = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    squares = [
        leaf.float().square().flatten(1).mean(1) for leaf in leaves if leaf.dim() and len(leaf) == len(target)
    ]
    return torch.stack(squares).sum(0).mean() + 0.0 * target.sum()


def captured_names() -> list[str]:
    """Models of the installed packages, of each package in turn."""
    by_package = []
    for package in captured.PACKAGES:
        with contextlib.suppress(ImportError):
            by_package.append([f"{package.__name__}.{name}" for name, _ in package()])
    longest = max(map(len, by_package), default=0)
    turns = [names[turn] for turn in range(longest) for names in by_package if turn < len(names)]
    return turns[:CAPTURED]


def parts_of(name: str) -> Parts:
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]()
    package, _, model_name = name.partition(".")
    models = {function.__name__: function for function in captured.PACKAGES}[package]
    model, batch = dict(models())[model_name]()
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model, mean_square, (batch(SAMPLES), torch.zeros(SAMPLES, 1))


@dataclass(frozen=True, slots=True)
class Run:
    """A worker's results: the plan, and its steps."""

    plan: str
    planned_seconds: float
    planned_bytes: float
    counted_bytes: float
    peak_bytes: int
    seconds: list[float]
    profiled: tuple[float, float]
    """Time at which the profile began and ended, of ``time.monotonic``."""
    stepped: tuple[float, float]
    """Time at which the timed steps began and ended."""


class Times(logging.Handler):
    """Times of the messages of ``schedule="auto"``, between the first two of which it measures."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        logging.getLogger("counterflow.auto").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note the time of a message."""
        del record
        self.seconds.append(time.monotonic())


@dataclass(frozen=True, slots=True)
class Row:
    """A model's plan against its run; ``problem`` if it could not be planned or run."""

    model: str
    minutes: float
    problem: str = ""
    plan: str = ""
    planned_seconds: float = math.nan
    measured_seconds: float = math.nan
    planned_bytes: float = math.nan
    counted_bytes: float = math.nan
    measured_bytes: float = math.nan
    speed: float = math.nan
    """Time of a fixed work during the steps over that during the profile."""
    spread: float = math.nan
    """Spread of the cores' speed in either."""

    @property
    def adjusted_seconds(self) -> float:
        """Planned seconds at the speed that the cores had during the steps."""
        return self.planned_seconds * self.speed

    def error(self, predicted: str, unit: str) -> float:
        """Relative error of a prediction."""
        return float(getattr(self, f"{predicted}_{unit}") / getattr(self, f"measured_{unit}") - 1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def work(name: str, steps: int) -> Run:
    """Plan and run a model on a worker."""
    warnings.simplefilter("ignore")
    times = Times()
    model, loss, example = parts_of(name)
    pipeline = cf.Pipeline(model, loss, "auto", example=example, optimizer=adamw)
    plan = pipeline.choice
    assert plan is not None
    for _ in range(WARM_UP):
        pipeline.step(*example)
    begin = time.monotonic()
    seconds = [pipeline.step(*example).seconds for _ in range(steps)]
    stepped = begin, time.monotonic()
    pipeline.close()
    del pipeline, model
    gc.collect()  # what goes later would go from the second run's bytes
    gc.disable()

    def make() -> cf.Pipeline:
        model, loss, _ = parts_of(name)  # its weights count
        arguments = {"cuts": plan.cuts, "execution": plan.execution, "example": example[0]}
        return cf.Pipeline(model, loss, plan.schedule, optimizer=adamw, **arguments)

    peak = peak_of_steps(make, *example)
    gc.enable()
    counting = make()
    try:
        counted = float(counting.memory(*example).peak_bytes)
    except cf.ConfigError:  # shapes depend on values, as those of routed tokens
        counted = math.nan
    counting.close()
    measured = plan.step_seconds, plan.peak_bytes, counted, peak, seconds
    profiled = (times.seconds[0], times.seconds[-1]) if times.seconds else (0.0, 0.0)
    return Run(str(plan.schedule), *measured, profiled, stepped)


def row_of(name: str, speed: MachineSpeed, *, workers: int, steps: int) -> Row:
    """The measurement of a model in which the cores' speed was steadiest."""
    rows: list[Row] = []
    while len(rows) < ATTEMPTS and not (rows and (rows[-1].problem or rows[-1].spread <= STEADY)):
        rows.append(measured_row(name, speed, workers=workers, steps=steps))
    return rows[-1] if rows[-1].problem else min(rows, key=lambda row: row.spread)


def measured_row(name: str, speed: MachineSpeed, *, workers: int, steps: int) -> Row:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["COUNTERFLOW_CACHE"] = cache
        try:
            runs = cf.launch(work, name, steps, workers=workers, transport="gloo", threads=1)
        except cf.CounterflowError as error:
            return Row(
                name,
                (time.perf_counter() - began) / 60,
                str(error).partition("\n")[0].replace(f"{RESULTS.parents[1]}/", ""),
            )
    first = runs[0]
    slowest = [max(times) for times in zip(*(run.seconds for run in runs), strict=True)]
    quieter = sorted(slowest)[: max(1, len(slowest) // 2)]
    in_profile, in_steps = speed.between(*first.profiled), speed.between(*first.stepped)
    return Row(
        *(name, (time.perf_counter() - began) / 60, "", first.plan),
        *(first.planned_seconds, statistics.fmean(quieter)),
        *(first.planned_bytes, first.counted_bytes, max(run.peak_bytes for run in runs)),
        *(in_steps.seconds / in_profile.seconds, max(in_steps.spread, in_profile.spread)),
    )


def record(row: Row) -> dict[str, Any]:
    """A row for JSON, which has no NaN."""
    values = asdict(row).items()
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values}


def line_of(row: Row) -> str:
    minutes = f"{row.minutes:.1f}"
    if row.problem:
        return f"| {row.model} | {minutes} | no: {row.problem[:120]} | | | | | | | | |"
    cells = [
        *(f"{1e3 * row.planned_seconds:.1f}", f"{1e3 * row.measured_seconds:.1f}"),
        *(f"{row.error('planned', 'seconds'):+.1%}", f"{row.speed:.2f}", f"{row.spread:.2f}"),
        f"{row.error('adjusted', 'seconds'):+.1%}",
        *(f"{row.measured_bytes / 2**20:.2f}", f"{row.error('planned', 'bytes'):+.1%}"),
        "" if math.isnan(row.counted_bytes) else f"{row.error('counted', 'bytes'):+.1%}",
    ]
    return f"| {row.model} | {minutes} | {row.plan} | {' | '.join(cells)} |"


def summary(rows: list[Row], omitted: int) -> Iterator[str]:
    run = [row for row in rows if not row.problem]
    yield f"{len(run)} of {len(rows)} models planned and run without glue; {omitted} not begun"
    for predicted, unit, name in (
        ("planned", "seconds", "planned step"),
        ("adjusted", "seconds", "planned step at the speed of the steps"),
        ("planned", "bytes", "planned memory"),
        ("counted", "bytes", "counted memory"),
    ):
        every = (abs(row.error(predicted, unit)) for row in run)
        errors = sorted(error for error in every if not math.isnan(error))
        if errors:
            yield f"{name}: off by {statistics.median(errors):.1%} in the median, {errors[-1]:.1%} at most"
    if run:
        minutes = sorted(row.minutes for row in run)
        yield (
            f"from a model to the end of its steps: {statistics.median(minutes):.1f} minutes in the median, "
            f"{minutes[-1]:.1f} at most"
        )


def main() -> None:
    parser = arguments(__doc__, "own_models.txt and .json, own_models_sharing if workers share cores")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--models", nargs="+", help="names, as in the table; by default all")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each model")
    parser.add_argument("--minutes", type=float, default=45, help="after these no model begins")
    options = parser.parse_args()
    names = options.models or [*OWN, *captured_names()]
    before, about, rows = time.perf_counter(), machine(), list[Row]()
    columns = "model", "minutes", "plan", "planned ms", "measured ms", "error", "slower", "spread", "adjusted"
    lines = [
        f"# python benchmarks/own_models.py, {options.workers} workers, {machine_line(about)}",
        "# slower: the cores during the steps, over those during the profile; adjusted: the error with it",
        "",
        f"| {' | '.join((*columns, 'MiB', 'planned', 'counted'))} |",
        "|---|--:|---|" + 9 * "--:|",
    ]
    print(*lines, sep="\n", flush=True)
    with MachineSpeed() as speed:
        for name in names:
            if time.perf_counter() - before > 60 * options.minutes:
                break
            rows.append(row_of(name, speed, workers=options.workers, steps=options.steps))
            lines.append(line_of(rows[-1]))
            print(lines[-1], flush=True)
    ends = ["", *summary(rows, len(names) - len(rows))]
    print(*ends, sep="\n")
    if options.keep:
        sharing = options.workers > (os.cpu_count() or 1)
        keep(
            "own_models_sharing" if sharing else "own_models",
            [*lines, *ends],
            {"machine": about, "rows": list(map(record, rows))},
        )


if __name__ == "__main__":
    main()
