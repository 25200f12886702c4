"""Models on the meta device: each worker makes or reads its own stages' weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import counterflow as cf
from counterflow.models import hf
from counterflow.models.hf.folder_files import INDEX
from counterflow.models.hf.weight_files import Folder
from counterflow.schedule.ir import Schedule

from ...kit import sgd
from . import tiny

ONE_FILE = ("gpt2", "llama-tied", "gemma3", "bert", "mixtral", "olmo-hybrid")
"""Those that are read from one file, too; all are from several. Files of the last two, and of DeepSeek-V4,
have each expert's weights, or convolution's, apart."""


def state_of(model: nn.Module, schedule: Schedule, **options: Any) -> dict[str, torch.Tensor]:
    pipeline = cf.Pipeline(model, hf.loss, schedule, optimizer=sgd, list_layers=hf.layers, **options)
    return pipeline.model_state_dict()


def launched(model: nn.Module, schedule: Schedule, **options: Any) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = cf.launch(
        state_of, model, schedule, workers=schedule.workers, transport="local", timeout_seconds=60, **options
    )[0]
    return result


@pytest.mark.parametrize(
    ("shards", "name"),
    [(1, name) for name in ONE_FILE] + [(3, name) for name in sorted(tiny.MODELS)],
)
def test_each_worker_reads_its_own_weights(name: str, shards: int, tmp_path: Path) -> None:
    """Also where the files have other names for them, as GPT-NeoX' head."""
    model = tiny.made(name)
    model.save_pretrained(tmp_path, max_shard_size="5GB" if shards == 1 else "10KB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    loaded = hf.load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.training
    assert all(parameter.is_meta for parameter in loaded.parameters())
    state, expected = launched(loaded, cf.schemes.dapple(2, 2)), model.state_dict()
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key


def test_a_single_file_is_read_before_an_earlier_index(tmp_path: Path) -> None:
    """As transformers does, which leaves the index of a model that was saved in several files before."""
    model = tiny.made("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = {path: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).exists()
    for remaining in ({}, shards):
        for path, data in remaining.items():
            path.write_bytes(data)
        weights = Folder.read(tmp_path, model).tensors()
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=0)


def test_a_folder_without_a_tensor_of_its_index_is_refused(tmp_path: Path) -> None:
    tiny.made("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    file = min(tmp_path.glob("model-*.safetensors"))
    stored = load_file(file)
    name = min(stored)
    del stored[name]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(cf.ConfigError, match=f"names the tensor {name}, which no file contains; save"):
        hf.load(tmp_path)
    file.unlink()
    with pytest.raises(cf.ConfigError, match=f"names {file.name}, which does not exist; save the model"):
        hf.load(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(cf.ConfigError, match="is damaged; save the model again"):
        hf.load(tmp_path)


def test_what_is_stored_in_half_precision_trains_in_another(tmp_path: Path) -> None:
    model = tiny.made("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for dtype, expected in ((torch.float32, torch.float32), ("auto", torch.bfloat16)):
        state = launched(hf.load(tmp_path, dtype=dtype), cf.schemes.dapple(2, 2))
        for key, tensor in model.state_dict().items():
            assert state[key].dtype is expected
            assert torch.equal(state[key], tensor.to(expected))


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "gemma3", "bert", "modernbert"])
def test_fresh_weights_follow_the_models_own_rules(name: str, tmp_path: Path) -> None:
    """And depend neither on the schedule nor on the cut."""
    model = tiny.made(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    states = [
        launched(hf.load(tmp_path, weights=False), schedule)
        for schedule in (cf.schemes.dapple(2, 2), cf.schemes.chimera(4, 4))
    ]
    for key, tensor in model.state_dict().items():
        assert torch.equal(states[0][key], states[1][key]), key
        assert states[0][key].std().item() == pytest.approx(tensor.std().item(), rel=0.3, abs=1e-3), key
        assert states[0][key].mean().item() == pytest.approx(tensor.mean().item(), abs=0.03), key


def losses_of(model: nn.Module, batches: Any) -> list[float]:
    schedule = cf.schemes.dapple(2, 2)
    pipeline = cf.Pipeline(model, hf.loss, schedule, optimizer=sgd, list_layers=hf.layers)
    return [pipeline.step(*mini_batch).loss for mini_batch in batches]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_model_read_by_stages_trains_as_a_whole_one(name: str, tmp_path: Path) -> None:
    """Also what is not stored (rotary frequencies, position ids) is made."""
    model = tiny.made(name)
    model.save_pretrained(tmp_path)
    batches = [tiny.batch(name, seed=seed) for seed in range(2)]
    results = cf.launch(
        losses_of, hf.load(tmp_path), batches, workers=2, transport="local", timeout_seconds=60
    )[0]
    optimizer = sgd(list(model.parameters()))
    for loss, (inputs, labels) in zip(results, batches, strict=True):
        optimizer.zero_grad()
        expected = model(**inputs, labels=labels).loss
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_new_head_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers as tf

    tiny.made("bert").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = hf.load(tmp_path, auto=tf.AutoModelForTokenClassification, num_labels=3)
    assert "the files have no classifier.weight, classifier.bias; it is initialised" in caplog.text
    state = launched(model, cf.schemes.dapple(2, 2))
    assert state["classifier.weight"].shape == (3, 32)
    assert 0 < state["classifier.weight"].std() < 1


def test_a_head_that_is_not_in_its_own_models_files_is_refused(tmp_path: Path) -> None:
    tiny.made("llama").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(cf.ConfigError, match=r"the files have no lm_head.weight, which the LlamaForCausalLM"):
        hf.load(tmp_path)


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match="is not a model that transformers can read"):
        hf.load(tmp_path / "nowhere")
    model = tiny.made("llama")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(cf.ConfigError, match=r"contains no model.safetensors"):
        hf.load(tmp_path)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(cf.ConfigError, match=r"the files have no model.layers.3.self_attn.q_proj.weight"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 16}))
    with pytest.raises(cf.ConfigError, match=r"has shape \(48, 32\), but \(16, 32\) in the model"):
        launched(hf.load(tmp_path), cf.schemes.dapple(2, 2))
