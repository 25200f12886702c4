"""Models of experts of transformers, in two stages by two positions, compared with one process: ``five``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import counterflow as cf

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "use_cache": False, "num_experts_per_tok": 2, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": None,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "GptOss": {
        "num_local_experts": 4, "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Olmoe": {"num_experts": 4},
}  # fmt: skip


def model_of(kind: str) -> Any:
    """A small model in float64, whose routers decide clearly."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.set_experts_implementation("eager")  # others have no float64
    for parameter in model.parameters():
        if parameter.dim() == 3 or parameter.shape[0] == 4:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def tokens() -> tuple[Tensor, Tensor]:
    """Eight texts and labels, which transformers shifts, some of them ignored."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 64, (8, 10), generator=generator)
    labels = texts.clone()
    labels[0, 4:] = -100
    return texts, labels


def one_process(kind: str, steps: int) -> list[tuple[float, float]]:
    model, (texts, labels), result = model_of(kind), tokens(), []
    optimizer = adamw(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cf.models.hf.loss(model(texts), labels)
        value = loss.sum / loss.weight
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        result.append((value.item(), norm.item()))
    return result


def five() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "worker", "ep"))
    for kind in MODELS:
        for fully_shard in ("", "ep"):
            parallelize = cf.ExpertParallel("ep", fully_shard=fully_shard or ())
            pipeline = cf.Pipeline(
                cf.models.hf.layers(model_of(kind)), cf.models.hf.loss, cf.schemes.dapple(2, 2),
                optimizer=adamw, mesh=mesh, parallelize=parallelize, clip_norm=0.1, digest_every=1,
            )  # fmt: skip
            with pipeline:
                divided = sum(row.contents.get("ep") == "expert" for row in pipeline.explain().rows)
                assert divided == {"DeepseekV3": 1}.get(kind, 2), kind  # its first block has no experts
                mine = [tensor.chunk(2)[pipeline.replica] for tensor in tokens()]
                for expected in one_process(kind, 2):
                    step = pipeline.step(*mine)
                    actual = step.loss, step.grad_norm
                    # their routers and norms compute in float32
                    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=kind)
