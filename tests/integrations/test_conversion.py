"""Weights of a run as one file or a folder of transformers, and back: bit by bit the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import counterflow as cf
from counterflow.checkpoints.index import INDEX, Index
from counterflow.errors import ConfigError
from counterflow.integrations.conversion import convert
from tests.checkpoints.test_pipelines import adamw, loss, model, run, trained
from tests.models.hf import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    run(trained, cf.schemes.chimera(2, 4), range(2), None, tmp_path / "run")
    return tmp_path / "run"


def test_into_one_file_and_back(checkpoint: Path, tmp_path: Path) -> None:
    weights = cf.load_weights(checkpoint)
    converted = convert(checkpoint, tmp_path / "weights.safetensors")
    file = load_file(tmp_path / "weights.safetensors")
    assert (converted.tensors, converted.bytes) == (
        len(file),
        (tmp_path / "weights.safetensors").stat().st_size,
    )
    assert file.keys() == weights.keys() - {"5.weight"}  # a tied weight is there once
    torch.testing.assert_close(file, {name: weights[name] for name in file}, rtol=0, atol=0)

    save_file({name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "all.safetensors")
    convert(tmp_path / "all.safetensors", tmp_path / "begin")

    def begin() -> Any:
        pipeline = cf.Pipeline(model(), loss, cf.schemes.dapple(2, 4), optimizer=adamw, seed=9)
        assert cf.load_checkpoint(pipeline, tmp_path / "begin") == 0
        assert (pipeline.steps, pipeline.streams.seed) == (0, 9)
        return pipeline.model_state_dict()

    torch.testing.assert_close(run(begin)[0], weights, rtol=0, atol=0)
    assert not list(tmp_path.glob(".*"))


def test_into_a_folder_of_transformers_and_back(checkpoint: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "x", "torch_dtype": "bfloat16"}))
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights of before")
    convert(checkpoint, tmp_path / "folder", base)
    assert json.loads((tmp_path / "folder" / "config.json").read_text()) == {
        "model_type": "x",
        "dtype": "float64",
    }
    assert {f.name for f in (tmp_path / "folder").iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors"),
    }
    path = checkpoint / "step-2" / INDEX  # a program may have an entry of this name
    path.write_bytes(Index.load(path, "run").model_copy(update={"about": {"config": "my run: 5"}}).dumps())
    convert(checkpoint, tmp_path / "further", base)
    convert(tmp_path / "folder", tmp_path / "again.safetensors")
    weights = cf.load_weights(checkpoint)
    del weights["5.weight"]
    torch.testing.assert_close(load_file(tmp_path / "again.safetensors"), weights, rtol=0, atol=0)


def test_models_of_experts_by_the_names_of_files_and_of_the_model(tmp_path: Path) -> None:
    """Files have tensors of each expert; the model and its checkpoints have one for all."""
    model = tiny.made("mixtral")
    model.save_pretrained(tmp_path / "base")
    expected = model.state_dict()
    convert(tmp_path / "base", tmp_path / "begin")
    torch.testing.assert_close(cf.load_weights(tmp_path / "begin"), expected, rtol=0, atol=0)
    convert(tmp_path / "begin", tmp_path / "folder", tmp_path / "base")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("folder", "base")]
    torch.testing.assert_close(files[0], files[1], rtol=0, atol=0)
    read, info = type(model).from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(read.state_dict(), expected, rtol=0, atol=0)
    convert(tmp_path / "base", tmp_path / "one.safetensors")
    convert(tmp_path / "one.safetensors", tmp_path / "named", tmp_path / "base")
    torch.testing.assert_close(cf.load_weights(tmp_path / "named"), expected, rtol=0, atol=0)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match="its weights are quantized; read them with from_pretrained"):
        convert(tmp_path / "base", tmp_path / "quantized")
    with pytest.raises(ConfigError, match="its weights are quantized, and are read as they are"):
        cf.models.hf.load(tmp_path / "base")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", lambda w: {f"0.{name}": w[name] for name in w}, r"has no 0\.lm_head"),
        ("llama", lambda w: w | {"model.norm.weight": torch.ones(3)}, r"norm\.weight of shape \(32,\), the"),
        (
            "llama",
            lambda w: _without(w, "model.norm.weight"),
            "has model.norm.weight, which the checkpoint does",
        ),
        ("llama", lambda w: w | {"model.layers.7.x": torch.ones(3)}, "has no model.layers.7.x, which the"),
        (
            "llama",
            lambda w: _without(w, "lm_head.weight"),
            "has lm_head.weight, which the checkpoint does not",
        ),
        ("llama", lambda w: _without(w, "lm_head.weight") | {"score.weight": torch.ones(2, 32)}, None),
        ("gpt2", lambda w: w | {"transformer.h.0.attn.bias": torch.ones(3)}, None),
        ("gpt2", lambda w: _without(w, "lm_head.weight"), None),
        ("gpt2", lambda w: {name.removeprefix("transformer."): w[name] for name in w}, None),
    ],
)
def test_a_folder_has_the_tensors_of_its_model(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], dict[str, Any]], message: str | None
) -> None:
    """But for heads of others, a second name of a tied weight, and what transformers ignores."""
    model = tiny.made(kind)
    model.save_pretrained(tmp_path / "base")
    weights = {name: tensor.clone() for name, tensor in change(dict(model.state_dict())).items()}
    save_file(weights, tmp_path / "all.safetensors")
    convert(tmp_path / "all.safetensors", tmp_path / "begin")
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            convert(tmp_path / "begin", tmp_path / "new" / "folder", tmp_path / "base")
        assert not (tmp_path / "new").exists()
        return
    convert(tmp_path / "begin", tmp_path / "folder", tmp_path / "base")
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    torch.testing.assert_close(stored, weights, rtol=0, atol=0)


def _without(weights: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: weights[key] for key in weights if key != name}


def test_a_folder_that_was_saved_in_several_files_before(tmp_path: Path) -> None:
    """The single file counts, as for transformers; a tensor that only the index has is refused."""
    model = tiny.made("llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    shutil.copytree(tmp_path / "sharded", tmp_path / "base")
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "base", tmp_path / "begin")
    torch.testing.assert_close(cf.load_weights(tmp_path / "begin"), dict(model.state_dict()), rtol=0, atol=0)
    shard = min((tmp_path / "sharded").glob("model-*.safetensors"))
    stored = load_file(shard)
    del stored[min(stored)]
    save_file(stored, shard, {"format": "pt"})
    for name in ("a.safetensors", "a"):
        with pytest.raises(ConfigError, match="which no file contains; save the model again"):
            convert(tmp_path / "sharded", tmp_path / name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: convert(p / "run", p / "run"), "exists already; name a new file or folder"),
        (lambda p: convert(p / "none", p / "x.safetensors"), "no such file or folder"),
        (lambda p: convert(p / "none.safetensors", p / "x"), "no such file"),
        (lambda p: convert(p / "run", p / "x"), "needs the model's config, but '.' has no config.json; give"),
        (lambda p: convert(p / "run", p / "x.safetensors", p), "a safetensors file contains weights only"),
        (lambda p: convert(_text(p / "x.safetensors"), p / "y"), "cannot be read as safetensors"),
    ],
)
def test_what_cannot_be_converted(
    checkpoint: Path, tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    before = sorted(checkpoint.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)
    assert sorted(checkpoint.rglob("*")) == before


def _text(path: Path) -> Path:
    path.write_text("no tensors")
    return path
