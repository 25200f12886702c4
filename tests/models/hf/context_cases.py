"""Decoders of transformers on shared sequences, in two stages, compared with one process: ``decoders``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import counterflow as cf
from counterflow.schedule.ir import Schedule

RECOMPUTE = "none", "layer", "stage"
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "use_cache": False, "attn_implementation": "sdpa", "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 5},
    "Phi3": {"pad_token_id": 0},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if kind == "Mixtral":
        model.set_experts_implementation("eager")
    return model.double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def inputs_of(form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Eight texts of 16 tokens: plain, with padding behind, or packed documents."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(2, 64, (8, 16), generator=generator)
    labels = texts.clone()
    labels[0, 4:] = -100
    inputs = {"input_ids": texts}
    if form == "padded":
        mask = torch.ones_like(texts)
        mask[1, 11:] = 0
        labels[1, 11:] = -100
        inputs["attention_mask"] = mask
    if form == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(6), torch.arange(10)]).expand(8, -1).contiguous()
    return inputs, labels


def one_process(kind: str, form: str, steps: int) -> list[tuple[float, float]]:
    model, (inputs, labels), result = model_of(kind), inputs_of(form), []
    optimizer = adamw(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cf.models.hf.loss(model(**inputs), labels)
        value = loss.sum / loss.weight
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        result.append((value.item(), norm.item()))
    return result


def decoders() -> None:
    for number, kind in enumerate(MODELS):
        for form in ("plain", "padded", "packed"):
            check(kind, form, cf.schemes.dapple(2, 2), ring=bool(number % 2))


def sliced() -> None:
    """Slices of shared sequences; Mistral's window is shorter than a slice, and than a document."""
    slices = (
        cf.schemes.dapple(stages=2, micro_batches=2, slices=2),
        cf.schemes.zb_h1(stages=2, micro_batches=2, slices=(4, 8, 4)),
    )
    for kind, schedule in zip(("Llama", "Mistral"), slices, strict=True):
        for number, form in enumerate(("plain", "padded", "packed")):
            check(kind, form, schedule, ring=bool(number % 2), recompute=RECOMPUTE[number])


def check(kind: str, form: str, schedule: Schedule, *, ring: bool, recompute: Any = "none") -> None:
    """A model's pipeline over (worker, cp) has the losses and norms of one process."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "worker", "cp"))
    pipeline = cf.Pipeline(
        cf.models.hf.layers(model_of(kind)), cf.models.hf.loss, schedule, optimizer=adamw, mesh=mesh,
        parallelize=cf.ContextParallel("cp", ring=ring, fully_shard="cp"), clip_norm=0.1, digest_every=1,
        recompute=recompute,
    )  # fmt: skip
    with pipeline:
        inputs, labels = inputs_of(form)
        shared = {name: cf.share_sequence(t, pipeline.context) for name, t in inputs.items()}
        targets = cf.share_sequence(labels, pipeline.context)
        for expected in one_process(kind, form, 2):
            evaluated = pipeline.evaluate(kwargs=shared, targets=targets).loss
            step = pipeline.step(kwargs=shared, targets=targets)
            actual = step.loss, step.grad_norm
            # their norms and rotary embeddings compute in float32
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=f"{kind} {form}")
            assert abs(evaluated - step.loss) < 1e-6
