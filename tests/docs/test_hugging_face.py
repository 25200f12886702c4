"""docs/hugging-face.md: its programs run, and what comes of them is what one process makes of it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as tf

import counterflow as cf
from counterflow.integrations.conversion import convert
from counterflow.training import load_config
from counterflow.training.folder import read_metrics
from counterflow.training.job import prepare, rate_factor

from ..cli.conftest import Run
from ..cli.conftest import run as printed
from .test_pages import blocks

__all__ = ["printed"]

PAGE = "hugging-face.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which the page's first program has run."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(blocks(PAGE, "python")[0], {})
    return folder


def test_a_run_from_folder_to_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, printed: Run) -> None:
    monkeypatch.chdir(folder)
    config, adapters = blocks(PAGE, "toml")
    (folder / "tune.toml").write_text(config)
    here = ["pipeline.transport=local", "train.threads=1", "train.evaluate_every=0"]
    given = load_config("tune.toml", here)
    (command,) = re.findall(r"^\$ counterflow (.*)$", "".join(blocks(PAGE, "console")), re.MULTILINE)
    done = printed(command, *(word for key in here for word in ("--set", key)))
    assert done.code == 0, done.err
    found = [line["loss"] for line in read_metrics(Path("tuned")) if "loss" in line]
    assert found[-1] < 0.9 * found[0]

    read = tf.LlamaForCausalLM.from_pretrained("tuned/model").state_dict()
    weights = cf.load_weights("tuned")
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    tf.AutoTokenizer.from_pretrained("tuned/model")
    convert(Path("tuned"), Path("converted"))
    again = tf.LlamaForCausalLM.from_pretrained("converted").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    tf.AutoTokenizer.from_pretrained("converted")

    model, job = tf.LlamaForCausalLM.from_pretrained("base").train(), prepare(given)
    optimizer = job.optimizer(list(model.parameters()))
    for step, loss in enumerate(found[:8]):
        inputs, labels = job.bundle.batches.batch(step, given.train.samples)
        assert isinstance(inputs, dict)
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * rate_factor(given.optimizer, given.train.steps, step)
        optimizer.zero_grad()
        expected = model(**inputs, labels=labels, use_cache=False).loss
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-4)

    (folder / "lora.toml").write_text(config.replace('"tuned"', '"adapted"') + adapters)
    job = prepare(load_config("lora.toml", here))
    assert sum(p.requires_grad for layer in job.layers for p in layer.parameters()) == 2 * 2 * 4


def test_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cf, "launch", partial(cf.launch, transport="local"))
    exec(blocks(PAGE, "python")[1], {"__name__": "__main__"})
    found = re.search(r"^loss ([\d.]+) -> ([\d.]+)\n", capsys.readouterr().out, re.MULTILINE)
    assert found
    assert float(found[2]) < float(found[1])
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "from-python")
    base = tf.AutoModelForCausalLM.from_pretrained(folder / "base")
    assert not torch.equal(model.lm_head.weight, base.lm_head.weight)
