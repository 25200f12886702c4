"""LoRA by peft with gradient checkpointing: one process against every scheme and recomputation.

Every way to enable checkpointing (reentrant or not, before or after ``get_peft_model``, or not at all) times
the pipeline's recomputation times schedules of four kinds. Losses, gradient norms and adapters of two steps
in double precision are compared with those of one process that trains the very same model.

    python benchmarks/adapters_checkpointed.py > benchmarks/results/adapters_checkpointed.txt
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import counterflow as cf
from counterflow.models import hf

STEPS = 2
LIMIT = 2e-6
"""Of errors: transformers computes losses in single precision."""
RECOMPUTE = ("none", "stage", "layer")
SCHEDULES = (
    cf.schemes.dapple(2, 4),
    cf.schemes.chimera(2, 4),
    cf.schemes.hanayo(2, 4, waves=1),
    cf.schemes.zb_h1(2, 4),
    cf.schemes.zb_v(2, 4),
)
WAYS: tuple[tuple[bool, str] | None, ...] = (None, *itertools.product((True, False), ("before", "after")))
"""``use_reentrant``, and whether it is enabled before or after ``get_peft_model``; None: not at all."""


def made(way: tuple[bool, str] | None) -> nn.Module:
    """The same small Llama with adapters at every call, in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24}
        config = transformers.LlamaConfig(num_hidden_layers=4, num_attention_heads=2, **sizes)
        model: Any = transformers.LlamaForCausalLM(config).double()
        options = {"use_reentrant": way[0]} if way is not None else {}
        if way is not None and way[1] == "before":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora).double().train()
        if way is not None and way[1] == "after":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model  # type: ignore[no-any-return]


def batch(step: int) -> Tensor:
    """Token ids, which are their own labels."""
    return torch.randint(3, 61, (8, 6), generator=torch.Generator().manual_seed(step))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Without adapters there is nothing to update."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, eps=1e-4)


def alone(way: tuple[bool, str] | None) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms of one process, and its weights at the end."""
    model = made(way)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, told = adamw(trained), []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told, model.state_dict()


def piped(
    way: tuple[bool, str] | None, schedule: Any, recompute: str
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same by a pipeline."""
    with cf.Pipeline(
        made(way), hf.loss, schedule, optimizer=adamw, list_layers=hf.layers, recompute=recompute
    ) as pipeline:
        steps = [pipeline.step(batch(step), batch(step)) for step in range(STEPS)]
        return [(step.loss, step.grad_norm) for step in steps], pipeline.model_state_dict()


def error(way: tuple[bool, str] | None, schedule: Any, recompute: str) -> float:
    """The largest relative error of losses, norms and weights."""
    told, state = alone(way)
    ((found, after), *_) = cf.launch(
        piped, way, schedule, recompute, workers=2, transport="local", timeout_seconds=60
    )
    as_told = torch.tensor((found, told), dtype=torch.float64)
    pairs = [(as_told[0], as_told[1]), *((after[name], state[name]) for name in state)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def main() -> int:
    """Run all and print the table.

    Returns:
        1 if anything was refused or is off by more than rounding, else 0.
    """
    warnings.simplefilter("ignore")
    for name in ("transformers", "counterflow"):  # which says that a checkpoint's backward is not split
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    bad = 0
    print(f"{'checkpointing':24s}{'recompute':12s}{'schedule':60s}largest relative error")
    for way, recompute, schedule in itertools.product(WAYS, RECOMPUTE, SCHEDULES):
        name = "none" if way is None else f"{'' if way[0] else 'not '}reentrant, {way[1]}"
        try:
            found = error(way, schedule, recompute)
            told, wrong = f"{found:.1e}", not found <= LIMIT
        except (cf.ConfigError, cf.WorkerError) as refused:
            told, wrong = f"{type(refused).__name__}: {refused}", True
        bad += wrong
        print(f"{name:24s}{recompute:12s}{schedule!s:60s}{told}{'  WRONG' if wrong else ''}", flush=True)
    print(f"{len(WAYS) * len(RECOMPUTE) * len(SCHEDULES)} runs, {bad} refused or wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
