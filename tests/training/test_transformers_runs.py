"""Runs of models of transformers: from a folder to a folder, and the numbers of one process between."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torch import Tensor

from counterflow.checkpoints import load_weights
from counterflow.errors import ConfigError
from counterflow.planning.inputs import input_files
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.training import RunConfig, load_config
from counterflow.training.folder import read_metrics
from counterflow.training.job import prepare, rate_factor
from counterflow.training.planned import planned_config
from counterflow.training.profiling import measure
from counterflow.training.run import run

from ..models.hf import tiny
from .conftest import Watcher

TEXTS = [f"a text, number {number}, that says {'more and ' * (number % 7)}nothing." for number in range(90)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a tokenizer, and texts beside it."""
    folder = tmp_path_factory.mktemp("base")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer(TEXTS).save_pretrained(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def config(base: Path, out: Path, **changes: Any) -> RunConfig:
    keys = {
        "model.kind": "huggingface",
        "model.path": str(base),
        "model.positions": 16,
        "data.path": str(base / "texts.jsonl"),
        "schedule.scheme": "chimera",
        "schedule.stages": 2,
        "schedule.micro_batches": 4,
        "pipeline.transport": "local",
        "optimizer.learning_rate": 0.01,
        "train.steps": 4,
        "train.samples": 8,
        "train.threads": 1,
        "train.evaluate_every": 0,
        "train.out": str(out),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return load_config(sets=[f"{name}={json.dumps(value)}" for name, value in keys.items()])


def alone(model: Any, given: RunConfig) -> list[float]:
    """The losses of one process, with transformers' own loss, of the same mini-batches."""
    job = prepare(given)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    samples = given.train.samples * given.pipeline.replicas
    for step in range(given.train.steps):
        inputs: dict[str, Tensor]
        inputs, labels = job.bundle.batches.batch(step, samples)  # type: ignore[assignment]
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * rate_factor(given.optimizer, given.train.steps, step)
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.pipeline.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("samples", ["packed", "padded"])
def test_a_run_is_what_one_process_does(base: Path, tmp_path: Path, samples: str) -> None:
    given = config(base, tmp_path / "run", data__samples=samples)
    watcher = Watcher()
    assert run(given, watcher) is not None
    assert watcher.about is not None
    assert watcher.about.unit == "token"
    assert watcher.about.text_bytes == sum(map(len, TEXTS))
    assert load_config(tmp_path / "run" / "config.toml") == given
    model = tf.LlamaForCausalLM.from_pretrained(base).train()
    found = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert found == pytest.approx(alone(model, given), rel=1e-5)
    read = tf.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=1e-4, msg=name)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer(TEXTS[0])["input_ids"] == tiny.tokenizer(TEXTS)(TEXTS[0])["input_ids"]


ROWS = [{"text": text, "label": "long" if number % 7 > 2 else "short"} for number, text in enumerate(TEXTS)]


def saved(folder: Path, model: Any) -> Path:
    """A folder with a model, a tokenizer that masks, and texts with labels beside it."""
    model.save_pretrained(folder)
    tiny.tokenizer(TEXTS, masks=True).save_pretrained(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


CLASSES: dict[str, Any] = {"num_labels": 2, "id2label": {0: "short", 1: "long"}}


@pytest.mark.parametrize(
    ("kind", "options", "changes", "target"),
    [
        ("BertForMaskedLM", {}, {}, "token"),
        ("RobertaForMaskedLM", {}, {"data__samples": "padded", "pipeline__replicas": 2}, "token"),
        ("BertForSequenceClassification", CLASSES, {"schedule__scheme": "zb-h1"}, "label"),
    ],
)
def test_masked_models_and_classifiers_are_what_one_process_does(
    tmp_path: Path, kind: str, options: Any, changes: dict[str, Any], target: str
) -> None:
    base = saved(tmp_path / "base", tiny.bert(kind, **options))
    given = config(base, tmp_path / "run", train__steps=3, train__samples=4, **changes)
    watcher = Watcher()
    run(given, watcher)
    assert watcher.about is not None
    assert watcher.about.target == target
    assert watcher.about.unigram_entropy < (0.7 if target == "label" else 5)
    model = getattr(tf, kind).from_pretrained(base).train()
    found = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert found == pytest.approx(alone(model, given), rel=1e-5)
    read = getattr(tf, kind).from_pretrained(tmp_path / "run" / "model").state_dict()
    for name, tensor in model.state_dict().items():
        if not name.endswith("key.bias"):  # a softmax does not see it, so that its gradient is rounding
            torch.testing.assert_close(read[name], tensor, rtol=0, atol=1e-4, msg=name)


def test_positions_that_roberta_keeps_for_padding_are_none_of_a_samples(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", tiny.bert("RobertaForMaskedLM"))
    sets = ["model.kind=huggingface", f"model.path={base}", f"data.path={base}"]
    assert load_config(sets=sets).model.positions == 31
    with pytest.raises(ConfigError, match=r"model.positions = 32: the model in .* accepts 31 or fewer"):
        config(base, tmp_path / "run", model__positions=32)


def test_adapters_of_a_masked_model_and_of_a_classifier(tmp_path: Path) -> None:
    """The classifier's head is trained with them, as by peft."""
    for kind in ("BertForMaskedLM", "BertForSequenceClassification"):
        base = saved(tmp_path / kind, tiny.bert(kind, **CLASSES))
        run(
            config(base, tmp_path / f"{kind}-run", train__steps=2, lora__rank=2, lora__targets=["query"]),
            Watcher(),
        )
        model = peft.PeftModel.from_pretrained(
            getattr(tf, kind).from_pretrained(base), tmp_path / f"{kind}-run" / "adapter"
        )
        state = model.state_dict()
        assert sum("lora_B" in name and bool(tensor.any()) for name, tensor in state.items()) == 3
        heads = [name for name in state if "modules_to_save" in name]
        assert len(heads) == (2 if "Class" in kind else 0)
        for name in heads:
            assert not torch.equal(
                state[name], state[name.replace("modules_to_save.default", "original_module")]
            )


def test_what_is_profiled_is_planned_and_trained(base: Path, tmp_path: Path) -> None:
    """By the three files and the plan's, as the commands hand them on: nothing of the config is lost."""
    given = config(
        *(base, tmp_path / "run"),
        lora__rank=2,
        lora__targets=["q_proj"],
        data__samples="padded",
        train__steps=2,
        optimizer__name="adam",
        optimizer__betas=[0.8, 0.9],
        pipeline__clip_norm=0.5,
    )
    found = measure(given, sizes=(1,), workers=1, repeats=1)
    adapters = 3 * 2 * (32 + 32)  # three layers, rank 2
    whole = sum(p.numel() for p in tiny.llama().parameters()) + adapters
    assert found.model.optimizer_states == pytest.approx(2)  # Adam's, of what is trained
    frozen = sum(found.profile.layer(kind).frozen_bytes for kind in found.model.layers)
    assert frozen == 4 * (whole - adapters)
    (tmp_path / "model.toml").write_text(input_files.dumps(found.model))
    model = input_files.load_model(tmp_path / "model.toml")
    assert model == found.model
    cluster = dataclasses.replace(found.cluster, devices=2)
    plans = search(model, found.profile, cluster, 8, Constraints(schemes=("dapple",), depths=(2,)))
    planned = planned_config(model, found.profile, cluster, plans.best[0].play.prediction())
    odd = dataclasses.replace(model, optimizer_states=6.0, config={})
    with pytest.raises(ConfigError, match="optimizer_states = 6: no known optimiser has this number"):
        planned_config(odd, found.profile, cluster, plans.best[0].play.prediction())
    (tmp_path / "plan.toml").write_text(planned.to_toml())
    read = load_config(tmp_path / "plan.toml", ["pipeline.transport=local", f"train.out={tmp_path / 'run'}"])
    assert planned.train.out is None  # a plan is trained in a folder of its own
    assert (read.model, read.data, read.lora, read.optimizer) == (
        *(given.model, given.data, given.lora, given.optimizer),
    )
    assert (read.train, read.pipeline.clip_norm) == (given.train, 0.5)
    assert (read.schedule.scheme, read.build_schedule().workers) == ("dapple", 2)
    run(read, Watcher())
    assert (tmp_path / "run" / "adapter").is_dir()


def test_a_run_of_adapters(base: Path, tmp_path: Path) -> None:
    """And one that goes on from its checkpoint ends with the same adapters."""
    keys = {"lora__rank": 4, "lora__targets": ["q_proj", "v_proj"], "optimizer__schedule": "constant"}
    run(config(base, tmp_path / "run", **keys), Watcher())
    run(config(base, tmp_path / "half", train__steps=2, optimizer__warmup_steps=1, **keys), Watcher())
    going_on = {"train__resume": str(tmp_path / "half"), "optimizer__warmup_steps": 1}
    run(config(base, tmp_path / "rest", **going_on, **keys), Watcher())
    assert not (tmp_path / "run" / "model").exists()
    states = []
    for name in ("run", "rest"):
        model = peft.PeftModel.from_pretrained(
            tf.LlamaForCausalLM.from_pretrained(base), tmp_path / name / "adapter"
        )
        states.append(model.state_dict())
    first, second = states
    changed = [name for name in first if "lora_B" in name and first[name].abs().max() > 0]
    assert len(changed) == 2 * 3
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_run_with_averaged_weights_writes_both_models(base: Path, tmp_path: Path) -> None:
    run(config(base, tmp_path / "run", **{"train.ema_decay": 0.5}), Watcher())
    average = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model-ema").state_dict()
    trained = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    expected = load_weights(tmp_path / "run", ema=True)
    assert average.keys() == trained.keys()
    for name, value in average.items():
        assert torch.equal(value, expected[name])
        assert not torch.equal(value, trained[name])


def test_fresh_weights(base: Path, tmp_path: Path) -> None:
    """Made anew; the folder needs none then."""
    bare = tmp_path / "bare"
    tf.AutoConfig.from_pretrained(base).save_pretrained(bare)
    tf.AutoTokenizer.from_pretrained(base).save_pretrained(bare)
    with pytest.raises(ConfigError, match=r"contains no model.safetensors"):
        prepare(config(bare, tmp_path / "run", data__path=str(base / "texts.jsonl")))
    given = config(
        bare, tmp_path / "run", model__fresh=True, data__path=str(base / "texts.jsonl"), train__steps=1
    )
    summary, _ = run(given, Watcher())  # type: ignore[misc]
    assert 4 < summary.training_loss < 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__layers": 2}, "model.layers: the model in model.path defines it"),
        ({"model__positions": 64}, "model.positions = 64: the model in .* accepts 32 or fewer"),
        ({"model__path": "nowhere"}, "nowhere: is not a model that transformers can read"),
        ({"model__kind": "gpt"}, r'model.path: is for model.kind = "huggingface", but model.kind is "gpt"'),
        ({"lora__alpha": 2.0}, "lora.alpha: lora.rank is not given"),
        ({"schedule__scheme": "pipedream-2bw"}, "choose a synchronous scheme"),
        ({"schedule__stages": 6}, "the model has 5 layers, fewer than the 6 stages"),
    ],
)
def test_configs_that_cannot_run_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(base, tmp_path / "run", **changes)


def test_a_model_without_attention_is_refused(base: Path, tmp_path: Path) -> None:
    tf.MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="its MambaConfig has no num_attention_heads; only models of attention"
    ):
        config(base, tmp_path / "run", model__path=str(tmp_path))


