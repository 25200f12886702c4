"""Folders of what a pipeline has trained, as transformers and peft read it."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import counterflow as cf
from counterflow.models import hf
from counterflow.schedule.ir import Schedule

from . import tiny


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def trained(model: nn.Module, schedule: Schedule, batches: Any, folder: Path, **options: Any) -> Any:
    pipeline = cf.Pipeline(model, hf.loss, schedule, optimizer=adamw, list_layers=hf.layers, **options)
    losses = [pipeline.step(*mini_batch).loss for mini_batch in batches]
    hf.save(model, pipeline, folder)
    return losses, pipeline.model_state_dict()


def launched(model: nn.Module, schedule: Schedule, batches: Any, folder: Path, **options: Any) -> Any:
    return cf.launch(
        trained,
        model,
        schedule,
        batches,
        folder,
        workers=schedule.workers,
        transport="local",
        timeout_seconds=60,
        **options,
    )[0]


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "gemma2", "bert", "mixtral", "bert-classes"])
@pytest.mark.parametrize("schedule", [cf.schemes.chimera(2, 2), cf.schemes.dapple(1, 2)], ids=str)
def test_from_pretrained_reads_what_the_pipeline_has(name: str, schedule: Schedule, tmp_path: Path) -> None:
    """Also in a folder that had another model, in other files."""
    model = tiny.made(name)
    model.save_pretrained(tmp_path, max_shard_size="10KB" if schedule.workers == 1 else "5GB")
    _, state = launched(model, schedule, [tiny.batch(name)], tmp_path)
    read, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = read.state_dict()
    assert list(weights) == list(state)
    for key, tensor in state.items():
        assert torch.equal(weights[key], tensor), key
        assert weights[key].dtype is tensor.dtype
    first = next(iter(state.values()))
    assert torch.equal(first, next(model.parameters()))  # the threads trained the model they were given
    assert not torch.equal(first, next(tiny.made(name).parameters()))
    assert len(list(tmp_path.glob("*.safetensors"))) == schedule.workers


def names_in(folder: Path) -> list[str]:
    """The names of the tensors in a folder's files."""
    return sorted(name for file in folder.glob("*.safetensors") for name in load_file(file))


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bert"])
def test_of_tied_weights_the_name_is_written_that_transformers_writes(name: str, tmp_path: Path) -> None:
    model = tiny.made(name)
    model.save_pretrained(tmp_path / "expected")
    launched(model, cf.schemes.chimera(2, 2), [], tmp_path / "found")
    written = names_in(tmp_path / "found")
    assert written == names_in(tmp_path / "expected")
    assert len(written) < len(model.state_dict())  # the model ties some


def with_lora(model: Any, **options: Any) -> Any:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"], **options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        with torch.device(model.device):
            return peft.get_peft_model(model, config).train()


def alone(model: nn.Module, batches: Any) -> list[float]:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "schedule", "recompute", "lora"),
    [
        ("llama", cf.schemes.dapple(2, 4), "none", {}),
        ("llama-tied", cf.schemes.dapple(2, 4), "layer", {}),
        ("llama", cf.schemes.chimera(2, 4), "stage", {"init_lora_weights": "gaussian"}),
        ("llama-tied", cf.schemes.hanayo(2, 4, waves=1), "none", {}),
        ("llama", cf.schemes.interleaved(2, 4, chunks=2), "none", {"modules_to_save": ["lm_head"]}),
    ],
    ids=str,
)
def test_adapters_train_as_in_one_process(
    name: str, schedule: Schedule, recompute: Any, lora: dict[str, Any], tmp_path: Path
) -> None:
    model = with_lora(tiny.made(name), **lora)
    before, expected = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    batches = [tiny.batch(name, seed=seed) for seed in range(3)]
    losses, state = launched(model, schedule, batches, tmp_path, recompute=recompute)
    assert losses == pytest.approx(alone(expected, batches), rel=1e-5)
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-5, msg=key)
        trains = "lora_" in key or "modules_to_save" in key
        assert trains or torch.equal(state[key], before[key]), key
    read = peft.PeftModel.from_pretrained(tiny.made(name), tmp_path)
    weights = read.state_dict()
    assert set(weights) == set(state)
    for key, tensor in state.items():
        assert torch.equal(weights[key], tensor), key


