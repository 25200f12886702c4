"""Profiles on this machine: a GPT by ``counterflow profile``, layers of Llama and experts by its parts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.execution import Execution
from counterflow.measure.model_profile import INPUTS, Description, measure_model
from counterflow.measure.subject_pipeline import Subject, same
from counterflow.models.loss import next_token_loss
from counterflow.planning.inputs import input_files
from one_gpu import Report
from one_gpu.host import LlamaBlock

LEAST_SECONDS = 15.0
"""Time without which no profile is begun."""

GPT = ("model.layers=4", "model.hidden=1024", "model.heads=16", "model.positions=512", "model.dropout=0.0")
SMALL_GPT = ("model.layers=2", "model.hidden=32", "model.heads=2", "model.positions=16", "model.dropout=0.0")


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.tokens(tokens)
        return found


class Experts(nn.Module):
    """A block whose feed-forward part is the best two of several experts for each token."""

    def __init__(self, hidden: int, heads: int, experts: int, between: int) -> None:
        super().__init__()
        self.attention = LlamaBlock(hidden, heads, heads, hidden)
        self.norm, self.router = nn.RMSNorm(hidden), nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden, between, bias=False), nn.SiLU(), nn.Linear(between, hidden, bias=False)
            )
            for _ in range(experts)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = self.attention(x_BLD)
        y_ND = self.norm(x_BLD).flatten(0, 1)
        weights, chosen = self.router(y_ND).softmax(-1).topk(2, -1)
        total = torch.zeros_like(y_ND)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            rows = weight.squeeze(-1).nonzero().squeeze(-1)
            total = total.index_add(0, rows, expert(y_ND[rows]) * weight[rows])
        return x_BLD + total.view_as(x_BLD)


def model_of(name: str, *, small: bool) -> tuple[list[nn.Module], int, int]:
    """Layers on the meta device, vocabulary and positions."""
    hidden, heads, between, vocabulary = (32, 4, 48, 61) if small else (2048, 16, 8192, 8192)
    positions = 16 if small else 1024
    with torch.device("meta"):
        blocks: list[nn.Module] = (
            [LlamaBlock(hidden, heads, heads // 4, between) for _ in range(2)]
            if name == "llama"
            else [Experts(hidden, heads, 8, between // 4) for _ in range(2)]
        )
        head = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False))
        return [Embedding(vocabulary, hidden), *blocks, head], vocabulary, positions


def tokens(vocabulary: int, positions: int, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    drawn = torch.randint(vocabulary, (samples, positions), generator=torch.Generator().manual_seed(0))
    return drawn, drawn


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def surveyed(report: Report, name: str) -> tuple[str, str, dict[str, Any]]:
    """Measure a model's layers, as ``counterflow profile`` does, and keep both files."""
    layers, vocabulary, positions = model_of(name, small=report.pretend)
    execution = Execution(digest_every=0, autocast=None if report.pretend else "bfloat16")
    subject = Subject(layers, next_token_loss, adamw, partial(tokens, vocabulary, positions), 0, execution)
    sizes, repeats = ((1,), 1) if report.pretend else ((1, 2, 4), 3)
    measurement = measure_model(
        partial(same, subject),
        Description(f"{name} layers", "AdamW", "benchmarks/one_gpu/profile.py"),
        sizes=sizes,
        workers=1,
        repeats=repeats,
    )
    texts = {f"{part}.toml": input_files.dumps(getattr(measurement, part)) for part in INPUTS}
    return "measured", f"{name} layers, {len(layers)} layers", {"files": texts}


def profiled(report: Report) -> tuple[str, str, dict[str, Any]]:
    """Run the command for a GPT, and keep its three files."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "counterflow", "profile", "--out", folder, "--workers", "1"]
        command += ["--sizes", "1" if report.pretend else "1,2,4,8,16"]
        command += ["--repeats", "1" if report.pretend else "3"]
        sets = SMALL_GPT if report.pretend else (*GPT, "pipeline.autocast=bfloat16")
        command += [part for each in sets for part in ("--set", each)]
        limit = max(1.0, report.left())
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        if run.returncode:
            return "failed", (run.stderr or run.stdout)[-1500:], {}
        texts = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}
    return "measured", ", ".join(sorted(texts)), {"files": texts}


def rows(report: Report) -> None:
    """A row for each model."""
    every: list[tuple[str, Callable[[], Any]]] = [
        ("GPT", partial(profiled, report)),
        ("Llama", partial(surveyed, report, "llama")),
        ("experts", partial(surveyed, report, "experts")),
    ]
    for name, run in every:  # all of them in a rehearsal, too
        if report.left() > LEAST_SECONDS:
            report.case(name, run)
        else:
            report.add(name, "not available", "no time was left")