def test_what_only_the_folder_shows_is_refused_before_workers_start(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets: no adapters can be made: .*nothing"):
        prepare(config(base, tmp_path / "run", lora__rank=2, lora__targets=["nothing"]))
    tokens = tmp_path / "tokens"
    tiny.made("bert-tokens").save_pretrained(tokens)
    with pytest.raises(ConfigError, match="is a BertForTokenClassification, but `counterflow train` trains"):
        prepare(config(tokens, tmp_path / "run", data__path=str(base / "texts.jsonl")))
    masked = tmp_path / "masked"
    tiny.bert("BertForMaskedLM").save_pretrained(masked)
    tiny.tokenizer(TEXTS).save_pretrained(masked)
    with pytest.raises(ConfigError, match="masked: the tokenizer has no mask token"):
        prepare(config(masked, tmp_path / "run", data__path=str(base / "texts.jsonl")))
    with pytest.raises(ConfigError, match=r"data.label: is for classifiers of texts, but .*LlamaForCausalLM"):
        prepare(config(base, tmp_path / "run", data__label="class"))
    classes = saved(tmp_path / "classes", tiny.bert("BertForSequenceClassification", num_labels=3))
    for changes, message in (
        ({"data__samples": "packed"}, "a classifier predicts the class of one text at a time"),
        ({"data__label": "class"}, r"its rows have no 'class'; name the one with the label as data.label"),
        ({}, r"the label 'short' of a text is not one of the model's 3 classes; .*'LABEL_0', 'LABEL_1'"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(config(classes, tmp_path / "run", **changes))
    values = saved(tmp_path / "values", tiny.bert("BertForSequenceClassification", num_labels=1))
    with pytest.raises(ConfigError, match="predicts values or several labels"):
        prepare(config(values, tmp_path / "run"))
    untold = tmp_path / "untold"
    tiny.llama(100).save_pretrained(untold)
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        prepare(config(untold, tmp_path / "run", data__path=str(base / "texts.jsonl")))
    tiny.tokenizer(TEXTS).save_pretrained(untold)
    with pytest.raises(ConfigError, match=r"its tokenizer has \d+ tokens, but the model has 100"):
        prepare(config(untold, tmp_path / "run", data__path=str(base / "texts.jsonl")))


def test_other_models_need_no_keys_of_these() -> None:
    with pytest.raises(ConfigError, match=r'data.field: is for model.kind = "huggingface"'):
        load_config(sets=["data.field=body"])
    assert "huggingface" not in load_config().to_toml()


def test_transformers_is_imported_only_for_its_models() -> None:
    code = (
        "import sys, counterflow.training.run, counterflow.cli; from counterflow.models import hf;"
        "hf.layers, hf.load, hf.save, hf.loss; bad = {'transformers', 'peft', 'datasets'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