def checkpointed(name: str, when: str, *, reentrant: bool) -> nn.Module:
    """A model with adapters whose layers are computed again by torch's own checkpoints."""
    base, how = tiny.made(name), {"use_reentrant": reentrant}
    if when == "before":
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    model: Any = with_lora(base, init_lora_weights=False)
    if when == "after":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return model  # type: ignore[no-any-return]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a forward that runs again later
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_with_gradient_checkpointing(when: str, reentrant: bool) -> None:
    """The embeddings' output is made to require a gradient, which nobody's weight is.

    Each case has every second pair of a recomputation and a schedule; all have each of both.
    """
    batches = [tiny.batch("llama", seed=seed) for seed in range(2)]
    turn = reentrant + (when == "after")
    pairs = itertools.product(enumerate(["none", "stage", "layer"]), enumerate(CHECKPOINTED))
    ways = [(how, schedule) for (i, how), (j, schedule) in pairs if (i + j + turn) % 2]

    def work() -> list[Any]:
        return [
            tiny_trained(checkpointed("llama", when, reentrant=reentrant), schedule, batches, recompute)
            for recompute, schedule in ways
        ]

    expected = checkpointed("llama", when, reentrant=reentrant)
    expected_losses = alone(expected, batches)
    (result, _) = cf.launch(work, workers=2, transport="local", timeout_seconds=60)
    for way, (losses, state) in zip(ways, result, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-5), way
        for key, tensor in expected.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-5, msg=f"{way}: {key}")


CHECKPOINTED = [
    cf.schemes.dapple(2, 4),
    cf.schemes.chimera(2, 4),
    cf.schemes.hanayo(2, 4, waves=1),
    cf.schemes.zb_v(2, 4),
]


def tiny_trained(model: nn.Module, schedule: Schedule, batches: Any, recompute: Any) -> Any:
    """Losses, and the weights at the end."""
    with cf.Pipeline(
        model, hf.loss, schedule, optimizer=adamw, list_layers=hf.layers, recompute=recompute
    ) as pipeline:
        return [pipeline.step(*mini_batch).loss for mini_batch in batches], pipeline.model_state_dict()


def test_adapters_on_the_meta_device(tmp_path: Path) -> None:
    """The base is read, the adapters are made by peft's rules: they change nothing at first."""
    model = tiny.made("llama")
    model.save_pretrained(tmp_path / "base")
    lora = with_lora(hf.load(tmp_path / "base"))
    batches = [tiny.batch("llama", seed=seed) for seed in range(2)]
    losses, state = launched(lora, cf.schemes.dapple(2, 2), batches, tmp_path / "adapter")
    expected = model(**batches[0][0], labels=batches[0][1]).loss.item()
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[1] != pytest.approx(losses[0])
    read = peft.PeftModel.from_pretrained(tiny.made("llama"), tmp_path / "adapter")
    for key, tensor in read.state_dict().items():
        assert torch.equal(state[key], tensor), key
    assert 0.01 < state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].std() < 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
            "PROMPT_TUNING, which changes",
        ),
        (peft.LoraConfig(init_lora_weights="olora", target_modules=["q_proj"]), "init_lora_weights='olora'"),
    ],
)
def test_adapters_that_a_pipeline_cannot_have_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    model = tiny.made("llama")
    model.save_pretrained(tmp_path)
    prompts = "Prompt" in type(config).__name__
    base = model if prompts else hf.load(tmp_path)
    with torch.device(base.device):
        adapted = peft.get_peft_model(base, config).train()
    with pytest.raises(cf.ConfigError, match=message):
        hf.layers(adapted)
