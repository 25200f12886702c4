"""Models of experts of transformers, in two stages by two positions: compared with one process (``five``),
read from folders and written to them (``files``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import counterflow as cf
from counterflow.models.hf.file_forms import StoredWeight

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


def numbers_read(patch: pytest.MonkeyPatch) -> list[int]:
    """List that gets the number of numbers of each tensor of experts that is read from now on."""
    counts: list[int] = []
    read = StoredWeight.read

    def counted(weight: StoredWeight, load: Any, rows: slice) -> Tensor:
        def noting(name: str, part: slice) -> Tensor:
            tensor: Tensor = load(name, part)
            counts.append(tensor.numel() if ".experts." in name else 0)
            return tensor

        return read(weight, noting, rows)

    patch.setattr(StoredWeight, "read", counted)
    return counts


def saved_as_loaded(folder: Path, state: dict[str, Tensor]) -> None:
    """``from_pretrained`` of a folder has a state bit for bit, and its logits; its index is right."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    again = type(model)(model.config).eval()
    again.load_state_dict(state)
    assert torch.equal(model(tokens()[0]).logits, again(tokens()[0]).logits)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, part in tensors.items() for name in part}
    size = sum(tensor.nbytes for part in tensors.values() for tensor in part.values())
    assert index["metadata"]["total_size"] == size
    model.save_pretrained(folder / "again")  # transformers writes the same names
    assert index["weight_map"].keys() == load_file(folder / "again" / "model.safetensors").keys()


def files() -> None:
    """A position reads its experts and no others, and writes them; other layouts read what was written."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "worker", "ep"))
    both = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=("replica", "worker", "shard", "ep"))
    none = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replica", "worker"))
    layouts: list[tuple[Any, Any, Any]] = [
        (both, cf.schemes.dapple(1, 2), cf.ExpertParallel("ep", fully_shard=("shard", "ep"))),
        (mesh, cf.schemes.zb_v(2, 4), cf.ExpertParallel("ep", fully_shard="ep")),
        (none, cf.schemes.dapple(4, 2), None),
    ]
    first = torch.distributed.get_rank() == 0
    for kind in MODELS:
        folders = [tempfile.mkdtemp() if first else ""]
        torch.distributed.broadcast_object_list(folders)
        folder, model = Path(folders[0]), model_of(kind).float()
        state: dict[str, Tensor] = model.state_dict()
        if first:
            model.save_pretrained(folder, max_shard_size="10KB")
        torch.distributed.barrier()
        for layout, schedule, parallelize in layouts:
            with pytest.MonkeyPatch.context() as patch:
                counts = numbers_read(patch)
                pipeline = cf.Pipeline(
                    cf.models.hf.load(folder), cf.models.hf.loss, schedule, optimizer=adamw,
                    list_layers=cf.models.hf.layers, mesh=layout, parallelize=parallelize,
                )  # fmt: skip
            with pipeline:
                torch.testing.assert_close(pipeline.model_state_dict(), state, rtol=0, atol=0)
                with pipeline.local_weights() as weights:
                    experts = [v for (name, *_), v in weights.items() if ".experts." in name]
                assert sum(counts) == sum(v.numel() for v in experts) // (2 if parallelize else 1)
                pipeline.ema(0.5)
                pipeline.step(*(tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in tokens()))
                pipeline.step(*(tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in tokens()))
                cf.models.hf.save(model, pipeline, folder, ema=True)
                averages = dict(pipeline.stream_weights(ema=True))
                if first and parallelize:
                    saved_as_loaded(folder, averages)
                torch.distributed.barrier()
                state = pipeline.model_state_dict()
                cf.models.hf.save(model, pipeline, folder)
                streamed = dict(pipeline.stream_weights())
                if first:
                    torch.testing.assert_close(streamed, state, rtol=0, atol=0)
                    assert any(not torch.equal(averages[name], state[name]) for name in state)
                    if parallelize:
                        saved_as_loaded(folder, state)
                torch.distributed.barrier()
        if first:
            shutil.rmtree(folder)
