"""Decoders of transformers with tensor parallelism by their own plans, compared with one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import counterflow as cf

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
    "use_cache": False, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
adamw = partial(torch.optim.AdamW, lr=0.01)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **(EXPERTS if "Moe" in kind else {}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    if "Moe" in kind:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def tokens() -> Tensor:
    return torch.randint(0, 32, (8, 10), generator=torch.Generator().manual_seed(1))


def one_process(kind: str, steps: int) -> list[tuple[float, float]]:
    model, texts = model_of(kind), tokens()
    optimizer, numbers = adamw(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=texts, labels=texts).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        numbers.append((loss.item(), norm.item()))
    return numbers


def decoders() -> None:
    """Qwen 3 normalises heads: its weights are the same, and each position applies them to some of the heads.
    Experts are divided over the positions of tensor parallelism.

    Losses and norms of transformers are in float32.
    """
    for kind in ("Llama", "Qwen3", "Qwen3Moe"):
        ep = 2 if kind == "Qwen3Moe" else 1
        for degrees, stages in (
            (cf.MeshDegrees(tp=2, ep=ep), 2),
            (cf.MeshDegrees(dp_shard=2, tp=2, ep=ep), 1),
        ):
            pipeline = cf.Pipeline(
                model_of(kind).train(),
                cf.models.hf.loss,
                cf.schemes.dapple(stages, 4),
                list_layers=cf.models.hf.layers,
                optimizer=adamw,
                clip_norm=0.1,
                **degrees.options(1, stages),
            )
            texts = tokens().chunk(pipeline.data.count)[pipeline.data.number]
            for expected in one_process(kind, 3):
                step = pipeline.step(texts, texts)
                torch.testing.assert_close((step.loss, step.grad_norm), expected, rtol=1e-6, atol=1e-7)
