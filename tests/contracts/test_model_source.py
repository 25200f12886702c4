"""What every model source has to do: the same checks for each that registers, and for one of a user's."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.data.text_batches import NextByte
from counterflow.errors import ConfigError
from counterflow.models import next_token_loss
from counterflow.training import RunConfig, load_config, source_registry
from counterflow.training.job import operations, prepare
from counterflow.training.load import SECTIONS
from counterflow.training.run import run
from counterflow.training.source import AVERAGED, ModelAndData, ModelSource

from ..models.hf import tiny

TEXTS = [f"a text, number {number}, that says {'more and ' * (number % 7)}nothing." for number in range(90)]
TEXT = "\n".join(TEXTS).encode()


class Bigrams(ModelSource):
    """A user's: byte to byte, through layers without attention."""

    kinds = ("bigrams",)
    usual_rate = "of bigrams 0.05"

    def learning_rate(self, config: RunConfig) -> float:
        return 0.05

    def make(self, config: RunConfig) -> ModelAndData:
        hidden = config.model.hidden
        with torch.device("meta"):
            between = [
                nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()) for _ in range(config.model.layers)
            ]
            layers = [nn.Embedding(256, hidden), *between, nn.Linear(hidden, 256)]
        batches = NextByte(TEXT, config.model.positions, seed=config.train.seed)
        return ModelAndData(
            layers, None, next_token_loss, batches, "texts", len(TEXT), math.log(256), "a digest"
        )


BIGRAMS = Bigrams()
SOURCES = [*source_registry.sources(), BIGRAMS]

KEYS: dict[str, dict[str, Any]] = {
    "BuiltIn": {"model.kind": "bert", "model.hidden": 16, "model.heads": 2, "model.layers": 3},
    "HuggingFace": {"model.kind": "huggingface", "data.path": "FOLDER/texts.jsonl", "model.path": "FOLDER"},
    "Bigrams": {"model.kind": "bigrams", "model.hidden": 16, "model.layers": 3},
}
"""A small model of each source; one that is registered without a model here fails."""


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    source_registry.register(BIGRAMS)
    yield
    source_registry._SOURCES.remove(BIGRAMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer(TEXTS).save_pretrained(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(params=SOURCES, ids=lambda source: type(source).__name__)
def source(request: pytest.FixtureRequest) -> ModelSource:
    found: ModelSource = request.param
    return found


@pytest.fixture
def config(source: ModelSource, folder: Path, tmp_path: Path) -> RunConfig:
    return small(source, folder, tmp_path / "run")


def small(source: ModelSource, folder: Path, out: Path, **changes: Any) -> RunConfig:
    keys = {
        "model.positions": 12,
        "schedule.scheme": "dapple",
        "schedule.stages": 2,
        "schedule.micro_batches": 2,
        "pipeline.transport": "local",
        "train.steps": 2,
        "train.samples": 4,
        "train.threads": 1,
        "train.ema_decay": 0.5,
        "train.out": str(out),
        **KEYS[type(source).__name__],
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return load_config(sets=[f"{k}={json.dumps(v)}".replace("FOLDER", str(folder)) for k, v in keys.items()])


def test_it_is_found_by_its_kinds_which_no_other_has(source: ModelSource) -> None:
    assert source.kinds
    for kind in (*source.kinds, *source.named):
        assert source_registry.source_of(kind) is source
        assert [kind in (*other.kinds, *other.named) for other in source_registry.sources()].count(True) == 1


LEGAL: dict[str, Any] = {
    "path": "a",
    "fresh": True,
    "dtype": "bfloat16",
    "field": "a",
    "label": "a",
    "samples": "packed",
    "rank": 1,
    "alpha": 1.0,
    "dropout": 0.1,
    "targets": ["a"],
    "experts": 4,
    "experts_per_token": 2,
}
"""A value of each key that only some source has."""


def test_its_keys_exist_and_are_refused_with_other_models(source: ModelSource, folder: Path) -> None:
    for table, names in source.own_keys.items():
        for name in names:
            assert name in SECTIONS[table].keys_known()
            given = {f"{table}__{name}": LEGAL[name]} | ({"lora__rank": 1} if table == "lora" else {})
            rule = rf'^{table}\.({"|".join(names)}): is for model\.kind = "{source.kinds[0]}"'
            for other in SOURCES:
                if name not in other.own_keys.get(table, ()):
                    with pytest.raises(ConfigError, match=rule):
                        small(other, folder, folder / "out", **given)


def test_its_config_is_written_and_read_back_equal(config: RunConfig) -> None:
    assert RunConfig.model_validate(tomllib.loads(config.to_toml())) == config


def test_it_says_how_fast_its_models_learn(source: ModelSource, config: RunConfig) -> None:
    assert config.optimizer.learning_rate == source.learning_rate(config) > 0
    assert source.usual_rate in SECTIONS["optimizer"].keys_known()["learning_rate"].about or source is BIGRAMS


def test_its_layers_are_as_many_as_the_config_says_and_on_the_meta_device(config: RunConfig) -> None:
    job = prepare(config)
    assert len(job.layers) == config.model.all_layers
    assert {p.device.type for layer in job.layers for p in layer.parameters()} == {"meta"}
    assert len(operations(job.bundle, job.layers, 1)) == len(job.layers)
    assert config.model.source.name(config) in job.about.model


def test_it_makes_the_same_in_every_process(config: RunConfig) -> None:
    jobs = prepare(config), prepare(config)
    assert jobs[0].bundle.digest == jobs[1].bundle.digest
    assert jobs[0].about == jobs[1].about
    shapes = [[(n, p.shape) for layer in job.layers for n, p in layer.named_parameters()] for job in jobs]
    assert shapes[0] == shapes[1]


def test_its_mini_batches_are_functions_of_their_number(config: RunConfig) -> None:
    batches = prepare(config).bundle.batches
    same(batches.batch(3, 4), batches.batch(3, 4))
    halves = [batches.batch(3, 2, replica=replica, replicas=2) for replica in range(2)]
    whole = pytree.tree_leaves(batches.batch(3, 4))
    for leaf, *parts in zip(whole, *map(pytree.tree_leaves, halves), strict=True):
        assert torch.equal(leaf, torch.cat(parts))
    same(batches.validation(4), batches.validation(4))


def same(one: Any, other: Any) -> None:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    assert all(isinstance(a, Tensor) and torch.equal(a, b) for a, b in pairs)


def test_it_trains_and_exports_what_it_says(source: ModelSource, config: RunConfig) -> None:
    done = run(config)
    assert done is not None
    summary, folder = done
    assert summary.steps == 2
    assert math.isfinite(summary.training_loss)
    export = prepare(config).bundle.export
    names = [] if export is None else [export[0], export[0] + AVERAGED]
    assert set(names) <= source.exports.keys()
    assert [name for name in source.exports if (folder / name).is_dir()] == names


def test_an_unknown_kind_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown; did you mean 'bigrams'\? Known: .*bigrams"):
        load_config(sets=["model.kind=bigram"])
